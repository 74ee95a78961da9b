"""Checkpoints: written while training goes on, verified when read, onto any mesh, never silently wrong.

```python
store = Checkpoints("runs/a/checkpoints", keep=3, keep_best=1)
store.save(step, par.unpad(state), {"data": ...}, metric=loss)  # training may go on at once
store.check()  # raises if the save under way has failed
restored = store.restore(par)  # the newest that is whole, in the shardings of `par`
```

The names below load on first use: the command line says what is wrong with its flags before JAX is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.lazy import attributes

if TYPE_CHECKING:
    from jaxpar.checkpoint.files import CheckpointError as CheckpointError
    from jaxpar.checkpoint.files import Damaged as Damaged
    from jaxpar.checkpoint.files import locate as locate
    from jaxpar.checkpoint.files import steps as steps
    from jaxpar.checkpoint.restoring import Restored as Restored
    from jaxpar.checkpoint.restoring import true_state as true_state
    from jaxpar.checkpoint.retention import retained as retained
    from jaxpar.checkpoint.store import Checkpoints as Checkpoints
    from jaxpar.checkpoint.store import save as save

_HOME = {
    "CheckpointError": "files",
    "Checkpoints": "store",
    "Damaged": "files",
    "Restored": "restoring",
    "locate": "files",
    "retained": "retention",
    "save": "store",
    "steps": "files",
    "true_state": "restoring",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(_HOME)
