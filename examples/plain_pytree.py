"""A plain pytree and a plain loss on a data x model mesh: two-layer network, tensor split by rules, ZeRO 3.

    python examples/plain_pytree.py            # simulates 8 devices where there is one CPU

The loss is written for whole arrays: it knows nothing of meshes. The rules say that `hidden` lies on `model`; the
compiler splits the two products accordingly.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar


def init(rng):
    """Parameters of a regression from 16 features to 4 targets."""
    up, down = jax.random.split(rng)
    return {
        "up": {"kernel": jax.random.normal(up, (16, 64)) / 4, "bias": jnp.zeros(64)},
        "down": {"kernel": jax.random.normal(down, (64, 4)) / 8, "bias": jnp.zeros(4)},
    }


def loss(params, batch, rng):
    """Summed squared error of this shard's rows, and their number."""
    hidden = jax.nn.gelu(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    error = hidden @ params["down"]["kernel"] + params["down"]["bias"] - batch["y"]
    return jnp.sum(error**2), error.shape[0], {"abs_error": (jnp.abs(error).sum(), error.size)}


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
    mesh = jaxpar.make_mesh("4x2")
    par = jaxpar.parallelize(
        loss, init, optax.adam(1e-2), mesh=mesh, rules=rules, zero=3, microbatches=2, clip_norm=1.0
    )
    print(par.layout)
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
