"""jaxpar: train a JAX model on any number of devices, and see why it is as fast and as large as it is.

```python
import jaxpar

step = jaxpar.parallelize(loss_fn, init_fn, optax.adamw(3e-4), mesh=jaxpar.make_mesh("4x2"), rules=rules, zero=3)
state = step.init(0)
state, metrics = step.step(state, batch)
```

The names below are the public surface. They load on first use, so that the command line can refuse a bad config
before JAX is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.lazy import attributes

if TYPE_CHECKING:
    from jaxpar.collectives import constrain as constrain
    from jaxpar.collectives import global_sum as global_sum
    from jaxpar.layout import Layout as Layout
    from jaxpar.mesh import Mesh as Mesh
    from jaxpar.mesh import make_mesh as make_mesh
    from jaxpar.parallel import Parallel as Parallel
    from jaxpar.parallel import parallelize as parallelize
    from jaxpar.rules import Rules as Rules
    from jaxpar.staged import Staged as Staged
    from jaxpar.state import TrainState as TrainState

_HOME = {
    "Layout": "layout",
    "Mesh": "mesh",
    "Parallel": "parallel",
    "Rules": "rules",
    "Staged": "staged",
    "TrainState": "state",
    "constrain": "collectives",
    "global_sum": "collectives",
    "make_mesh": "mesh",
    "parallelize": "parallel",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(_HOME)
