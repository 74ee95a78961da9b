"""Each process reads the rows of a batch that its own devices hold, and no others.

```
global batch     rows 0 1 2 3 4 5 6 7       mesh 4x2 on two processes
process 0             0 1 2 3               its devices: data 0 and 1
process 1                     4 5 6 7       its devices: data 2 and 3
```

Where an axis that does not split rows spans the processes (mesh 1x8), all of them read the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int

from jaxpar.mesh import Mesh


def own_rows(mesh: Mesh, count: int) -> Int[np.ndarray, " rows"]:
    """Global rows, of `count`, that devices of this process hold, in order.

    Raises:
        ValueError: the batch axes do not divide `count`.
    """
    parts = mesh.size(*mesh.batch_axes)
    if count % parts:
        raise ValueError(f"batch {count} does not divide over the {parts} parts of the batch axes")
    held = _sharding(mesh).addressable_devices_indices_map((count,)).values()
    # Devices along other axes hold the same rows.
    ranges = {index[0].indices(count) for index in held if index is not None}
    return np.unique(np.concatenate([np.arange(*r) for r in sorted(ranges)]))


def put_rows(mesh: Mesh, batch: Mapping[str, np.ndarray], count: int) -> dict[str, jax.Array]:
    """Global arrays of `count` rows from what `own_rows` of this process hold, split over the batch axes.

    Args:
        batch: arrays whose first dimension is this process's rows, in the order of `own_rows`; with ``row_id``.
    """
    rows, sharding = own_rows(mesh, count), _sharding(mesh)

    def one(local: np.ndarray) -> jax.Array:
        if len(local) != len(rows):
            raise ValueError(f"{len(local)} rows were read; this process holds {len(rows)}")

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(count)
            first = int(np.searchsorted(rows, start))
            return local[first : first + stop - start]

        return jax.make_array_from_callback((count, *local.shape[1:]), sharding, part)

    return {name: one(np.asarray(local)) for name, local in batch.items()}


def reader(mesh: Mesh, batches: Any, count: int) -> Callable[[int], dict[str, jax.Array]]:
    """Reads this process's rows of batch i and puts them on its devices.

    Args:
        batches: ``batch(i, rows)`` gives these rows of batch i as numpy arrays.
        count: rows of a whole batch.
    """
    rows = own_rows(mesh, count)
    return lambda i: put_rows(mesh, batches.batch(i, rows), count)


def _sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh.jax_mesh, mesh.batch_spec())
