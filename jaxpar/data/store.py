"""Documents as tokens: what every source becomes, and what order, packing and batches read.

```
tokens    7 3 9 0 | 5 0 | 8 8 1 0        0 ends a document here
offsets   0         4     6         10   document d is tokens[offsets[d]:offsets[d + 1]]
mask      0 1 1 1   1 1   1 1 1 1        0: not a target to train on
```
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib

import numpy as np
from jaxtyping import Int64, UInt, UInt8

from jaxpar.data.errors import DataError

_SCAN = 1 << 24
"""Tokens that a scan takes at once: bounds its memory, and is far above the cost of a call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Documents of one source as one memory-mapped array of token ids.

    Attributes:
        tokens: ids, uint8, uint16 or uint32; nothing of it is in memory until it is read.
        offsets: document d is ``tokens[offsets[d]:offsets[d + 1]]``, its end token included.
        mask: 0 where a token is not a target to train on (prompts, ignored labels); None where all
            are.
        name: the source as the user wrote it.
        fingerprint: hex; equal content, tokenizer and options <=> equal fingerprint.
        files: names of the files, in order.
        first: index of the first document of each file; of a part that begins inside a file,
            negative, so that rows are still counted from the file's beginning.
        largest: no id is larger; None where nobody has looked.
    """

    tokens: UInt[np.ndarray, " tokens"]
    offsets: Int64[np.ndarray, " documents+1"]
    mask: UInt8[np.ndarray, " tokens"] | None
    name: str
    fingerprint: str
    files: tuple[str, ...]
    first: tuple[int, ...]
    largest: int | None = None

    def __len__(self) -> int:
        """Documents."""
        return len(self.offsets) - 1

    def where(self, document: int) -> str:
        """``FILE, row N`` of a document; a file's first row is row 1."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {self.name}, which has {len(self)}")
        # Of files that begin at the same document all but the last are empty parts.
        file = bisect.bisect_right(self.first, document) - 1
        return f"{self.files[file]}, row {document - self.first[file] + 1}"

    def part(self, first: int, last: int) -> TokenStore:
        """Documents `first` to `last` (exclusive), on the same memory."""
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"documents {first} to {last} of {self.name}, which has {len(self)}")
        if (first, last) == (0, len(self)):
            return self
        begin, end = int(self.offsets[first]), int(self.offsets[last])
        return self._slice(begin, end, self.offsets[first : last + 1] - begin, first, last)

    def cut(self, token: int) -> tuple[TokenStore, TokenStore]:
        """Tokens before and from `token` on; a document that it falls into is in both."""
        if not 0 < token < len(self.tokens):
            raise IndexError(f"token {token} of {self.name}, which has {len(self.tokens)}")
        # The document that holds the token, and the first that begins at or after it.
        inside = int(np.searchsorted(self.offsets, token, side="right")) - 1
        after = int(np.searchsorted(self.offsets, token, side="left"))
        left = np.append(self.offsets[:after], token)
        right = np.append(token, self.offsets[inside + 1 :]) - token
        return (
            self._slice(0, token, left, 0, after),
            self._slice(token, len(self.tokens), right, inside, len(self)),
        )

    def check_vocab(self, vocab: int) -> None:
        """Refuse ids outside ``range(vocab)``, before a step is taken.

        Costs nothing where the largest id is known to fit, else one pass over the tokens.

        Raises:
            DataError: file, row and id of the first that does not fit.
        """
        if self.largest is not None and self.largest < vocab:
            return
        for start in range(0, len(self.tokens), _SCAN):
            ids = self.tokens[start : start + _SCAN]
            if ids.max() < vocab:
                continue
            at = start + int(np.argmax(ids >= vocab))
            document = int(np.searchsorted(self.offsets, at, side="right")) - 1
            raise DataError(
                f"{self.where(document)}: token {at - int(self.offsets[document])} has id "
                f"{int(self.tokens[at])}, outside the vocabulary of the model (0 to {vocab - 1}); "
                f"set model.vocab to at least {self._largest() + 1}, or data.tokenizer to the one "
                "that made these tokens"
            )

    def _largest(self) -> int:
        blocks = range(0, len(self.tokens), _SCAN)
        return max(int(self.tokens[i : i + _SCAN].max()) for i in blocks)

    def _slice(
        self, begin: int, end: int, offsets: np.ndarray, first: int, last: int
    ) -> TokenStore:
        """Tokens `begin` to `end`, which lie in documents `first` to `last` (exclusive)."""
        # Of a store without documents the first file stands for all.
        low = max(0, bisect.bisect_right(self.first, first) - 1)
        high = max(low + 1, bisect.bisect_left(self.first, last))
        digest = hashlib.sha256(f"{self.fingerprint} tokens {begin} to {end}".encode())
        return dataclasses.replace(
            self,
            tokens=self.tokens[begin:end],
            offsets=offsets,
            mask=None if self.mask is None else self.mask[begin:end],
            fingerprint=digest.hexdigest(),
            files=self.files[low:high],
            first=tuple(place - first for place in self.first[low:high]),
        )
