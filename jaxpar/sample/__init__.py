"""Text from a model: `python -m jaxpar.sample RUN --prompt TEXT`, or a `Sampler` on the parameters of a run.

```python
sampler = Sampler(config.model, par.mesh, state.params, precision=config.precision)
[tokens] = sampler.generate([prompt], 200, choice=Choice(temperature=0.8), seed=0, end=tokenizer.end)
```

The names below load on first use: the command line says what is wrong with its flags before JAX is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.lazy import attributes

if TYPE_CHECKING:
    from jaxpar.sample.choice import Choice as Choice
    from jaxpar.sample.choice import choose as choose
    from jaxpar.sample.generate import Sampler as Sampler
    from jaxpar.sample.text import TextStream as TextStream

_HOME = {"Choice": "choice", "Sampler": "generate", "TextStream": "text", "choose": "choice"}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(_HOME)
