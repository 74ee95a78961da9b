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
from jaxpar.data.files import Corpus, decode, encode, read_files
from jaxpar.data.heldout import HeldOutBatches
from jaxpar.data.iterate import prefetch
from jaxpar.data.stdlib import read_stdlib
from jaxpar.data.store import TokenStore
from jaxpar.data.windows import HeldOut, Windows, check_tokens

__all__ = [
    "Corpus",
    "DataError",
    "Dataset",
    "HeldOut",
    "HeldOutBatches",
    "TokenStore",
    "TrainBatches",
    "Windows",
    "build",
    "check_tokens",
    "decode",
    "encode",
    "load",
    "prefetch",
    "read_files",
    "read_stdlib",
]


def load(source: str) -> Corpus:
    """The corpus of a source: ``stdlib``, or a path or glob of text files.

    Raises:
        DataError: nothing there, or a file that cannot be used, by name.
    """
    return read_stdlib() if source == "stdlib" else read_files(source)
