"""Peak dense bfloat16 rates of known chips, and what a training step of the decoder has to compute.

Rates are the vendors': docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; NVIDIA data sheets of
A100 SXM, H100 SXM, H200 SXM, B200 (dense, without sparsity).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpar.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip by the names that JAX gives its devices.

    Attributes:
        name: short name.
        kinds: beginnings of ``device_kind``, in lower case.
        flops: peak dense bfloat16 FLOP/s of one chip.
    """

    name: str
    kinds: tuple[str, ...]
    flops: float


# The first whose kind fits wins: "tpu v5 lite" stands before "tpu v5".
CHIPS = (
    Chip(name="v4", kinds=("tpu v4",), flops=275e12),
    Chip(name="v5e", kinds=("tpu v5 lite", "tpu v5e"), flops=197e12),
    Chip(name="v5p", kinds=("tpu v5",), flops=459e12),
    Chip(name="v6e", kinds=("tpu v6 lite", "tpu v6e"), flops=918e12),
    Chip(name="tpu7x", kinds=("tpu7x", "tpu v7x", "tpu 7x"), flops=2307e12),
    Chip(name="A100", kinds=("nvidia a100",), flops=312e12),
    Chip(name="H100", kinds=("nvidia h100 80gb hbm3",), flops=989e12),
    Chip(name="H200", kinds=("nvidia h200",), flops=989e12),
    Chip(name="B200", kinds=("nvidia b200",), flops=2250e12),
)


def chip_of(kind: str) -> Chip | None:
    """The chip of a ``device_kind``, or None where its peak is not known (a CPU).

    >>> chip_of("TPU v5 lite").name, chip_of("NVIDIA H100 80GB HBM3").name, chip_of("cpu")
    ('v5e', 'H100', None)
    """
    return next((chip for chip in CHIPS if kind.lower().startswith(chip.kinds)), None)


def chips_in(devices: Sequence[Any]) -> int:
    """Number of chips: the two cores of a v4 or tpu7x chip can be two devices with one place."""
    places = [
        (getattr(d, "slice_index", 0), tuple(d.coords)) if hasattr(d, "coords") else d.id
        for d in devices
    ]
    return len(set(places))


def matmul_parameters(config: ModelConfig) -> int:
    """Parameters that every token is multiplied with: all matrices but the input embedding.

    A tied table counts once, as the head.
    """
    heads = 2 * config.heads + 2 * config.kv_heads
    attention = config.embed * config.head_dim * heads
    mlp = (3 if config.style == "llama" else 2) * config.embed * config.mlp
    return config.layers * (attention + mlp) + config.embed * config.vocab


def flops_per_token(config: ModelConfig, seq: int) -> int:
    """Model FLOPs of a training step for one token: ``6 N + 12 L s H D``.

    N is `matmul_parameters`; the second term is attention over the whole sequence, causal or not
    (PaLM, arXiv:2204.02311, appendix B). Nothing that remat computes again counts.

    >>> from types import SimpleNamespace as S
    >>> llama = S(style="llama", layers=32, embed=4096, heads=32, kv_heads=8, head_dim=128,
    ...           mlp=14336, vocab=128256)
    >>> matmul_parameters(llama), flops_per_token(llama, 8192)
    (7504658432, 57912852480)
    """
    attention = 12 * config.layers * seq * config.heads * config.head_dim
    return 6 * matmul_parameters(config) + attention
