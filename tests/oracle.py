"""The one-device reference that every sharded run must equal. It imports no jaxpar.

In: a config (any object with the fields of `Config`), parameters of true shapes, a batch.
Out: losses, gradients, and whole training runs.
Why: an oracle that shares no code with the engine cannot share its mistakes. So: full logits, a
Python loop over layers, attention with the whole S x S matrix, AdamW in numpy. Slow and obvious.

Everything is computed in the dtype of the parameters: float64 when they are float64 (and jax has
64-bit types switched on).

Letters: B batch, S sequence, E embed, H heads, K kv heads, D head size, F mlp, V vocab, L layers,
P positions.

Sources: Llama (Touvron et al. 2023, section 2.2), RoPE (Su et al. 2021, equation 34, in the
half-split order of Hugging Face's Llama), SwiGLU (Shazeer 2020), GQA (Ainslie et al. 2023), GPT-2
(Radford et al. 2019), z-loss (Chowdhery et al. 2022, section 5), AdamW (Loshchilov and Hutter
2019).
"""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

IGNORED = -100

Tree = dict[str, Any]
Batch = Mapping[str, Any]


class Config(NamedTuple):
    """The fields of a decoder config that change its numbers; hashable, so jit can key on it."""

    style: str
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    positions: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @classmethod
    def of(cls, other: Any) -> "Config":
        """The same fields read from any object that has them."""
        return cls(*(getattr(other, field) for field in cls._fields))


class Run(NamedTuple):
    """What a run leaves: a loss and a gradient norm (before clipping) for each step, the state."""

    losses: list[float]
    grad_norms: list[float]
    skipped: int
    params: Tree
    mu: Tree
    nu: Tree
    count: int


def shapes(cfg: Any) -> Tree:
    """The parameter tree, with a shape at each leaf. Leaves under "blocks" are stacked over L."""
    L, E, H, K, D = cfg.layers, cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim
    F, V, P = cfg.mlp, cfg.vocab, cfg.positions
    tree: Tree = {
        "embed": {"tokens": (V, E)},
        "blocks": {
            "attention_norm": {"scale": (L, E)},
            "attention": {
                "query": (L, E, H, D),
                "key": (L, E, K, D),
                "value": (L, E, K, D),
                "out": (L, H, D, E),
            },
            "mlp_norm": {"scale": (L, E)},
            "mlp": {"up": (L, E, F), "down": (L, F, E)},
        },
        "final_norm": {"scale": (E,)},
    }
    if cfg.style == "llama":
        tree["blocks"]["mlp"]["gate"] = (L, E, F)
    else:
        tree["embed"]["positions"] = (P, E)
        for norm in (tree["blocks"]["attention_norm"], tree["blocks"]["mlp_norm"]):
            norm["bias"] = (L, E)
        tree["final_norm"]["bias"] = (E,)
        tree["blocks"]["attention"] |= {
            "query_bias": (L, H, D),
            "key_bias": (L, K, D),
            "value_bias": (L, K, D),
            "out_bias": (L, E),
        }
        tree["blocks"]["mlp"] |= {"up_bias": (L, F), "down_bias": (L, E)}
    if not cfg.tied:
        tree["head"] = {"kernel": (E, V)}
    return tree


def init_params(cfg: Any, seed: int, dtype: Any = np.float64) -> Tree:
    """Random numpy parameters at which no gradient is trivial.

    Norm scales are not one and biases are not zero: at one and zero a lost scale or bias would not
    show. Matrices have variance 1/fan-in, so that activations neither vanish nor explode.
    """
    rng = np.random.default_rng(seed)
    fan_in = {"out": cfg.heads * cfg.head_dim, "down": cfg.mlp}

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        name = path.rsplit("/", 1)[-1]
        noise = rng.standard_normal(shape)
        if name == "scale":
            value = 1.0 + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif path.startswith("embed/"):
            value = 0.5 * noise
        else:
            value = noise / np.sqrt(fan_in.get(name, cfg.embed))
        return value.astype(dtype)

    return unflatten({path: draw(path, shape) for path, shape in flatten(shapes(cfg)).items()})


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Nested dicts to one dict of "a/b/c" paths, in sorted order.

    >>> flatten({"b": 1, "a": {"x": 2}})
    {'a/x': 2, 'b': 1}
    """
    flat: dict[str, Any] = {}
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """The inverse of `flatten`.

    >>> unflatten({"a/x": 2, "b": 1})
    {'a': {'x': 2}, 'b': 1}
    """
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension."""
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * scale + bias over the last dimension, with the biased var."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred / jnp.sqrt(variance + eps) * scale + bias


