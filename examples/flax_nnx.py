"""A Flax NNX model: split it into graph and parameters, and give jaxpar the parameters.

python examples/flax_nnx.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar


class Mlp(nnx.Module):
    """Two linear layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def init(rng):
    """Parameters as nested dicts."""
    return nnx.to_pure_dict(nnx.state(Mlp(nnx.Rngs(rng)), nnx.Param))


def loss(params, batch, rng):
    """Summed squared error of this shard's rows, and their number."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Mlp(nnx.Rngs(0))))
    model = nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, params)))
    error = model(batch["x"]) - batch["y"]
    return jnp.sum(error**2), error.shape[0], {}


def main() -> None:
    """Fit a random linear map."""
    rules = jaxpar.Rules(
        [
            ("up/kernel", ("features", "hidden")),
            ("up/bias", ("hidden",), "bias"),
            ("down/kernel", ("hidden", "targets")),
            ("down/bias", ("targets",), "bias"),
        ],
        axes={"hidden": "model", "features": None, "targets": None},
    )
    par = jaxpar.parallelize(
        loss, init, optax.adam(1e-2), mesh=jaxpar.make_mesh("4x2"), rules=rules, zero=1
    )
    state, data = par.init(0), np.random.default_rng(0)
    truth = data.normal(size=(16, 4)).astype(np.float32)
    for step in range(100):
        x = data.normal(size=(64, 16)).astype(np.float32)
        state, metrics = par.step(state, {"x": x, "y": x @ truth})
        if step % 20 == 0 or step == 99:
            print(
                f"step {step:3}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}"
            )


if __name__ == "__main__":
    main()
