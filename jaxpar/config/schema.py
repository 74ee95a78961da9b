"""What a run can be told: frozen dataclasses, one docstring a field, read from and written to YAML."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from jaxpar.config import yaml12
from jaxpar.config.hints import explain, nearest
from jaxpar.config.presets import PRESETS


class ConfigError(ValueError):
    """A config that cannot run: says what was asked, what is wrong and what would work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder; fields that are left out come from the preset."""

    preset: str = "toy"
    """Named shapes to start from: toy, peer, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama3-8b, llama3-70b, llama3-405b."""
    style: Literal["llama", "gpt2"] = "llama"
    """llama: RMSNorm, RoPE, grouped heads, SwiGLU. gpt2: LayerNorm, learned positions, GELU, biases."""
    layers: int = 4
    """Number of blocks."""
    embed: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; fewer than heads is grouped-query attention."""
    head_dim: int = 32
    """Size of one head."""
    mlp: int = 384
    """Width of the feed-forward layer."""
    vocab: int = 256
    """Number of tokens; sizes that `model` does not divide are padded inside."""
    positions: int = 1024
    """Longest sequence; only learned positions (gpt2) are bound by it."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding (llama)."""
    norm_eps: float = 1e-5
    """Added to the variance in norms."""
    tied: bool = False
    """Whether the head is the transposed embedding."""
    dropout: float = 0.0
    """Share dropped after the embedding, in attention and after each half of a block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule, counted in applied updates."""

    optimizer: Literal["adamw", "sgd", "lamb", "adafactor", "muon"] = "adamw"
    """Update rule."""
    learning_rate: float = 3e-3
    """Highest rate."""
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd stays at the top and falls over the last decay_fraction."""
    warmup_steps: int = 20
    """Updates over which the rate rises from 0."""
    final_fraction: float = 0.1
    """Last rate as a share of the highest."""
    decay_fraction: float = 0.2
    """Share of the run that wsd falls over."""
    weight_decay: float = 0.1
    """Decay times rate, of matrices and embeddings; norms and biases never decay."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    momentum: float = 0.0
    """Momentum of sgd."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    source: str | dict[str, float] = "stdlib"
    """stdlib (text of this Python's standard library), a file, folder or glob, or {SOURCE: WEIGHT, ...} to mix several."""
    heldout: str | None = None
    """Source to evaluate on; by default about one file in twenty of `source`, or the end of its only one."""
    text_key: str = "text"
    """Field of a record that holds the text, in JSONL, Parquet, ArrayRecord and Hugging Face datasets."""
    tokenizer: str = "bytes"
    """bytes, a Hugging Face tokenizer.json, or a SentencePiece .model file."""
    packing: Literal["stream", "concatenate", "best_fit"] = "stream"
    """stream: windows over all text, documents see each other. concatenate, best_fit: rows of documents, kept apart."""
    cache: str | None = None
    """Folder of token caches; by default ~/.cache/jaxpar."""
    workers: int | None = None
    """Processes that tokenise; by default one a core."""
    batch: int = 32
    """Rows of one optimizer step, over all devices and microbatches."""
    sequence: int = 128
    """Tokens of a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    mesh: str = "4x2"
    """Devices by axis: 4x2 is data x model; or data=4,model=2,replica=2; one size may be -1."""
    devices: int | None = None
    """Devices to simulate on a CPU; by default as many as the mesh needs."""
    topology: str | None = None
    """Chips that are not here, such as v5p:4x4x4: for --show layout and for compiling, not for training."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: 1 splits moments over data, 2 also gradients, 3 also parameters."""
    microbatches: int = 1
    """Parts that each device's rows are taken in; gradients are added in float32."""
    schedule: str | None = None
    """Pipeline schedule over the stage axis; not run by this version."""
    remat: str = "none"
    """What a block keeps for its backward pass: none, dots, block_inputs, full, save:NAME,NAME or offload:NAME,NAME."""
    precision: Literal["float32", "bf16", "bf16_params", "float64"] = "float32"
    """bf16: float32 weights computed in bfloat16. bf16_params: bfloat16 weights with float32 masters."""
    reduce_dtype: Literal["bfloat16", "float32"] | None = None
    """Gradients on the wire; by default the compute dtype."""
    sequence_parallel: bool = True
    """Split activations between blocks along the sequence over model."""
    clip_norm: float | None = 1.0
    """Largest global norm of the mean gradient."""
    loss_chunks: int = 1
    """Parts that a shard's tokens are taken in when the loss is computed, so that all logits never exist at once."""
    attention_chunks: int | None = None
    """Parts that the queries are taken in; by default one for every 1024."""
    z_loss: float = 0.0
    """Weight of the squared log normaliser of the logits."""
    steps: int = 300
    """Batches to train on."""
    seed: int = 0
    """Decides initial parameters, data order and dropout."""
    run_dir: str | None = None
    """Folder of the run; by default runs/ and the time."""
    resume: bool = True
    """Go on from the newest complete checkpoint of the run folder; --no-resume refuses a folder that has a run in it."""
    overwrite: bool = False
    """Replace a run folder that has something in it."""
    stop_after: int | None = None
    """Stop and save after so many of the steps, to go on later as if never stopped."""
    eval_every: int = 100
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_batches: int = 16
    """Held-out batches of one evaluation during the run; the last one takes all."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    async_checkpoint: bool = True
    """Write checkpoints while training goes on."""
    keep_checkpoints: int = 3
    """Newest checkpoints that stay; 0 keeps all."""
    keep_best: int = 0
    """Checkpoints of the lowest evaluation loss that stay as well."""
    keep_every: int = 0
    """Checkpoints at multiples of so many steps stay for good; 0 for none."""
    init_from: str | None = None
    """Run folder or checkpoint whose weights a new run starts from, at step 0."""
    allow_cast: bool = False
    """Let values change their dtype when a checkpoint is read."""
    reset_optimizer: bool = False
    """Start the optimizer state anew when a checkpoint is read."""
    max_bad_steps: int = 10
    """Steps skipped in a row after which a run goes back to its last good checkpoint and leaves their data out; 0 never."""
    max_rollbacks: int = 3
    """Times that a run may go back before it ends with an error."""
    sample_tokens: int = 200
    """Tokens of the continuation that is printed at the end; 0 for none."""
    show: Literal["layout"] | None = None
    """Print the layout and stop, without training or compiling."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The decoder."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """The optimizer."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """The data."""


def from_yaml(path: str | os.PathLike[str]) -> RunConfig:
    """The config in a YAML file; top-level keys that start with ``x-`` are left out: they may hold anchors to merge.

    Raises:
        ConfigError: the file is missing, is not YAML, or has an unknown key or a wrong type; names file and key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml12.read(text, str(path))
    except OSError as error:
        raise ConfigError(f"config {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # a path with a NUL in it
        raise ConfigError(f"config {str(path)!r}: {error}") from error
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if not str(key).startswith("x-")}
    return from_dict({} if data is None else data, str(path))


def from_dict(data: Any, origin: str = "config") -> RunConfig:
    """The config in nested dicts; the preset of ``model`` fills in what it leaves out.

    Raises:
        ConfigError: an unknown key, with the nearest, or a wrong type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{origin}: a config is a mapping of keys to values, not {type(data).__name__}"
        )
    _known_keys(data, RunConfig, origin, "")
    data = _without_none(data, RunConfig)
    data |= {s: _without_none(data[s], kind) for s, kind in SECTIONS.items() if s in data}
    model = data.get("model")
    if model is not None:
        data["model"] = {**preset(model.get("preset", "toy"), origin), **model}
    try:
        return msgspec.convert(data, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_explained(data, error)}") from error


def _without_none(data: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """``none`` as null where a field takes null and no text, as its flag does."""
    hints = typing.get_type_hints(kind)
    empty = {
        key
        for key, value in data.items()
        if isinstance(value, str) and value.lower() == "none" and takes_none(hints[key])
    }
    return {key: None if key in empty else value for key, value in data.items()}


def takes_none(hint: Any) -> bool:
    """Whether ``none`` stands for null in a field of this type: it may be null, and is never text."""
    kinds = typing.get_args(hint)
    return type(None) in kinds and str not in kinds


def _explained(data: Mapping[str, Any], error: msgspec.ValidationError) -> str:
    """The message of a value that does not fit, by the path that msgspec ends its own with."""
    found = re.search(r"`\$\.([a-z_0-9.]+)", str(error))
    if found is None:
        return str(error)
    section, _, name = found[1].rpartition(".")
    kind, values = (SECTIONS[section], data[section]) if section else (RunConfig, data)
    return explain(found[1], values[name], typing.get_type_hints(kind)[name])


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Nested dicts of every field."""
    return dataclasses.asdict(config)


def to_yaml(config: RunConfig) -> str:
    """Every field as YAML; `from_yaml` reads it back."""
    return yaml12.write(to_dict(config))


def preset(name: Any, origin: str = "model") -> dict[str, Any]:
    """Fields of the preset called `name`."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(
            f"{origin}: preset {name!r} is unknown{nearest(str(name), PRESETS)}; there are {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def _known_keys(data: Mapping[str, Any], kind: type, origin: str, prefix: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in data.items():
        if key not in fields:
            name = ALIASES.get(key, key)
            home = next(
                (s for s, c in SECTIONS.items() if name in {f.name for f in dataclasses.fields(c)}),
                None,
            )
            if name in fields:
                hint = f"; did you mean {name}?"
            elif home and kind is RunConfig:
                hint = f"; it belongs under {home!r}{f' as {name}' if name != key else ''}"
            else:
                hint = nearest(str(key), fields)
            raise ConfigError(f"{origin}: unknown key {prefix}{key}{hint}")
        if key in SECTIONS and kind is RunConfig:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{origin}: {key} is a section with keys of its own, not {value!r}"
                )
            _known_keys(value, SECTIONS[key], origin, f"{key}.")


SECTIONS: dict[str, type] = {"model": ModelConfig, "optimizer": OptimizerConfig, "data": DataConfig}
"""Fields of a `RunConfig` that are configs of their own."""

ALIASES = {"lr": "learning_rate"}
"""Short names that flags have besides a field's own; a file writes the name out."""
