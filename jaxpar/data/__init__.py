"""Where tokens come from: a source of text becomes byte tokens, and tokens become batches.

```
source ("stdlib", a path, a glob) ─► Corpus(train, heldout) ─► Windows.batch(step)
                                                               {"tokens", "targets", "row_id"}
```
"""

from __future__ import annotations

from jaxpar.data.files import Corpus, DataError, decode, encode, read_files
from jaxpar.data.stdlib import read_stdlib
from jaxpar.data.windows import HeldOut, Windows, check_tokens, prefetch

__all__ = [
    "Corpus",
    "DataError",
    "HeldOut",
    "Windows",
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
