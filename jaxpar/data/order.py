"""The order in which rows are read: a keyed permutation that needs no memory, for any place of it.

```
place   0 1 2 3 4 | 5 6 7 8 9 | ...        an endless line of places, `size` an epoch
row     3 0 4 1 2 | 1 4 2 0 3 | ...        every epoch is another permutation of all rows
```

A place is ``step * batch + row``, so the order is a function of seed and step alone: it knows
neither devices nor processes, and step a million costs what step 0 does.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int, UInt64

ORDER = 1
"""Version of the order. A change that moves any row raises it, so that a resumed run can tell."""

_ROUNDS = 6

_STRIDE = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: its multiples, wrapped, are far apart."""


def shuffled(places: Int[np.ndarray, " n"], *, size: int, seed: int) -> Int[np.ndarray, " n"]:
    """Rows at `places` of the endless order of ``range(size)``, one permutation an epoch.

    >>> sorted(shuffled(np.arange(6, 9), size=3, seed=0).tolist())
    [0, 1, 2]
    """
    epochs, within = np.divmod(places, size)
    return permute(within, size=size, seed=seed, epoch=epochs)


def permute(
    places: Int[np.ndarray, " n"], *, size: int, seed: int, epoch: int | Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Images of `places` under the permutation of ``range(size)`` keyed by (seed, epoch).

    Args:
        epoch: one for all places, or one for each.

    A Feistel network over a grid just larger than `size`; a place that lands outside goes through
    again (cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).

    >>> sorted(permute(np.arange(5), size=5, seed=0, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    a = math.isqrt(size - 1) + 1
    b = math.ceil(size / a)
    keys = _keys(seed, np.broadcast_to(epoch, len(places)))

    def once(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = np.divmod(x, np.uint64(b))
        for k in range(0, _ROUNDS, 2):
            left = (left + _mix(right ^ keys[k]) % np.uint64(a)) % np.uint64(a)
            right = (right + _mix(left ^ keys[k + 1]) % np.uint64(b)) % np.uint64(b)
        return left * np.uint64(b) + right

    out = once(np.asarray(places).astype(np.uint64), keys)
    while (outside := out >= size).any():
        out[outside] = once(out[outside], keys[:, outside])
    return out.astype(np.int64)


def derive(seed: int, label: int) -> int:
    """A seed of its own for each label; label 0 keeps `seed`.

    >>> derive(7, 0)
    7
    >>> derive(7, 1) != derive(8, 1) != derive(7, 2)
    True
    """
    return seed if label == 0 else int(_mix(np.array([_word(seed) ^ _word(label)]))[0])


def _keys(seed: int, epochs: Int[np.ndarray, " n"]) -> UInt64[np.ndarray, "rounds n"]:
    rounds = _mix(np.arange(_ROUNDS, dtype=np.uint64) ^ _word(seed))
    some, which = np.unique(epochs, return_inverse=True)
    words = _mix((some.astype(np.uint64) + np.uint64(1)) * np.uint64(_STRIDE))
    return _mix(rounds[:, None] ^ words)[:, which]


def _word(n: int) -> np.uint64:
    """64 bits of a number, far apart for neighbours."""
    return _mix(np.array([(n + 1) * _STRIDE % 2**64], np.uint64))[0]


def _mix(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
