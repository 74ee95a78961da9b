"""Every remat policy gives the gradients of none; what is kept is what its name says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import policies
from jaxpar.config import ModelConfig
from jaxpar.models import decoder

pytestmark = pytest.mark.usefixtures("x64")

CONFIG = ModelConfig(layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, vocab=64)
BATCH = {
    name: np.random.default_rng(seed).integers(0, 64, (8, 16), np.int32)
    for seed, name in enumerate(("tokens", "targets"))
}


def gradients(remat: str, zero: int):
    staged, init, rules = decoder.make(CONFIG)
    par = jaxpar.parallelize(
        staged, init, optax.sgd(1.0), mesh=jaxpar.make_mesh("4x2"), rules=rules, zero=zero, remat=remat,
        precision="float64", small=0,
    )  # fmt: skip
    return par.gradients(par.init(0), BATCH)


@pytest.mark.parametrize("zero", [0, 3])
def test_every_policy_gives_the_gradients_of_none(zero):
    loss, norm, grads = gradients("none", zero)
    for remat in (
        "dots",
        "block_inputs",
        "full",
        "save:attention,mlp_input",
        "offload:mlp_input,query",
    ):
        other = gradients(remat, zero)
        assert np.isclose(other[0], loss, rtol=1e-13), remat
        assert np.isclose(other[1], norm, rtol=1e-13), remat
        close = jax.tree.map(
            lambda a, b: np.allclose(a, b, rtol=1e-10, atol=1e-14), other[2], grads
        )
        assert jax.tree.all(close), remat


@pytest.mark.core
def test_an_opaque_loss_under_full_remat_computes_its_products_again_behind_a_barrier():
    """Its two passes share one computation, in which a compiler may merge what is equal: a barrier keeps them apart.

    Read before compiling: the CPU compiler drops barriers, and merges them after all.
    """

    def loss(params, batch, rng):
        x = batch["x"]
        for i in range(8):
            x = jnp.sin(x @ params["w"][i])
        return jnp.sum(x**2), x.shape[0], {}

    def text(remat):
        par = jaxpar.parallelize(
            loss,
            {"w": jax.ShapeDtypeStruct((8, 64, 64), jnp.float64)},
            optax.sgd(1.0),
            mesh=jaxpar.make_mesh("8x1"),
            rules=jaxpar.Rules(
                [("w", ("stack", "in", "out"))], axes=dict.fromkeys(("stack", "in", "out"))
            ),
            remat=remat,
            precision="float64",
        )
        return par.lower({"x": jax.ShapeDtypeStruct((512, 64), jnp.float64)}).as_text()

    none, full = (text(remat) for remat in ("none", "full"))
    # Eight products forward and sixteen backward, less the one for x; all eight outputs are read again.
    assert none.count("stablehlo.dot_general") == 23
    assert full.count("stablehlo.dot_general") == 23 + 8
    assert "optimization_barrier" in full
    assert "optimization_barrier" not in none


@pytest.mark.core
def test_an_unknown_policy_or_activation_is_refused_by_name():
    for bad, message in (
        ("ful", "did you mean full"),
        ("save:", "is not one of"),
        ("save:a,,b", "no activation is called ''"),
        ("dots:a", "is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            policies.parse(bad)
    with pytest.raises(ValueError, match="no activation is called 'gat'; there are up, gate"):
        policies.parse("offload:gat", ("up", "gate"))
