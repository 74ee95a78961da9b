"""One token at a time with a cache equals the whole text at once, on every mesh."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import jaxpar
from jaxpar.config import ModelConfig
from jaxpar.models import decoder
from jaxpar.models.decoding import Decoder, both
from jaxpar.plan import hlo
from jaxpar.sample import Choice, Sampler

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-9
COUNT = 6
BUCKET = 16
GREEDY = Choice(temperature=0.0)


def model(**changes) -> ModelConfig:
    shape = {
        "style": "llama", "layers": 2, "embed": 32, "heads": 8, "kv_heads": 4, "head_dim": 4, "mlp": 64, "vocab": 65,
        "positions": 40, "tied": False, "dropout": 0.1,
    }  # fmt: skip
    return ModelConfig(**{**shape, **changes})


def mesh_of(spec: str) -> jaxpar.Mesh:
    sizes = [int(n) for n in spec.split("x")]
    return jaxpar.make_mesh(spec, devices=jax.devices()[: math.prod(sizes)])


@functools.cache
def sampler_of(config: ModelConfig, mesh: str, **options) -> Sampler:
    """A sampler of the oracle's parameters; its programs are compiled once for all tests."""
    options = {"precision": "float64", **options}
    return Sampler(config, mesh_of(mesh), oracle.init_params(config, seed=1), **options)


def prompts(config: ModelConfig, *lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(0, config.vocab, n) for n in lengths]


@functools.cache
def _full(config: oracle.Config):
    params = oracle.init_params(config, seed=1)
    return jax.jit(lambda tokens: oracle.logits(params, tokens, config))


