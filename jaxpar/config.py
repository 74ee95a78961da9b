"""Typed configs of a run: defaults, then a YAML file, then flags; every field is a flag.

Pure Python, no JAX: a bad config is refused before anything heavy is imported. Unknown keys and flags exit 2 and name the
nearest; `validate` refuses every combination that cannot run and says what would.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from jaxpar.axes import parse_mesh
from jaxpar.presets import PRESETS


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

    source: str = "stdlib"
    """stdlib: the text of Python's standard library on this machine, as bytes; or a text file, or a glob of them."""
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
    overwrite: bool = False
    """Replace a run folder that has something in it."""
    eval_every: int = 100
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_batches: int = 16
    """Held-out batches of one evaluation during the run; the last one takes all."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
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


# ---- YAML ---------------------------------------------------------------------------------------------------------


def from_yaml(path: str | os.PathLike[str]) -> RunConfig:
    """The config in a YAML file.

    Raises:
        ConfigError: the file is missing, is not YAML, or has an unknown key or a wrong type; names file and key.
    """
    try:
        data = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML: {' '.join(str(error).split())}") from error
    return from_dict(data, str(path))


def from_dict(data: Any, origin: str = "config") -> RunConfig:
    """The config in nested dicts; the preset of ``model`` fills in what it leaves out.

    Raises:
        ConfigError: an unknown key, with the nearest, or a wrong type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{origin}: a config is a mapping of keys to values, not {type(data).__name__}")
    _known_keys(data, RunConfig, origin, "")
    model = data.get("model")
    if isinstance(model, Mapping):
        data = {**data, "model": {**preset(model.get("preset", "toy"), origin), **model}}
    try:
        return msgspec.convert(data, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error}") from error


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Nested dicts of every field."""
    return dataclasses.asdict(config)


def to_yaml(config: RunConfig) -> str:
    """Every field as YAML; `from_yaml` reads it back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def preset(name: Any, origin: str = "model") -> dict[str, Any]:
    """Fields of the preset called `name`."""
    if name not in PRESETS:
        raise ConfigError(f"{origin}: preset {name!r} is unknown{_nearest(str(name), PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _known_keys(data: Mapping[str, Any], kind: type, origin: str, prefix: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in data.items():
        if key not in fields:
            home = next((s for s, c in _SECTIONS.items() if key in {f.name for f in dataclasses.fields(c)}), None)
            hint = f"; it belongs under {home!r}" if home and kind is RunConfig else _nearest(str(key), fields)
            raise ConfigError(f"{origin}: unknown key {prefix}{key}{hint}")
        if key in _SECTIONS and kind is RunConfig:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{origin}: {key} is a section with keys of its own, not {value!r}")
            _known_keys(value, _SECTIONS[key], origin, f"{key}.")


_SECTIONS: dict[str, type] = {"model": ModelConfig, "optimizer": OptimizerConfig, "data": DataConfig}


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


# ---- flags --------------------------------------------------------------------------------------------------------


def parse(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "python -m jaxpar.train",
    description: str = "Train a decoder on any data x model mesh.",
) -> RunConfig:
    """The config of a command line: defaults, then ``--config FILE``, then flags.

    Exits 2, with one line on stderr, on an unknown flag (naming the nearest), a wrong value, a bad file or an invalid
    combination; exits 0 after ``--help``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        config = load(argv, prog=prog, description=description)
        check_environment(os.environ)
        validate(config)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


def load(argv: Sequence[str], *, prog: str = "jaxpar", description: str = "") -> RunConfig:
    """Like `parse`, raising `ConfigError` instead of exiting, and not yet validated."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, formatter_class=_Help)
    parser.add_argument("--config", metavar="FILE", help="YAML file with the keys below; flags win over it")
    homes: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    groups = [("", "run", RunConfig), *((s, s, c) for s, c in _SECTIONS.items())]
    for section, title, kind in groups:
        group = parser.add_argument_group(title, (kind.__doc__ or "").strip())
        docs = _field_docs(kind)
        for field in dataclasses.fields(kind):
            if field.name in _SECTIONS and not section:
                continue
            homes[field.name] = (section, field)
            _add_flag(group, field, docs[field.name])
    for arg in argv:
        flag = arg.partition("=")[0]
        if arg.startswith("--") and flag not in parser._option_string_actions:
            known = [f for f in parser._option_string_actions if f.startswith("--")]
            raise ConfigError(f"unknown flag {flag}{_nearest(flag, known)}")
    given = vars(parser.parse_args(argv))
    path = given.pop("config", None)
    config = from_yaml(path) if path else RunConfig()
    changes: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        changes.setdefault(homes[name][0], {})[name] = value
    model = changes.get("model", {})
    if "preset" in model:
        changes["model"] = {**preset(model["preset"], "--preset"), **model}
    sections = {s: dataclasses.replace(getattr(config, s), **c) for s, c in changes.items() if s}
    return dataclasses.replace(config, **changes.get("", {}), **sections)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=100)


