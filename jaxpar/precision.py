"""Named precisions: the dtype of what is stored, computed, accumulated and sent.

| name         | parameters | compute  | masters | bytes a parameter (parameter + gradient + master + 2 moments) |
|--------------|------------|----------|---------|---------------------------------------------------------------|
| `float32`    | float32    | float32  | -       | 4 + 4 + 0 + 4 + 4 = 16                                        |
| `bf16`       | float32    | bfloat16 | -       | 4 + 4 + 0 + 4 + 4 = 16 (the stored weights are the masters)   |
| `bf16_params`| bfloat16   | bfloat16 | float32 | 2 + 2 + 4 + 4 + 4 = 16 (arXiv:1910.02054 section 3.1)         |
| `float64`    | float64    | float64  | -       | 32; for tests                                                 |

Gradients of more than one microbatch are accumulated in float32 or wider, whatever the name.
"""

from __future__ import annotations

import dataclasses
import difflib

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of one training run.

    Attributes:
        params: stored parameters.
        compute: what the model computes in.
        masters: float32 copies that the optimizer updates, or None where the parameters themselves are wide.
        reduce: gradients on the wire, over every axis.
    """

    name: str
    params: str
    compute: str
    masters: str | None
    reduce: str

    def gradient(self, microbatches: int) -> str:
        """Dtype of the gradient buffer: float32 or wider as soon as anything is accumulated in it."""
        return self.params if microbatches == 1 else str(jnp.promote_types(self.params, "float32"))

    @property
    def update(self) -> str:
        """Dtype in which the optimizer works."""
        return self.masters or self.params


PRECISIONS = {
    p.name: p
    for p in (
        Precision(
            name="float32", params="float32", compute="float32", masters=None, reduce="float32"
        ),
        Precision(
            name="bf16", params="float32", compute="bfloat16", masters=None, reduce="bfloat16"
        ),
        Precision(
            name="bf16_params",
            params="bfloat16",
            compute="bfloat16",
            masters="float32",
            reduce="bfloat16",
        ),
        Precision(
            name="float64", params="float64", compute="float64", masters=None, reduce="float64"
        ),
    )
}


def named(name: str | Precision, reduce_dtype: str | None = None) -> Precision:
    """The precision called `name`, with gradients sent as `reduce_dtype` if that is given.

    Raises:
        ValueError: no such name (says the nearest), or a reduction narrower than bfloat16.
    """
    if isinstance(name, Precision):
        found = name
    elif name in PRECISIONS:
        found = PRECISIONS[name]
    else:
        near = difflib.get_close_matches(name, PRECISIONS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}{hint}")
    if reduce_dtype is None:
        return found
    if reduce_dtype not in ("bfloat16", "float32", "float64"):
        raise ValueError(f"reduce_dtype {reduce_dtype!r}; bfloat16 and float32 work")
    return dataclasses.replace(found, reduce=reduce_dtype)