def expected(config: ModelConfig, rows, written) -> np.ndarray:
    """Logits (rows, COUNT, vocab) at each written token: the oracle's forward pass over the whole of each text."""
    texts = np.zeros((4, BUCKET + 1 + COUNT), np.int32)
    for text, row, new in zip(texts, rows, written, strict=False):
        text[: len(row) + COUNT] = [*row, *new]
    found = np.asarray(_full(oracle.Config.of(config))(texts))
    return np.stack(
        [f[len(row) - 1 : len(row) - 1 + COUNT] for f, row in zip(found, rows, strict=False)]
    )


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param("1x1", {}, marks=pytest.mark.core),
        ("1x1", {"style": "gpt2", "kv_heads": 8, "tied": True}),
        ("1x4", {"kv_heads": 2}),
        ("1x4", {"style": "gpt2", "kv_heads": 8}),
        ("2x4", {"kv_heads": 1, "tied": True}),
        pytest.param("2x4", {"style": "gpt2", "kv_heads": 8, "tied": True}, marks=pytest.mark.core),
    ],
    ids=str,
)
def test_logits_with_the_cache_are_those_of_the_full_forward_pass(mesh, changes):
    """Greedy, prompts of four lengths in one batch, kv heads fewer than `model`, a vocabulary that does not divide."""
    config = model(**changes)
    rows = prompts(config, 1, BUCKET - 1, BUCKET, BUCKET + 1)
    sampler = sampler_of(config, mesh)
    table, lengths = sampler._table(rows, 2 * BUCKET)
    logits, cache = jax.jit(sampler.decoder.prefill, static_argnums=3)(
        sampler.params, table, lengths, 2 * BUCKET + 8
    )
    step = jax.jit(sampler.decoder.step)
    seen, written = [], []
    for i in range(COUNT):
        seen.append(np.asarray(logits)[:, : config.vocab])
        written.append(seen[-1].argmax(-1).astype(np.int32))
        logits, cache = step(sampler.params, cache, written[-1], lengths + i)
    want = expected(config, rows, np.stack(written, 1))
    assert np.stack(written, 1).tolist() == want.argmax(-1).tolist()
    scale = np.abs(want).max()
    np.testing.assert_allclose(np.stack(seen, 1), want, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.parametrize("length", [1, BUCKET - 1, BUCKET, BUCKET + 1])
def test_greedy_tokens_around_the_edge_of_a_bucket(length):
    config = model()
    rows = prompts(config, length)
    written = sampler_of(config, "1x1").generate(rows, COUNT, choice=GREEDY)
    want = expected(config, rows, written)
    assert [w.tolist() for w in written] == want.argmax(-1).tolist()


def test_greedy_tokens_of_prompts_that_the_batch_axes_do_not_divide():
    """Three prompts on four devices along `data`, two along `model`."""
    config = model(kv_heads=1)
    rows = prompts(config, 3, BUCKET, 9)
    written = sampler_of(config, "4x2").generate(rows, COUNT, choice=GREEDY)
    want = expected(config, rows, written)
    assert [w.tolist() for w in written] == want.argmax(-1).tolist()


def draws(mesh: str, choice: Choice, *, seed: int = 0, rows: int = 3) -> list[list[int]]:
    config = model()
    given = prompts(config, 5, 9, 2)[:rows]
    out = sampler_of(config, mesh).generate(given, 8, choice=choice, seed=seed)
    return [tokens.tolist() for tokens in out]


@pytest.mark.parametrize(
    ("choice", "meshes"),
    [
        (Choice(), ["1x4"]),
        (Choice(temperature=1.3, top_k=20, top_p=0.9), ["4x2"]),
    ],
    ids=str,
)
def test_a_seed_gives_the_same_tokens_on_every_mesh(choice, meshes):
    one = draws("1x1", choice)
    for mesh in meshes:
        assert draws(mesh, choice) == one
    assert draws("1x1", choice, seed=1) != one


def test_what_a_seed_gives_does_not_depend_on_later_prompts():
    assert draws("1x1", Choice(), rows=2) == draws("1x1", Choice())[:2]


def test_padding_of_the_vocabulary_is_never_drawn():
    """65 tokens on model=4 are stored as 68; at this temperature each of them would have its turn."""
    config = model()
    sampler = sampler_of(config, "1x4")
    assert sampler.decoder.leaves["head"]["kernel"].stored[1] == 68
    out = np.stack(sampler.generate([[1]] * 64, 20, choice=Choice(temperature=1e6)))
    assert out.max() == 64
    assert len(np.unique(out)) == 65


def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    config = model()
    sampler = sampler_of(config, "1x1", vocab=50)
    out = np.stack(sampler.generate([[1]] * 64, 8, choice=Choice(temperature=1e6)))
    assert out.max() == 49


@pytest.mark.parametrize("zero", [0, 3])
def test_the_state_of_a_training_run_is_sampled_where_it_lies(zero):
    """Whole leaves are shared and not copied; shards of ZeRO 3 are gathered over data and stay split over model."""
    config = model()
    staged, init, rules = decoder.make(config)
    params = oracle.init_params(config, seed=1)
    par = jaxpar.parallelize(
        staged,
        init,
        optax.adam(1e-3),
        mesh=mesh_of("2x4"),
        rules=rules,
        zero=zero,
        precision="float64",
    )
    state = par.load(params)
    sampler = Sampler(config, par.mesh, state.params, precision="float64")
    shared = [
        a is b for a, b in zip(*map(jax.tree.leaves, (sampler.params, state.params)), strict=True)
    ]
    assert all(shared) if zero == 0 else not all(shared)
    rows = prompts(config, 4)
    (got,) = sampler.generate(rows, COUNT, choice=GREEDY)
    (want,) = sampler_of(config, "1x1").generate(rows, COUNT, choice=GREEDY)
    assert got.tolist() == want.tolist()
    assert not any(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_no_device_holds_the_whole_model():
    config = model()
    sampler = sampler_of(config, "1x4")
    names = (
        "blocks/attention/query",
        "blocks/mlp/up",
        "blocks/mlp/down",
        "embed/tokens",
        "head/kernel",
    )
    for path, leaf in oracle.flatten(sampler.params).items():
        shard = leaf.addressable_shards[0].data
        assert (shard.size * 4 == leaf.size) == (not path.endswith("scale")), path
    assert set(names) <= set(oracle.flatten(sampler.params))


def test_one_compilation_of_each_program_and_lengths_share_them():
    config = model()
    sampler = sampler_of(config, "1x1")
    before = sampler.first._cache_size(), sampler.next._cache_size()
    for length in (3, 9, 5):
        sampler.generate(prompts(config, length), 7, choice=Choice(temperature=0.5))
    after = sampler.first._cache_size(), sampler.next._cache_size()
    assert after == (before[0] + 1, before[1] + 1)


def compiled_step(mesh: str, batch: int = 4, places: int = 64, **changes):
    """(sampler, compiled decode step in float32, bytes of the whole cache)."""
    sampler = sampler_of(model(**changes), mesh, precision="float32")
    row = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=sampler.mesh.sharding())
    config, kv = sampler.config, max(sampler.config.kv_heads, sampler.mesh.size("model"))
    split = jax.sharding.NamedSharding(sampler.mesh.jax_mesh, sampler.decoder.cache_spec)
    shape = (config.layers, batch, places, kv, config.head_dim)
    half = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)
    lowered = sampler.next.lower(
        sampler.params, both(half), row, row, jax.random.key(0), np.int32(1), choice=GREEDY
    )
    return sampler, lowered.compile(), 2 * math.prod(shape) * 4


