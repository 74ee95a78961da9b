"""A product with a weight, whose gradients are written as plainly as the product."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def product(
    x: Float[Array, "*rows_in"], weight: Float[Array, "*in_out"], inner: int = 1
) -> Float[Array, "*rows_out"]:
    """Contract the last `inner` dimensions of `x` with the first `inner` of `weight`.

    The gradient of the weight is summed over the rows in float32 or wider, and comes out in the weight's own order of
    dimensions. Differentiation would write it as a transposed product, for which the CPU compiler has no fast kernel in
    bfloat16.
    """
    return _product(x, weight, inner)  # pyright: ignore[reportReturnType]


def _dot(x, weight, inner):
    contract = (tuple(range(x.ndim - inner, x.ndim)), tuple(range(inner)))
    return lax.dot_general(x, weight, (contract, ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, weight, inner):
    return _dot(x, weight, inner)


def _forward(x, weight, inner):
    # The product itself, so that a remat policy that keeps products sees one.
    return _dot(x, weight, inner), (x, weight)


def _backward(inner, residual, cotangent):
    x, weight = residual
    rows = tuple(range(x.ndim - inner))
    outer = tuple(range(len(rows), cotangent.ndim))
    dx = lax.dot_general(cotangent, weight, ((outer, tuple(range(inner, weight.ndim))), ((), ())))
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    dw = lax.dot_general(x, cotangent, ((rows, rows), ((), ())), preferred_element_type=wide)
    return dx, dw.astype(weight.dtype)


_product.defvjp(_forward, _backward)