def rotate(x: jax.Array, positions: Any, theta: float) -> jax.Array:
    """RoPE on (..., S, N, D): elements i and i + D/2 turn by position * theta^(-2i/D) radians."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=x.dtype) / half)
    angle = jnp.asarray(positions, x.dtype)[:, None, None] * frequency
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal softmax(q k / sqrt(D)) v: (B,S,H,D), (B,S,K,D), (B,S,K,D) -> (B,S,H,D).

    Query head h reads key and value head h // (H / K).
    """
    length, heads, size = query.shape[1:]
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bshd,bthd->bhst", query, key) / math.sqrt(size)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    scores = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = scores / jnp.sum(scores, axis=-1, keepdims=True)
    return jnp.einsum("bhst,bthd->bshd", weights, value)


def logits(params: Tree, tokens: Any, cfg: Any) -> jax.Array:
    """(B,S) token ids -> (B,S,V) logits over the true vocabulary."""
    params = jax.tree.map(jnp.asarray, params)
    tokens = jnp.asarray(tokens)
    length = tokens.shape[1]
    llama = cfg.style == "llama"

    def norm(x: jax.Array, p: Tree) -> jax.Array:
        if llama:
            return rms_norm(x, p["scale"], cfg.norm_eps)
        return layer_norm(x, p["scale"], p["bias"], cfg.norm_eps)

    x = params["embed"]["tokens"][tokens]
    if not llama:
        x = x + params["embed"]["positions"][:length]

    for layer in range(cfg.layers):
        block = jax.tree.map(operator.itemgetter(layer), params["blocks"])

        p = block["attention"]
        y = norm(x, block["attention_norm"])
        query, key, value = (
            jnp.einsum("bse,ehd->bshd", y, p[name]) for name in ("query", "key", "value")
        )
        if llama:
            query = rotate(query, np.arange(length), cfg.rope_theta)
            key = rotate(key, np.arange(length), cfg.rope_theta)
        else:
            query, key = query + p["query_bias"], key + p["key_bias"]
            value = value + p["value_bias"]
        y = jnp.einsum("bshd,hde->bse", attend(query, key, value), p["out"])
        x = x + y if llama else x + y + p["out_bias"]

        p = block["mlp"]
        y = norm(x, block["mlp_norm"])
        if llama:
            gate = y @ p["gate"]
            x = x + (gate / (1 + jnp.exp(-gate)) * (y @ p["up"])) @ p["down"]
        else:
            y = y @ p["up"] + p["up_bias"]
            y = 0.5 * y * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + y @ p["down"] + p["down_bias"]

    x = norm(x, params["final_norm"])
    return x @ (params["embed"]["tokens"].T if cfg.tied else params["head"]["kernel"])


def token_losses(params: Tree, batch: Batch, cfg: Any, z_loss: float = 0.0) -> jax.Array:
    """(B,S) cross-entropy + z_loss * logsumexp^2 of each target; exactly 0 where it is ignored."""
    scores = logits(params, batch["tokens"], cfg)
    targets = jnp.asarray(batch["targets"])
    valid = targets != IGNORED
    top = jnp.max(scores, axis=-1, keepdims=True)
    normaliser = jnp.log(jnp.sum(jnp.exp(scores - top), axis=-1)) + top[..., 0]
    picked = jnp.take_along_axis(scores, jnp.where(valid, targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(valid, normaliser - picked + z_loss * normaliser**2, 0)


def loss(params: Tree, batch: Batch, cfg: Any, z_loss: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """(sum of the losses of the valid targets, number of valid targets)."""
    weight = jnp.sum(jnp.asarray(batch["targets"]) != IGNORED)
    return jnp.sum(token_losses(params, batch, cfg, z_loss)), weight


def value_and_grad(
    params: Tree, batch: Batch, cfg: Any, z_loss: float = 0.0
) -> tuple[float, Tree, float]:
    """(mean loss, its gradient as numpy, the gradient's global norm).

    With no valid target the loss is 0 and so is every gradient.
    """
    arrays = {name: jnp.asarray(batch[name]) for name in ("tokens", "targets")}
    value, grads = _mean_and_grad(jax.tree.map(jnp.asarray, params), arrays, Config.of(cfg), z_loss)
    grads = jax.tree.map(np.asarray, grads)
    return float(value), grads, global_norm(grads)


def _mean(params: Tree, batch: Batch, cfg: Config, z_loss: float) -> jax.Array:
    total, weight = loss(params, batch, cfg, z_loss)
    return total / jnp.maximum(weight, 1)


_mean_and_grad = jax.jit(jax.value_and_grad(_mean), static_argnums=2)


def global_norm(tree: Tree) -> float:
    """Square root of the sum of squares of every element of every leaf, summed in float64."""
    leaves = flatten(tree).values()
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves)))