def _add_flag(group: Any, field: dataclasses.Field[Any], doc: str) -> None:
    kind = str(field.type).replace(" | None", "")
    default = field.default
    shown = f"{doc} [{default}]" if default is not None else doc
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
    if kind == "bool":
        options["action"] = argparse.BooleanOptionalAction
    elif kind.startswith("Literal"):
        values = [v.strip() for v in kind[len("Literal[") : -1].split(",")]
        numbers = all(v.isdigit() for v in values)
        options["choices"] = [int(v) if numbers else v.strip("\"'") for v in values]
        options["type"] = int if numbers else str
    else:
        options["type"] = {"int": int, "float": float, "str": str}[kind]
        options["metavar"] = {"int": "N", "float": "X", "str": "TEXT"}[kind]
        if "None" in str(field.type) and kind != "str":
            options["type"] = _or_none(options["type"])
    group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def _or_none(kind: type) -> Any:
    def convert(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    convert.__name__ = f"{kind.__name__} or none"
    return convert


def _field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(kind)).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
    docs = {}
    for field, after in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            docs[field.target.id] = ast.literal_eval(after.value)  # pyright: ignore[reportAttributeAccessIssue]
    return docs


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse environment variables that would be ignored or would abort the process.

    Raises:
        ConfigError: a JAXPAR_ variable (there are none), or an XLA flag without its dashes: XLA ends the process on it.
    """
    for name in environ:
        if name.startswith("JAXPAR_"):
            flag = "--" + name[len("JAXPAR_") :].lower().replace("_", "-")
            raise ConfigError(f"environment variable {name} means nothing to jaxpar; use the flag {flag} if there is one")
    for token in environ.get("XLA_FLAGS", "").split():
        if not token.startswith("--") and not Path(token).is_file():
            raise ConfigError(f"XLA_FLAGS holds {token!r}, which is not a --flag; XLA would abort the process on it")


# ---- validation ---------------------------------------------------------------------------------------------------


def validate(config: RunConfig) -> None:
    """Refuse every combination that cannot run, before any device is touched.

    Raises:
        ConfigError or axes.MeshError: the first thing that is wrong.
    """
    sizes = parse_mesh(config.mesh, _device_count(config))
    for error in (*_bad_numbers(config), *_bad_mesh(config, sizes), *_bad_options(config)):
        raise ConfigError(error)


def _device_count(config: RunConfig) -> int | None:
    if config.topology is not None:
        _, _, dims = config.topology.partition(":")
        parts = dims.split("x")
        if not all(p.isdigit() for p in parts):
            raise ConfigError(f"topology {config.topology!r} has no sizes; write it as v5p:4x4x4")
        if not config.show:
            raise ConfigError(f"topology {config.topology} is of chips that are not here: add --show layout")
        return None  # chips and devices differ on some generations: the mesh checks the product
    return config.devices


def _bad_numbers(config: RunConfig) -> list[str]:
    errors = []
    model, optimizer, data = config.model, config.optimizer, config.data
    least_one = {
        "microbatches": config.microbatches, "loss_chunks": config.loss_chunks, "steps": config.steps,
        "batch": data.batch, "sequence": data.sequence, "layers": model.layers, "embed": model.embed,
        "heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "mlp": model.mlp,
        "vocab": model.vocab, "positions": model.positions, "eval_batches": config.eval_batches,
        "devices": 1 if config.devices is None else config.devices,
        "attention_chunks": 1 if config.attention_chunks is None else config.attention_chunks,
    }  # fmt: skip
    errors += [f"{name} is {value}; at least 1" for name, value in least_one.items() if value < 1]
    least_zero = {
        "eval_every": config.eval_every, "checkpoint_every": config.checkpoint_every, "z_loss": config.z_loss,
        "sample_tokens": config.sample_tokens, "warmup_steps": optimizer.warmup_steps, "seed": config.seed,
        "weight_decay": optimizer.weight_decay, "learning_rate": optimizer.learning_rate, "eps": optimizer.eps,
    }  # fmt: skip
    errors += [f"{name} is {value}; at least 0" for name, value in least_zero.items() if not value >= 0]
    shares = {
        "dropout": model.dropout, "beta1": optimizer.beta1, "beta2": optimizer.beta2, "momentum": optimizer.momentum,
    }  # fmt: skip
    errors += [f"{name} is {value}; from 0 up to, not including, 1" for name, value in shares.items() if not 0 <= value < 1]
    for name, value in (("final_fraction", optimizer.final_fraction), ("decay_fraction", optimizer.decay_fraction)):
        if not 0 <= value <= 1:
            errors.append(f"{name} is {value}; from 0 to 1")
    if config.clip_norm is not None and not config.clip_norm > 0:
        errors.append(f"clip_norm is {config.clip_norm}; above 0, or none to leave gradients as they are")
    if optimizer.warmup_steps > config.steps:
        errors.append(f"warmup_steps {optimizer.warmup_steps} is more than steps {config.steps}; the rate would never peak")
    return errors


def _bad_mesh(config: RunConfig, sizes: dict[str, int]) -> list[str]:
    errors = []
    model, split = config.model, sizes["model"]
    for axis, what in (("stage", "a pipeline"), ("expert", "experts"), ("context", "a split sequence")):
        if sizes[axis] > 1:
            errors.append(f"mesh {config.mesh}: {what} ({axis}={sizes[axis]}) is not run by this version; use {axis}=1")
    for name, size in (("heads", model.heads), ("mlp", model.mlp)):
        if size % split:
            errors.append(f"{name} {size} does not divide by model={split}; {_around(size, split)} would")
    if model.kv_heads % split and split % model.kv_heads:
        fits = [k for k in range(1, model.heads + 1) if model.heads % k == 0 and (k % split == 0 or split % k == 0)]
        errors.append(
            f"kv_heads {model.kv_heads} and model={split}: one must divide the other; kv_heads of {_listed(fits)} would"
        )
    if config.sequence_parallel and config.data.sequence % split:
        errors.append(
            f"sequence {config.data.sequence} does not divide by model={split}; {_around(config.data.sequence, split)} "
            f"would, or --no-sequence-parallel"
        )
    rows = sizes["replica"] * sizes["data"]
    parts = rows * config.microbatches
    if config.data.batch % parts:
        names = [f"{a}={sizes[a]}" for a in ("replica", "data") if sizes[a] > 1]
        names += [f"microbatches={config.microbatches}"] if config.microbatches > 1 else []
        errors.append(
            f"batch {config.data.batch} does not divide by {' x '.join(names)}; {_around(config.data.batch, parts)} would"
        )
    tokens = config.data.batch // parts * config.data.sequence
    if not errors and tokens % config.loss_chunks:
        errors.append(f"loss_chunks {config.loss_chunks} does not divide the {tokens} tokens of a shard's microbatch")
    return errors


def _bad_options(config: RunConfig) -> list[str]:
    errors = []
    model = config.model
    if model.heads % model.kv_heads:
        fits = [k for k in range(1, model.heads + 1) if model.heads % k == 0]
        errors.append(f"heads {model.heads} does not divide by kv_heads {model.kv_heads}; {_listed(fits)} would")
    if model.style == "llama" and model.head_dim % 2:
        errors.append(f"head_dim {model.head_dim} is odd; rotary positions pair its halves, so it must be even")
    if model.style == "gpt2" and config.data.sequence > model.positions:
        errors.append(f"sequence {config.data.sequence} is longer than the {model.positions} learned positions")
    if model.vocab < 256:
        errors.append(f"vocab {model.vocab} is too small for bytes; at least 256")
    chunks = config.attention_chunks or 1
    if config.data.sequence % chunks:
        errors.append(f"attention_chunks {chunks} does not divide sequence {config.data.sequence}")
    if config.schedule is not None:
        errors.append(f"schedule {config.schedule} needs a stage axis, which is not run by this version; leave it out")
    kind, colon, names = config.remat.partition(":")
    if kind not in (("save", "offload") if colon else ("none", "dots", "block_inputs", "full")) or (colon and not names):
        known = ("none", "dots", "block_inputs", "full", "save:NAME,NAME", "offload:NAME,NAME")
        errors.append(f"remat {config.remat} is not one of {', '.join(known)}{_nearest(config.remat, known)}")
    elif colon:
        saved = ("block_input", "query", "key", "value", "attention", "mlp_input", "gate", "up")
        for name in names.split(","):
            if name.strip() not in saved:
                errors.append(f"remat {config.remat}: no activation is called {name.strip()!r}; there are {', '.join(saved)}")
    if config.precision == "float64" and config.reduce_dtype is not None:
        errors.append(f"precision float64 with reduce_dtype {config.reduce_dtype} would round gradients; leave it out")
    return errors


def _around(value: int, parts: int) -> str:
    low = value // parts * parts
    return f"{low} or {low + parts}" if low else f"{parts}"


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])
