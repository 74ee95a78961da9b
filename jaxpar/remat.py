"""Named rematerialisation policies: what a block keeps between its forward and its backward pass.

| name           | kept a layer                                   | computed again            |
|----------------|------------------------------------------------|---------------------------|
| `none`         | everything the backward pass reads             | nothing                   |
| `dots`         | results of products with weights               | elementwise, attention    |
| `block_inputs` | input of attention and of the mlp: 2·B·S·E     | each half from its input  |
| `full`         | input of the block: B·S·E                      | the block (one forward)   |
| `save:a,b`     | the named activations                          | the rest                  |
| `offload:a,b`  | the named activations, in host memory          | the rest                  |

Names in the built-in decoder: block_input, query, key, value, attention, mlp_input, gate, up. Checkpointing: Chen et al.
2016, arXiv:1604.06174. The policy wraps the *body* of the scan over layers, else the scan keeps every residual.
Parameters that ZeRO 3 gathered are never kept, under any policy.
Around an opaque loss the recomputation stands behind a barrier, which the CPU compiler drops: there it saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxpar import policies

GATHERED = "gathered_parameter"
"""Name of parameters gathered for one use; no policy keeps them."""

_policies = jax.checkpoint_policies

# Kept, these would keep a gathered parameter in another shape; computed again they cost next to nothing, and their
# operand is kept where it is an activation.
_RESHAPING = {"broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"}


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep every result but a parameter that was gathered: its name alone is not enough, since what is not kept is
    computed again from its operand, and the gather is the operand."""
    if primitive.name == "name":
        return params["name"] != GATHERED
    if primitive.name in _RESHAPING:
        return False
    if primitive.name == "all_gather":
        axes = params["axis_name"]
        names = axes if isinstance(axes, tuple) else (axes,)
        # Over `model` it is activations that are gathered, over every other axis parameters.
        return all(str(name).rsplit("_", 1)[0] == "model" for name in names)
    return True


def wrap(
    function: Callable[..., Any], name: str, *, gathers: bool, scanned: bool
) -> Callable[..., Any]:
    """`function` under the policy `name`.

    Args:
        function: body of a scan over layers, or any function of arrays.
        scanned: whether it is the body of a scan: the loop then keeps the compiler from merging the recomputation with
            the first computation; elsewhere a barrier must.
        gathers: whether it gathers parameters, which must then not be kept even under `none`.
    """
    kind, listed = policies.parse(name)
    if kind == "none":
        if not gathers:
            return function
        policy = _all_but_gathered
    elif kind == "dots":
        policy = _policies.dots_with_no_batch_dims_saveable
    elif kind == "full":
        policy = _policies.nothing_saveable
    elif kind == "block_inputs":
        policy = _policies.save_only_these_names("mlp_input")
    elif kind == "save":
        policy = _policies.save_only_these_names(*listed)
    else:
        policy = _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(listed),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint(function, policy=policy, prevent_cse=not scanned)