def adamw(
    params: Tree,
    grads: Tree,
    mu: Tree,
    nu: Tree,
    count: int,
    lr: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: Collection[str] = (),
) -> tuple[Tree, Tree, Tree, int]:
    """One AdamW update; `count` updates were applied before it. -> (params, mu, nu, count + 1).

    Decoupled decay, lr * weight_decay * parameter, falls on exactly the paths in `decay`. A path
    there that is no parameter raises KeyError: a misspelt path would silently decay nothing.
    """
    flat_params = flatten(params)
    for path in decay:
        if path not in flat_params:
            raise KeyError(f"decay path {path!r} is no parameter; there are {list(flat_params)}")
    flat_grads, flat_mu, flat_nu = flatten(grads), flatten(mu), flatten(nu)
    count += 1
    new_params, new_mu, new_nu = {}, {}, {}
    for path, parameter in flat_params.items():
        grad = flat_grads[path]
        first = b1 * flat_mu[path] + (1 - b1) * grad
        second = b2 * flat_nu[path] + (1 - b2) * grad * grad
        step = (first / (1 - b1**count)) / (np.sqrt(second / (1 - b2**count)) + eps)
        if path in decay:
            step = step + weight_decay * parameter
        new_params[path] = (parameter - lr * step).astype(parameter.dtype)
        new_mu[path], new_nu[path] = first, second
    return unflatten(new_params), unflatten(new_mu), unflatten(new_nu), count


def clip(grads: Tree, norm: float, limit: float | None) -> Tree:
    """Gradients scaled so that their global norm is at most `limit` (None: unchanged)."""
    if limit is None or norm <= limit:
        return grads
    return jax.tree.map(lambda leaf: (leaf * (limit / norm)).astype(leaf.dtype), grads)


def run(
    params: Tree,
    batches: Iterable[Batch],
    cfg: Any,
    *,
    lr: float | Callable[[int], float],
    clip_norm: float | None = None,
    z_loss: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: Collection[str] = (),
) -> Run:
    """Train on each batch in turn with AdamW.

    `lr` may be a function of the number of updates applied so far. A batch whose gradient is not
    finite, or that has no valid target, changes nothing but `skipped`: it is no update, so neither
    the moments nor the schedule see it.
    """
    params = jax.tree.map(np.array, params)
    mu = jax.tree.map(np.zeros_like, params)
    nu = jax.tree.map(np.zeros_like, params)
    losses, norms, skipped, count = [], [], 0, 0
    for batch in batches:
        value, grads, norm = value_and_grad(params, batch, cfg, z_loss)
        losses.append(value)
        norms.append(norm)
        if not np.isfinite(norm) or np.all(np.asarray(batch["targets"]) == IGNORED):
            skipped += 1
            continue
        rate = float(lr(count)) if callable(lr) else lr
        grads = clip(grads, norm, clip_norm)
        params, mu, nu, count = adamw(
            params, grads, mu, nu, count, rate, b1, b2, eps, weight_decay, decay
        )
    return Run(losses, norms, skipped, params, mu, nu, count)


def batch_of(
    cfg: Any, seed: int, rows: int, length: int, valid: Callable[[int], int] | None = None
) -> dict[str, np.ndarray]:
    """A random batch in which row r has `valid(r)` valid targets at random places.

    By default the rows have unequal numbers, so that a mean of means is not the mean.
    """
    rng = np.random.default_rng(seed)
    sequence = rng.integers(0, cfg.vocab, (rows, length + 1), dtype=np.int32)
    targets = sequence[:, 1:].copy()
    for row in range(rows):
        keep = valid(row) if valid else 1 + (5 * row) % length
        targets[row, rng.permutation(length)[keep:]] = IGNORED
    return {"tokens": sequence[:, :-1].copy(), "targets": targets}
