"""The forms that a checkpoint can take, and the way between them.

| form          | blocks                                                | what is in it                               |
|---------------|-------------------------------------------------------|---------------------------------------------|
| `stacked`     | ``params/blocks/mlp/up`` (layers, ...), as runs save  | all                                         |
| `layers`      | ``params/blocks/0/mlp/up``, one leaf a layer, moments too | all                                     |
| `weights`     | stacked                                               | parameters and masters                      |
| `safetensors` | ``blocks.0.mlp.up``: one file, for other programs     | parameters, from the masters if there are any |

`Checkpoints.restore` reads the first three. Values are verified when read and bitwise the same afterwards, unless a
dtype is asked for.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxpar import fingerprint
from jaxpar.checkpoint import arrays, files, restoring
from jaxpar.checkpoint.files import CheckpointError
from jaxpar.checkpoint.restoring import Source, layer_name
from jaxpar.checkpoint.store import save
from jaxpar.staged import BLOCKS

FORMS = ("stacked", "layers", "weights", "safetensors")


def convert(
    source: pathlib.Path, target: pathlib.Path, form: str, dtype: str | None = None
) -> pathlib.Path:
    """Write a checkpoint in another form; needs memory for all of it on the host.

    Args:
        source: one complete checkpoint.
        target: a folder of checkpoints, in which a new one of the same step is made; for safetensors a file.
        dtype: of the floating point weights; only for `weights` and `safetensors`.

    Returns:
        The path of what was written.

    Raises:
        CheckpointError: the source is damaged, the target exists, or the dtype cannot be had.
    """
    if form not in FORMS:
        raise CheckpointError(f"form {form!r} is not one of {', '.join(FORMS)}")
    weights = form in ("weights", "safetensors")
    if dtype is not None and not weights:
        raise CheckpointError(
            f"--dtype {dtype} would part parameters from their moments; it is for weights and safetensors"
        )
    wanted = None if dtype is None else _dtype(dtype)
    meta = files.read_meta(source)
    sources = restoring.sources(source, meta)
    kept = {n: s for n, s in sources.items() if not weights or _root(n) in ("params", "masters")}
    if not kept:
        raise CheckpointError(f"{source} has no parameters to make {form} from")
    if form == "safetensors":
        return _to_safetensors(source, target, kept, meta, wanted)
    path = target.absolute() / str(meta["step"])
    if path.exists():
        raise CheckpointError(f"{path} is there already; nothing is written over")
    chosen = kept if wanted is None else _weights(kept)
    values = {n: _cast(read(source, s, meta["fingerprints"]), wanted) for n, s in chosen.items()}
    described = {"name": "stacked", "weights": weights or meta["form"]["weights"]}
    if form == "layers":
        described |= {"name": "layers", "stacked": stacked(chosen)}
        values = _layers(values, stacked(chosen))
    added = ("fingerprints", "versions", "saved_at", "metric")
    rest = {key: value for key, value in meta.items() if key not in added}
    return save(target, meta["step"], values, {**rest, "form": described}, metric=meta["metric"])


def stacked(sources: Mapping[str, Source]) -> dict[str, int]:
    """Leaf -> number of layers, of every leaf with a layer in each row: parameters of blocks and what follows them.

    A moment follows the parameter whose path ends its own, if it has as many rows. Where one has them by chance, it is
    split and put together again all the same.
    """
    layers = {
        n.removeprefix("params/"): s.whole.shape[0]
        for n, s in sources.items()
        if n.startswith(f"params/{BLOCKS}/") and s.whole.shape
    }
    found = {}
    for name, source in sources.items():
        at = f"/{name}".rfind(f"/{BLOCKS}/")
        count = layers.get(name[at:]) if at >= 0 else None
        if count is not None and source.whole.shape[:1] == (count,):
            found[name] = count
    return found


def read(path: pathlib.Path, source: Source, prints: Mapping[str, str]) -> np.ndarray:
    """One leaf in numpy, verified and stacked; needs no device.

    Raises:
        Damaged: it cannot be read, or is not what was saved.
    """
    parts = arrays.read(path, dict.fromkeys(source.names, source.part), {})
    restoring.verify(path, {n: fingerprint.on_host(x) for n, x in parts.items()}, prints)
    xs = [parts[n] for n in source.names]
    return np.stack(xs) if source.stacked else xs[0]


def _layers(values: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, x in values.items():
        if name in counts:
            out |= {layer_name(name, i): x[i] for i in range(counts[name])}
        else:
            out[name] = x
    return out


def _weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters at their full precision: masters under the names of parameters, where there are any."""
    params = {n: x for n, x in values.items() if _root(n) == "params"}
    masters = {n: x for n, x in values.items() if _root(n) == "masters"}
    return params | {n.replace("masters/", "params/", 1): x for n, x in masters.items()}


def _to_safetensors(
    source: pathlib.Path,
    target: pathlib.Path,
    kept: Mapping[str, Source],
    meta: Mapping[str, Any],
    dtype: np.dtype | None,
) -> pathlib.Path:
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: the file's name ends in .safetensors")
    if target.exists():
        raise CheckpointError(f"{target} is there already; nothing is written over")
    chosen = _weights(kept)
    values = {n: _cast(read(source, s, meta["fingerprints"]), dtype) for n, s in chosen.items()}
    plain = _layers(values, stacked(chosen))
    tensors = {
        n.removeprefix("params/").replace("/", "."): np.ascontiguousarray(x)
        for n, x in plain.items()
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f"{target.name}.tmp")
    about = {"format": "jaxpar", "step": str(meta["step"])}
    try:
        safetensors.numpy.save_file(tensors, new, about)
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)
    return target


def _cast(x: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    return x if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


def _dtype(name: str) -> np.dtype:
    try:
        wanted = jnp.dtype(name)
    except TypeError as error:
        raise CheckpointError(f"--dtype {name} is no element type; bfloat16 is one") from error
    if not jnp.issubdtype(wanted, jnp.floating):
        raise CheckpointError(f"--dtype {name}: weights are floating point; bfloat16 works")
    return wanted


def _root(name: str) -> str:
    return name.split("/")[0]
