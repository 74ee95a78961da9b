"""Shapes of published decoders, and two small ones, as plain numbers (pure Python).

Sources: GPT-2, Radford et al. 2019, table 2; Llama 3, Grattafiori et al. 2024, arXiv:2407.21783, table 3.
"""

from __future__ import annotations

from typing import Any


def _llama(
    layers: int, embed: int, heads: int, kv_heads: int, mlp: int, **changes: Any
) -> dict[str, Any]:
    shape = {
        "style": "llama",
        "layers": layers,
        "embed": embed,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": embed // heads,
        "mlp": mlp,
        "vocab": 128256,
        "positions": 131072,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "tied": False,
        "dropout": 0.0,
    }
    return shape | changes


def _gpt2(layers: int, embed: int, heads: int) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "style": "gpt2",
        "vocab": 50257,
        "positions": 1024,
        "rope_theta": 10000.0,
        "tied": True,
        "dropout": 0.1,
    }
    return _llama(layers, embed, heads, heads, 4 * embed, **changes)


PRESETS: dict[str, dict[str, Any]] = {
    "toy": _llama(4, 128, 4, 2, 384, vocab=256, positions=1024, rope_theta=10000.0),
    "peer": _llama(8, 256, 8, 8, 1024, vocab=512, positions=1024, rope_theta=10000.0),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248),
}
"""Name -> the fields of a `ModelConfig`."""
