"""Where tokens come from: sources of text become batches of tokens, the same ones on every mesh.

```
sources ─► TokenStore: documents as tokens ─► rows ─► batch(step)
                                                      tokens, targets, row_id
                                                      packed: positions, segments
```

`build` makes all of it from a config; `prefetch` reads ahead of the caller.
"""

from __future__ import annotations

from jaxpar.data.batches import TrainBatches
from jaxpar.data.dataset import Dataset, build
from jaxpar.data.errors import DataError
from jaxpar.data.heldout import HeldOutBatches
from jaxpar.data.iterate import prefetch, prefetch_groups
from jaxpar.data.store import TokenStore

__all__ = [
    "DataError",
    "Dataset",
    "HeldOutBatches",
    "TokenStore",
    "TrainBatches",
    "build",
    "prefetch",
    "prefetch_groups",
]
