"""Continue a prompt, one token at a time.

The model always reads as many tokens as the prompt has: the last ones. One shape, one compilation,
and no padding that a model was never trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int


def generate(
    logits_fn: Callable[[Int[np.ndarray, "1 context"]], Any],
    prompt: Int[np.ndarray, " context"],
    count: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> Int[np.ndarray, " count"]:
    """Sample `count` tokens after `prompt`.

    Args:
        logits_fn: tokens (1, context) -> logits of the next token (1, vocab); jit it, it is called
            `count` times with one shape.
        prompt: token ids; its length is the context.
        temperature: divides the logits; 0 takes the likeliest token.
        seed: the same seed gives the same tokens.

    Raises:
        ValueError: an empty prompt, or a temperature below 0.
    """
    context = np.asarray(prompt, np.int32)
    if context.ndim != 1 or not len(context):
        raise ValueError(
            f"prompt of shape {context.shape}; give at least one token in one dimension"
        )
    if not temperature >= 0:
        raise ValueError(
            f"temperature {temperature}; 0 is the likeliest token, 1 the model's own odds"
        )
    random = np.random.default_rng(seed)
    out = np.empty(count, np.int32)
    for i in range(count):
        logits = np.asarray(logits_fn(context[None]), np.float64)[0]
        if temperature > 0:
            # The largest of logits plus Gumbel noise is a draw from their softmax (Gumbel, 1954).
            logits = logits / temperature + random.gumbel(size=logits.shape)
        out[i] = logits.argmax()
        context = np.append(context[1:], out[i])
    return out
