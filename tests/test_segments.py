"""Packed rows: attention stays within a document, on every path, and costs nothing where no row is packed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import jaxpar
from jaxpar.config import ModelConfig
from jaxpar.models import decoder
from jaxpar.ops.attention import causal_attention

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-9
SEQ = 16
PAD = 40
"""A token that stands in padding alone."""

PACKING = [(5, 7, 4), (4, 5), (7, 1, 7), (4, 4, 7), (7, 5), (), (16,), (1, 1, 1)]
"""Lengths of the documents of each row; the rest of a row is padding."""


def model(style: str, **changes) -> ModelConfig:
    shape = {
        "style": style, "layers": 2, "embed": 32, "heads": 8, "kv_heads": 4 if style == "llama" else 8, "head_dim": 4,
        "mlp": 64, "vocab": 41, "positions": 24, "tied": False, "dropout": 0.0,
    }  # fmt: skip
    return ModelConfig(**{**shape, **changes})


def packed() -> dict[str, np.ndarray]:
    """A batch of the rows of `PACKING`, about one target in four ignored."""
    random = np.random.default_rng(0)
    shape = (len(PACKING), SEQ)
    batch = {
        "tokens": np.full(shape, PAD, np.int32),
        "targets": np.full(shape, oracle.IGNORED, np.int32),
        "segments": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
    }
    for row, lengths in enumerate(PACKING):
        at = 0
        for number, length in enumerate(lengths, 1):
            place = (row, slice(at, at + length))
            batch["tokens"][place] = random.integers(0, PAD, length)
            targets = random.integers(0, PAD, length)
            batch["targets"][place] = np.where(random.random(length) < 0.25, -100, targets)
            batch["segments"][place] = number
            batch["positions"][place] = np.arange(length)
            at += length
    return batch


def documents() -> dict[str, np.ndarray]:
    """The same documents, each in a row of its own, filled up behind its end: a causal model does not read that."""
    batch, rows = packed(), []
    for row, lengths in enumerate(PACKING):
        at = 0
        for length in lengths:
            rows.append(
                {name: batch[name][row, at : at + length] for name in ("tokens", "targets")}
            )
            at += length
    return {
        name: np.stack(
            [np.pad(r[name], (0, SEQ - r[name].size), constant_values=fill) for r in rows]
        )
        for name, fill in (("tokens", 0), ("targets", oracle.IGNORED))
    }


@functools.cache
def alone(style: str):
    """(mean loss, its gradient) of the documents run one by one."""
    config = model(style)
    return oracle.value_and_grad(oracle.init_params(config, seed=1), documents(), config)[:2]


@pytest.mark.parametrize(
    ("mesh", "style", "remat", "chunks", "sequence_parallel"),
    [
        pytest.param("1", "llama", "none", 1, True, marks=pytest.mark.core),
        ("1", "gpt2", "full", 4, True),
        ("4x2", "gpt2", "none", 1, True),
        ("4x2", "llama", "full", 2, False),
        ("2x4", "gpt2", "full", 2, True),
        pytest.param("2x4", "llama", "none", 4, True, marks=pytest.mark.core),
    ],
)
def test_packed_rows_are_their_documents_one_by_one(mesh, style, remat, chunks, sequence_parallel):
    """Loss and every gradient leaf; a row of padding alone adds nothing and is finite."""
    config = model(style)
    staged, init, rules = decoder.make(
        config, attention_chunks=chunks, sequence_parallel=sequence_parallel
    )
    devices = jax.devices()[: 1 if mesh == "1" else 8]
    par = jaxpar.parallelize(
        staged, init, optax.sgd(1.0), mesh=jaxpar.make_mesh(mesh, devices=devices), rules=rules, zero=1, remat=remat,
        precision="float64",
    )  # fmt: skip
    loss, _, grads = par.gradients(par.load(oracle.init_params(config, seed=1)), packed())
    want, want_grads = alone(style)
    assert float(loss) == pytest.approx(want, rel=TOLERANCE)
    got = oracle.flatten(jax.tree.map(np.asarray, grads))
    want_grads = oracle.flatten(want_grads)
    assert list(got) == list(want_grads)
    for path, leaf in want_grads.items():
        # A key bias has gradient 0 but for rounding: it is measured by the query bias.
        scale = np.abs(want_grads[path.replace("key_bias", "query_bias")]).max()
        np.testing.assert_allclose(got[path], leaf, rtol=0, atol=TOLERANCE * scale, err_msg=path)
    assert (got["embed/tokens"][PAD] == 0).all()


@pytest.mark.core
@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize(("chunks", "dropout"), [(1, 0.0), (4, 0.0), (1, 0.3), (2, 0.3)])
def test_a_token_of_one_document_changes_nothing_of_another(style, chunks, dropout):
    """Exactly: what is masked has weight 0, not almost 0."""
    config = model(style, dropout=dropout)
    staged, _, _ = decoder.make(config, attention_chunks=chunks)
    params = jax.tree.map(jnp.asarray, oracle.init_params(config, seed=1))
    rng = jax.random.key(0) if dropout else None

    @jax.jit
    def activations(batch):
        x = staged.embed(params, batch, rng)
        for i in range(config.layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
            x = staged.block(layer, x, batch, rng)
        return decoder.normed(config, params, x) @ params["head"]["kernel"]

    batch = packed() | {"row_id": np.arange(len(PACKING))}
    changed = batch["tokens"].copy()
    changed[:, 0] = (changed[:, 0] + 1) % PAD  # the first token of the first document
    before = activations(batch)
    after = activations(batch | {"tokens": changed})
    first = batch["segments"] == 1
    first[5] = False  # padding alone
    others = ~first
    others[5] = False
    np.testing.assert_array_equal(before[others], after[others])
    assert (np.asarray(before[first]) != np.asarray(after[first])).any(-1).sum() > first.sum() / 2


def reference(q, k, v, segments, keep, rate):
    """Attention with the whole mask, in plain jax.numpy."""
    seq, heads = q.shape[1:3]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    seen = np.tril(np.ones((seq, seq), bool)) & (segments[:, :, None] == segments[:, None, :])
    scores = jnp.einsum("bqhd,bshd->bhqs", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    if keep is not None:
        weights = jnp.where(keep, weights / rate, 0)
    return jnp.einsum("bhqs,bshd->bqhd", weights, v)


@pytest.mark.parametrize("rate", [1.0, 0.7])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_attention_and_its_gradients_with_dropout_and_grouped_heads(chunks, rate):
    random = np.random.default_rng(chunks)
    shape = (len(PACKING), SEQ)
    q = random.normal(size=(*shape, 4, 4))
    k, v = random.normal(size=(2, *shape, 2, 4))
    segments = packed()["segments"]
    keep = random.random((len(PACKING), 4, SEQ, SEQ)) < rate if rate < 1 else None
    out = random.normal(size=q.shape)

    def both(function):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.vdot(function(*x), out), (0, 1, 2)))

    def ours(q, k, v):
        return causal_attention(
            q, k, v, chunks=chunks, segments=jnp.asarray(segments), keep=keep, keep_rate=rate
        )

    got = both(ours)(q, k, v)
    want = both(lambda q, k, v: reference(q, k, v, segments, keep, rate))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), got, want)


def kept(capsys, segments, chunks):
    """Types of what the backward pass of attention keeps, arguments left out."""
    x = jnp.ones((len(PACKING), SEQ, 2, 4))

    def loss(q, k, v):
        return causal_attention(q, k, v, chunks=chunks, segments=segments).sum()

    jax.ad_checkpoint.print_saved_residuals(loss, x, x, x)
    lines = capsys.readouterr().out.splitlines()
    return sorted(line.split()[0] for line in lines if "from the argument" not in line)


@pytest.mark.parametrize("chunks", [1, 4])
def test_no_mask_is_kept_for_the_backward_pass(chunks, capsys):
    segments = jnp.asarray(packed()["segments"])
    with_segments, without = (kept(capsys, s, chunks) for s in (segments, None))
    square = [t for t in with_segments if t.endswith(f",{SEQ}]") and t.count(",") > 2]
    assert square == [t for t in without if t.endswith(f",{SEQ}]") and t.count(",") > 2]
    assert not [t for t in with_segments if t.startswith("bool")]


def operations(jaxpr, counts):
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] = counts.get(equation.primitive.name, 0) + 1
        inside = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        )
        for inner in (getattr(v, "jaxpr", v) for v in inside if hasattr(v, "eqns")):
            operations(inner, counts)
    return counts


@pytest.mark.core
@pytest.mark.parametrize("chunks", [1, 4])
def test_without_segments_nothing_is_compared(chunks):
    """The program is that of a decoder that knows no segments: one comparison a chunk, with the diagonal."""
    x = jax.ShapeDtypeStruct((2, SEQ, 2, 4), jnp.float32)
    segments = jax.ShapeDtypeStruct((2, SEQ), jnp.int32)

    def count(*extra):
        def run(q, k, v, *s):
            return causal_attention(q, k, v, chunks=chunks, **({"segments": s[0]} if s else {}))

        return operations(jax.make_jaxpr(run)(x, x, x, *extra).jaxpr, {})

    with_segments, without = count(segments), count()
    assert (without.get("eq", 0), without.get("and", 0)) == (0, 0)
    assert (without["ge"], with_segments["ge"], with_segments["eq"]) == (chunks, chunks, chunks)
