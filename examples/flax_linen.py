"""A Flax Linen model: its `init` and `apply` are already functions of a dict of parameters.

python examples/flax_linen.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar


class Mlp(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="down")(nn.gelu(nn.Dense(64, name="up")(x)))


model = Mlp()


def init(rng):
    """Linen's own initialiser."""
    return model.init(rng, jnp.zeros((1, 16)))["params"]


def loss(params, batch, rng):
    """Summed squared error of this shard's rows, and their number."""
    error = model.apply({"params": params}, batch["x"]) - batch["y"]
    return jnp.sum(error**2), error.shape[0], {}


def main() -> None:
    """Fit a random linear map; kernels decay, biases do not (`decay_mask` goes by role)."""
    rules = jaxpar.Rules(
        [
            ("up/kernel", ("features", "hidden")),
            ("down/kernel", ("hidden", "targets")),
            ("up/bias", ("hidden",), "bias"),
            ("down/bias", ("targets",), "bias"),
        ],
        axes={"hidden": "model", "features": None, "targets": None},
    )
    par = jaxpar.parallelize(
        loss,
        init,
        lambda layout: optax.adamw(1e-2, weight_decay=1e-3, mask=layout.decay_mask()),
        mesh=jaxpar.make_mesh("replica=2,data=2,model=2"),
        rules=rules,
        zero=2,
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