@pytest.mark.core
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_decode_step_gathers_nothing_over_model_but_the_logits_of_one_token(kv_heads):
    """Two all-reduces of one token's activations a layer, one of its embedding, and the logits."""
    sampler, compiled, _ = compiled_step("2x4", kv_heads=kv_heads)
    found = hlo.collectives(compiled.as_text(), sampler.mesh.jax_mesh)
    # By the size of the groups: where XLA moves an array between two splits, it names the axes itself.
    model_axis = [c for c in found if c.group == 4]
    assert {c.group for c in found} == {2, 4}
    gathers = [c for c in model_axis if c.kind != "all-reduce"]
    rows, config = 2, sampler.config
    assert [(c.kind, c.payload, c.times) for c in gathers] == [("all-gather", rows * 68 * 4, 1)]
    reduced = sum(c.payload * c.times for c in model_axis if c.kind == "all-reduce")
    assert reduced == (2 * config.layers + 1) * rows * config.embed * 4
    # Over data, the token of every row and nothing else.
    assert sum(c.payload * c.times for c in found if c.group == 2) <= 4 * 4


@pytest.mark.parametrize("mesh", ["1x1", "1x4"])
def test_the_cache_is_written_in_its_place(mesh):
    """Donated, and no second one beside it."""
    _, compiled, nbytes = compiled_step(mesh, places=4096, layers=8)
    local = nbytes // math.prod(int(n) for n in mesh.split("x"))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= local
    # One layer's keys and values at a time are taken out of it, an eighth.
    assert memory.temp_size_in_bytes < local / 4


def test_a_bfloat16_run_decodes_in_bfloat16():
    config = model()
    sampler = sampler_of(config, "1x4", precision="bf16")
    assert {x.dtype for x in jax.tree.leaves(sampler.params)} == {jnp.dtype("bfloat16")}
    table, lengths = sampler._table(prompts(config, 9), BUCKET)
    decode = Decoder(config, sampler.mesh)
    logits, cache = jax.jit(decode.prefill, static_argnums=3)(
        sampler.params, table, lengths, BUCKET
    )
    assert (logits.dtype, cache.key.dtype) == (jnp.float32, jnp.bfloat16)


def test_without_the_cache_the_tokens_are_the_same():
    config = model()
    sampler = sampler_of(config, "1x1")
    rows = prompts(config, 3, 11)
    both = [
        np.stack(list(sampler.stream(rows, COUNT, seed=5, cache=c))).tolist() for c in (True, False)
    ]
    assert both[0] == both[1]
