"""Any mesh, ZeRO stage, accumulation and remat gives the loss and gradients of one device.

In float64, where rounding is far below any real defect, every row of the covering matrix
(tests/pairs.csv) is compared with the oracle. `zero`, `mesh` and the rest are columns of a row.
"""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import oracle
import pairs
import pytest

import jaxpar
from jaxpar.config import ModelConfig
from jaxpar.models import decoder

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-9
ROWS, LENGTH = 32, 16  # 32 rows: 8 shards of 4 microbatches
STEPS, RATE = 3, 1e-3

# One row a mesh, with every ZeRO stage among them.
CORE = {("8x1", "2"), ("4x2", "3"), ("2x4", "1"), ("1x8", "3"), ("replica=2,data=2,model=2", "0")}


def model_config(row):
    return ModelConfig(
        style=row["style"],
        layers=2,
        embed=32,
        heads=8,
        kv_heads=int(row["kv_heads"]),
        head_dim=4,
        mlp=64,
        vocab=int(row["vocab"]),
        positions=24,  # more than the sequence: the rest must get gradient zero
        rope_theta=10000.0,
        norm_eps=1e-5,
        tied=row["tied"] == "True",
        dropout=0.0,
    )


def parameters():
    for row in pairs.read():
        marks = [pytest.mark.core] if (row["mesh"], row["zero"]) in CORE else []
        yield pytest.param(row, marks=marks, id="-".join(row.values()))


@pytest.fixture(scope="module", params=parameters())
def case(request, x64):
    """One row, built: the parallel step, its parameters, a batch of unequal rows, the config."""
    row = request.param
    config = model_config(row)
    z_loss = float(row["z_loss"])
    staged, init, rules = decoder.make(
        config,
        loss_chunks=int(row["loss_chunks"]),
        z_loss=z_loss,
        sequence_parallel=row["sequence_parallel"] == "True",
    )
    devices = jax.devices()[:1] if row["mesh"] == "1" else jax.devices()
    par = jaxpar.parallelize(
        staged,
        init,
        optax.adamw(RATE, weight_decay=0.0),
        mesh=jaxpar.make_mesh(row["mesh"], devices=devices),
        rules=rules,
        zero=int(row["zero"]),
        microbatches=int(row["microbatches"]),
        remat=row["remat"],
        precision="float64",
        small=int(row["small"]),
    )
    return SimpleNamespace(
        par=par,
        config=config,
        z_loss=z_loss,
        params=oracle.init_params(config, seed=1),
        batch=oracle.batch_of(config, 2, ROWS, LENGTH),
    )


def errors(got, want):
    """path -> max |difference| / max |wanted leaf|, over trees of equal structure and shapes.

    The gradient of a key bias is zero but for rounding (softmax does not see what is added to
    every score of a query), so it is measured by that of the query bias.
    """
    got, want = oracle.flatten(got), oracle.flatten(want)
    assert list(got) == list(want)
    found = {}
    for path, leaf in want.items():
        assert got[path].shape == leaf.shape, path
        assert got[path].dtype == leaf.dtype, path
        scale = np.max(np.abs(want[path.replace("key_bias", "query_bias")]))
        found[path] = float(np.max(np.abs(np.asarray(got[path]) - leaf)) / scale)
    return found


def too_large(got, want):
    return {path: error for path, error in errors(got, want).items() if not error <= TOLERANCE}


def test_loss_norm_and_every_gradient_leaf_equal_one_device(case):
    loss, norm, grads = case.par.gradients(case.par.load(case.params), case.batch)
    want_loss, want_grads, want_norm = oracle.value_and_grad(
        case.params, case.batch, case.config, case.z_loss
    )
    assert float(loss) == pytest.approx(want_loss, rel=TOLERANCE)
    assert float(norm) == pytest.approx(want_norm, rel=TOLERANCE)
    assert too_large(jax.tree.map(np.asarray, grads), want_grads) == {}


def unequal_copies(tree):
    """Paths of leaves of which two devices hold the same part with different bits."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        parts = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            if parts.setdefault(str(shard.index), bits) != bits:
                found.append(jax.tree_util.keystr(path))
                break
    return found


def test_three_steps_keep_copies_equal_shardings_pinned_and_compile_once(case):
    """T9, Z2, Z3; and the updated parameters equal those of one device."""
    state = case.par.load(case.params)
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    losses, norms = [], []
    for _ in range(STEPS):
        state, metrics = case.par.step(state, case.batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))

    assert unequal_copies((state.params, state.opt_state)) == []
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == before
    assert case.par.cache_size() == 1
    assert (int(state.step), int(state.skipped)) == (STEPS, 0)

    want = oracle.run(case.params, [case.batch] * STEPS, case.config, lr=RATE, z_loss=case.z_loss)
    np.testing.assert_allclose(losses, want.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(norms, want.grad_norms, rtol=TOLERANCE)
    params = jax.tree.map(np.asarray, case.par.unpad(state).params)
    assert too_large(params, want.params) == {}
