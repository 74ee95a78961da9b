"""An Equinox model through the second door: embed, one block scanned over stacked layers, head.

    python examples/equinox_staged.py

`Staged` lets ZeRO 3 gather one layer at a time and remat wrap each block. The functions see whole arrays; the compiler
splits them over `model` as the rules say.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar


class Block(eqx.Module):
    """x + mlp(x)."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.up = eqx.nn.Linear(32, 64, key=a)
        self.down = eqx.nn.Linear(64, 32, key=b)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


static = eqx.filter(
    eqx.filter_eval_shape(Block, jax.random.key(0)), eqx.is_array_like, inverse=True
)


def init(rng):
    """Four stacked blocks between an input and an output map."""
    first, blocks, last = jax.random.split(rng, 3)
    stack = eqx.filter_vmap(Block)(jax.random.split(blocks, 4))
    return {
        "embed": jax.random.normal(first, (16, 32)) / 4,
        "blocks": eqx.filter(stack, eqx.is_array),
        "head": jax.random.normal(last, (32, 4)) / 6,
    }


def embed(params, batch, rng):
    """Rows to width 32."""
    return batch["x"] @ params["embed"]


def block(layer, x, batch, rng):
    """One Equinox block over the rows."""
    return jax.vmap(eqx.combine(layer, static))(x)


def head(params, x, batch):
    """Summed squared error of this shard's rows, and their number."""
    error = x @ params["head"] - batch["y"]
    return jnp.sum(error**2), error.shape[0], {}


def main() -> None:
    """Fit a random linear map."""
    rules = jaxpar.Rules(
        [
            ("blocks/up/weight", ("layers", "hidden", "width")),
            ("blocks/up/bias", ("layers", "hidden"), "bias"),
            ("blocks/down/weight", ("layers", "width", "hidden")),
            ("blocks/down/bias", ("layers", "width"), "bias"),
            ("embed", ("features", "width")),
            ("head", ("width", "targets")),
        ],
        axes={"hidden": "model"} | dict.fromkeys(("layers", "width", "features", "targets")),
    )
    par = jaxpar.parallelize(
        jaxpar.Staged(embed=embed, block=block, head=head),
        init,
        optax.adam(3e-3),
        mesh=jaxpar.make_mesh("4x2"),
        rules=rules,
        zero=3,
        remat="full",
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
