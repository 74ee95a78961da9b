"""A batch: a dict of arrays whose first dimension is rows, checked before it is split over the devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.mesh import Mesh


def with_row_ids(batch: Mapping[str, Any], mesh: Mesh, microbatches: int) -> dict[str, Any]:
    """`batch` with global row ids under ``row_id``, from which a loss derives its randomness.

    Args:
        batch: arrays or ShapeDtypeStructs of all rows, over all devices and microbatches.

    Raises:
        TypeError: not a dict, or a value that is no array of numbers.
        ValueError: arrays with different numbers of rows, or rows that do not divide; says which numbers would.
    """
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise TypeError(f"a batch is a dict of arrays whose first dimension is rows, not {kind}")
    if not batch:
        raise ValueError("a batch holds at least one array; here it is empty")
    for name, x in batch.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            kind = type(x).__name__
            raise TypeError(
                f"{name!r} of the batch is a {kind}; a batch is a flat dict of arrays whose first dimension is rows "
                f"(numpy.asarray makes one of a list)"
            )
        if getattr(x.dtype, "kind", "") in ("O", "S", "U", "M", "m"):
            raise TypeError(f"{name!r} of the batch holds {x.dtype}; a batch holds numbers")
    counts = {k: (v.shape[0] if getattr(v, "shape", ()) else 0) for k, v in batch.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"every array of a batch has the same number of rows first; here {counts}")
    rows = next(iter(counts.values()))
    sizes = {a: mesh.size(a) for a in mesh.batch_axes} | {"microbatches": microbatches}
    parts = mesh.size(*mesh.batch_axes) * microbatches
    if rows % parts or not rows:
        split = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        low = rows // parts * parts
        near = f"{low} or {low + parts}" if low else f"{parts}"
        raise ValueError(f"batch {rows} does not divide by {split or 1}; {near} would")
    if "row_id" in batch:
        return dict(batch)
    if any(isinstance(v, jax.ShapeDtypeStruct) for v in batch.values()):
        return {**batch, "row_id": jax.ShapeDtypeStruct((rows,), jnp.int32)}
    return {**batch, "row_id": np.arange(rows, dtype=np.int32)}
