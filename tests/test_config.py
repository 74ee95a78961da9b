"""Command lines: every field is a flag, and every bad one is refused on one line."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar import config as configs
from jaxpar.axes import parse_mesh
from jaxpar.config import ConfigError, RunConfig, from_dict

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent


def parse(*argv: str) -> RunConfig:
    return configs.parse(argv)


def refusal(capsys, *argv: str) -> str:
    """What a command line is refused with: exit code 2, one line of stderr, nothing on stdout."""
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


# ---- every field --------------------------------------------------------------------------------


def every_field() -> dict[str, typing.Any]:
    """Name -> type of every field that is a setting, over all sections."""
    found: dict[str, typing.Any] = {}
    hints = typing.get_type_hints(RunConfig)
    sections = [kind for kind in hints.values() if dataclasses.is_dataclass(kind)]
    for kind in (RunConfig, *sections):
        for name, hint in typing.get_type_hints(kind).items():
            if not dataclasses.is_dataclass(hint):
                assert name not in found, f"two sections have a field {name}: its flag is ambiguous"
                found[name] = hint
    return found


def test_help_has_a_flag_and_a_sentence_for_every_field(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    flags = {name: f"--{name.replace('_', '-')}" for name in every_field()}
    assert len(flags) > 30
    for name, flag in {**flags, "config": "--config"}.items():
        assert re.search(rf"^ +{flag}[ ,].*?\w", text, re.MULTILINE), name
    for name, hint in every_field().items():
        if hint is bool:
            assert f"--no-{name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("argv", "read"),
    [
        (("--mesh", "data=4,model=2"), lambda c: c.mesh == "data=4,model=2"),
        (("--mesh=-1x2", "--devices=8"), lambda c: c.mesh == "-1x2"),
        (("--mesh", "-1x2", "--devices", "8"), lambda c: c.mesh == "-1x2"),
        (("--mesh", "-1x2"), lambda c: c.mesh == "-1x2"),
        (("--mesh", "4x-1"), lambda c: c.mesh == "4x-1"),
        (("--mesh", "data=-1,model=2"), lambda c: c.mesh == "data=-1,model=2"),
        (("--steps", "2147483647"), lambda c: c.steps == 2**31 - 1),
        (("--precision", "float64", "--eps", "1e-300"), lambda c: c.optimizer.eps == 1e-300),
        (("--eps", "1e-37"), lambda c: c.optimizer.eps == 1e-37),
        (
            ("--topology", "v5p:4x4x4", "--mesh=-1x2", "--show", "layout"),
            lambda c: c.mesh == "-1x2",
        ),
        (
            (
                "--topology",
                "tpu7x:4x4x4",
                "--mesh",
                "32x4",
                "--batch",
                "32",
                "--kv-heads",
                "4",
                "--show",
                "layout",
            ),
            lambda c: c.mesh == "32x4",
        ),
        (
            ("--optimizer", "adafactor", "--vocab", "260", "--mesh", "2x4"),
            lambda c: c.model.vocab == 260,
        ),
        (
            ("--optimizer", "adamw", "--vocab", "257", "--mesh", "2x4"),
            lambda c: c.model.vocab == 257,
        ),
        (("--lr", "0.5"), lambda c: c.optimizer.learning_rate == 0.5),
        (("--zero", "3"), lambda c: c.zero == 3),
        (("--layers", "7"), lambda c: c.model.layers == 7),
        (("--learning-rate=1e-4"), lambda c: c.optimizer.learning_rate == 1e-4),
        (("--source", "a file.txt"), lambda c: c.data.source == "a file.txt"),
        (("--no-sequence-parallel"), lambda c: c.sequence_parallel is False),
        (("--tied"), lambda c: c.model.tied is True),
        (("--clip-norm", "none"), lambda c: c.clip_norm is None),
        (("--reduce-dtype", "none"), lambda c: c.reduce_dtype is None),
        (("--source", "{a b: 3, c: 1}"), lambda c: c.data.source == {"a b": 3.0, "c": 1.0}),
        (("--reduce-dtype", "bfloat16"), lambda c: c.reduce_dtype == "bfloat16"),
        (("--remat", "save:query,up"), lambda c: c.remat == "save:query,up"),
    ],
    ids=str,
)
def test_a_flag_sets_its_field(argv, read) -> None:
    argv = (argv,) if isinstance(argv, str) else argv
    assert read(parse(*argv))


# ---- refusals -----------------------------------------------------------------------------------

INVALID: dict[str, str] = {
    # flags
    "--meshh 4x2": "unknown flag --meshh; did you mean --mesh?",
    "--meshh=4x2": "unknown flag --meshh; did you mean --mesh?",
    "--micro-batches 2": "unknown flag --micro-batches; did you mean --microbatches?",
    "--learning_rate 1": "unknown flag --learning_rate; did you mean --learning-rate?",
    "--mes 4x2": "unknown flag --mes; did you mean --mesh?",
    "--learning-rate=fast": "argument --learning-rate/--lr: invalid float value: 'fast'",
    "--steps 1.5": "--steps: invalid int value: '1.5'",
    "--zero 4": "--zero: invalid choice: 4; choose from 0, 1, 2, 3",
    "--zero 01": "--zero: invalid choice: 01; choose from 0, 1, 2, 3",
    "--optimizer adamm": "--optimizer: invalid choice: adamm; choose from adamw, sgd, lamb, adafactor, muon; did you mean "
    "adamw?",
    "--reduce-dtype bfloat": "choose from bfloat16, float32, none; did you mean bfloat16?",
    "--steps 1_0": "--steps: invalid int value: '1_0'",
    "--steps \u0663": "--steps: invalid int value: '\u0663'",
    "--lr 1_0e-3": "--lr: invalid float value: '1_0e-3'",
    "--lr -inf": "learning_rate is -inf; at least 0",
    "--lr -.5": "learning_rate is -0.5; at least 0",
    "--source {a:x}": "{a:x} is not a mapping of sources to weights, such as {a.txt: 3, b.txt: 1}: ",
    "--source {a": "{a is not a mapping of sources to weights, such as {a.txt: 3, b.txt: 1}: ",
    "--source={}": "source is an empty mixture",
    "--config=": "--config names no file; give one, or leave it out for the defaults",
    "--source=": "source is empty; leave it out for its default",
    "--run-dir=": "run_dir is empty; leave it out for its default",
    "--run-dir a\0b": "run_dir is 'a\\x00b'; no name holds a NUL character",
    "--config a\0b": "config 'a\\x00b': embedded null byte",
    "--config absent.yaml": "config 'absent.yaml': No such file",
    "--mesh": "--mesh: expected one argument",
    "--config": "--config: expected one argument",
    "stray": "unrecognized arguments: stray",
    "--preset gptt2": "preset 'gptt2' is unknown; did you mean gpt2?",
    # mesh
    "--mesh 4x3 --devices 8": "mesh 4x3 needs 12 devices and 8 are visible; ",
    "--mesh=-1x-1 --devices 8": "only one size may be -1",
    "--mesh=-1x-1": "mesh -1x-1 leaves data and model open; only one size may be -1",
    "--mesh 2-1": "mesh '2-1': data is '2-1'; sizes are whole numbers",
    "--mesh -1,2": "mesh '-1,2': data is '-1,2'; sizes are whole numbers",
    "--mesh -1x3": "heads 4 does not divide by model=3",
    "--mesh=-1x3 --devices 8": "3 does not divide the 8 devices that are visible; ",
    "--mesh 4x2x2": "stage=2) is not run by this version; use stage=1",
    "--mesh expert=2": "expert=2) is not run by this version; use expert=1",
    "--mesh context=2": "context=2) is not run by this version; use context=1",
    "--schedule 1f1b": "schedule 1f1b needs a stage axis",
    "--topology v5p": "topology 'v5p' has no sizes; write it as v5p:4x4x4",
    "--topology v5q:4x4x4 --show layout": "'v5q' is not one of v4, v5p, tpu7x, v5e, v6e, h100; did you mean v5p?",
    "--topology v5p:0x4x4 --show layout": "'v5p:0x4x4' has no sizes that are whole numbers from 1; write it as v5p:4x4x4",
    "--topology v5e:4x --show layout": "'v5e:4x' has no sizes that are whole numbers from 1; write it as v5e:4x4",
    "--topology x*v5p:4x4x4 --show layout": "'x' is no number of slices; write it as 2*v5p:4x4x4",
    "--topology 2*h100:1x8x8 --show layout": "the first size of h100 counts slices; write it as h100:2x8x8",
    "--topology v5p:4x4x4 --show layout": "mesh 4x2 needs 8 devices and topology v5p:4x4x4 has 64; ",
    "--topology 2*v5p:4x4x4 --show layout --mesh 32x2": "needs 64 devices and topology 2*v5p:4x4x4 has 128; ",
    "--topology v5p:4x4x4 --show layout --mesh=-1x3": "3 does not divide the 64 devices of topology v5p:4x4x4; ",
    "--topology v5p:4x4x4 --show layout --mesh 32x2 --devices 64": "devices 64 are simulated, and topology v5p:4x4x4 has "
    "its own; leave one out",
    "--optimizer adafactor --vocab 257 --mesh 2x4": "adafactor's means over rows would count the padding; vocab 260 would",
    "--topology v5p:4x4x4 --mesh 64": "chips that are not here: add --show layout",
    # what does not divide
    "--batch 19": "batch 19 does not divide by data=4; 16 or 20 would",
    "--batch 3": "batch 3 does not divide by data=4; 4 would",
    "--batch 20 --microbatches 2": "batch 20 does not divide by data=4 x microbatches=2; 16 or 24",
    "--mesh replica=2,data=2 --batch 6": "batch 6 does not divide by replica=2 x data=2; 4 or 8",
    "--mesh 1x8": "heads 4 does not divide by model=8; 8 would",
    "--heads 6 --kv-heads 6 --mesh 2x4": "heads 6 does not divide by model=4; 4 or 8 would",
    "--mlp 386 --mesh 2x4": "mlp 386 does not divide by model=4; 384 or 388 would",
    "--heads 12 --kv-heads 6 --mesh 2x4": "kv_heads 6 and model=4: one must divide the other",
    "--mesh 8x1 --heads 4 --kv-heads 3": "heads 4 does not divide by kv_heads 3; 1, 2 or 4 would",
    "--heads 4 --kv-heads 3": "kv_heads 3 and model=2: one must divide the other; kv_heads of 1, 2",
    "--sequence 129": "sequence 129 does not divide by model=2; 128 or 130 would, or "
    "--no-sequence-parallel",
    "--loss-chunks 7": "loss_chunks 7 does not divide the 1024 tokens",
    "--attention-chunks 3": "attention_chunks 3 does not divide sequence 128",
    # numbers
    "--steps 0": "steps is 0; at least 1",
    "--kv-heads 0": "kv_heads is 0; at least 1",
    "--microbatches 0": "microbatches is 0; at least 1",
    "--loss-chunks 0": "loss_chunks is 0; at least 1",
    "--attention-chunks 0": "attention_chunks is 0; at least 1",
    "--devices 0": "devices is 0; at least 1",
    "--lr=fast": "argument --learning-rate/--lr: invalid float value: 'fast'",
    "--learning-rate inf": "learning_rate is inf; a finite number",
    "--z-loss inf": "z_loss is inf; a finite number",
    "--rope-theta 0": "rope_theta is 0.0; a finite number above 0",
    "--norm-eps -1": "norm_eps is -1.0; a finite number above 0 that float32 can hold, such as 1e-5",
    "--norm-eps 1e-46": "norm_eps is 1e-46; a finite number above 0 that float32 can hold",
    "--eps 0": "eps is 0.0; a finite number above 0 that float32 can hold, such as 1e-8",
    "--eps 1e-46 --precision bf16": "eps is 1e-46; a finite number above 0 that bf16 can hold",
    "--eps nan": "eps is nan; a finite number above 0",
    "--eps inf": "eps is inf; a finite number above 0",
    "--precision float64 --eps 0": "eps is 0.0; a finite number above 0 that float64 can hold",
    "--steps 99999999999999999999999": "steps is 99999999999999999999999; at most 2147483647",
    "--steps 2147483648": "steps is 2147483648; at most 2147483647",
    "--batch 4294967296": "batch is 4294967296; at most 2147483647",
    "--devices 99999999999999": "devices is 99999999999999; at most 2147483647",
    "--eval-every 99999999999999": "eval_every is 99999999999999; at most 2147483647",
    "--seed 4294967296": "seed is 4294967296; at most 4294967295",
    "--batch 0": "batch is 0; at least 1",
    "--layers -1": "layers is -1; at least 1",
    "--heads 0": "heads is 0; at least 1",
    "--warmup-steps 301": "warmup_steps 301 is more than steps 300",
    "--warmup-steps -1": "warmup_steps is -1; at least 0",
    "--learning-rate -1": "learning_rate is -1.0; at least 0",
    "--learning-rate nan": "learning_rate is nan; at least 0",
    "--beta1 1": "beta1 is 1.0; from 0 up to, not including, 1",
    "--dropout 1": "dropout is 1.0; from 0 up to, not including, 1",
    "--dropout nan": "dropout is nan; from 0 up to, not including, 1",
    "--final-fraction 2": "final_fraction is 2.0; from 0 to 1",
    "--decay-fraction -0.5": "decay_fraction is -0.5; from 0 to 1",
    "--clip-norm 0": "clip_norm is 0.0; above 0 and finite, or none",
    "--clip-norm nan": "clip_norm is nan; above 0 and finite, or none",
    "--clip-norm inf": "clip_norm is inf; above 0 and finite, or none",
    "--z-loss -1": "z_loss is -1.0; at least 0",
    "--seed -1": "seed is -1; at least 0",
    # options
    "--vocab 255": "vocab 255 is too small for bytes; at least 256",
    "--head-dim 31": "head_dim 31 is odd",
    "--preset gpt2 --sequence 1025 --no-sequence-parallel": "sequence 1025 is longer than the 1024 "
    "learned positions",
    "--remat some": "remat some is not one of none, dots, block_inputs, full",
    "--remat dot": "did you mean dots?",
    "--remat save:": "remat save: is not one of",
    "--remat save": "remat save is not one of",
    "--remat save:queri": "no activation is called 'queri'; there are block_input, query",
    "--remat offload:up,": "no activation is called ''",
    "--precision float64 --reduce-dtype float32": "would round gradients; leave it out",
}


@pytest.mark.parametrize("line", INVALID)
def test_an_invalid_command_line_is_refused_with_what_would_work(line, capsys) -> None:
    """M3, M4, F1."""
    assert INVALID[line] in refusal(capsys, *line.split())


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("--batch 19", "--batch"),
        ("--batch 3", "--batch"),
        ("--batch 20 --microbatches 2", "--batch"),
        ("--mesh replica=2,data=2 --batch 6", "--batch"),
        ("--mlp 386 --mesh 2x4", "--mlp"),
        ("--heads 6 --kv-heads 2 --mesh 2x4", "--heads"),
        ("--sequence 129", "--sequence"),
        ("--heads 4 --kv-heads 3", "--kv-heads"),
        ("--heads 12 --kv-heads 6 --mesh 2x4", "--kv-heads"),
        ("--mesh 8x1 --heads 4 --kv-heads 3", "--kv-heads"),
    ],
)
def test_every_number_that_a_refusal_offers_works(argv, flag, capsys) -> None:
    message = refusal(capsys, *argv.split())
    offered = re.findall(r"\d+", message.rpartition("; ")[2].partition("would")[0])
    assert offered
    for number in offered:
        parse(*argv.split(), flag, number)


settings = st.fixed_dictionaries(
    {
        "mesh": st.sampled_from(["1", "8x1", "4x2", "2x4", "1x8", "replica=2,data=2,model=2"]),
        "microbatches": st.integers(1, 4),
        "loss_chunks": st.integers(1, 4),
        "sequence_parallel": st.booleans(),
        "model": st.fixed_dictionaries(
            {
                "heads": st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
                "kv_heads": st.sampled_from([1, 2, 3, 4, 8]),
                "mlp": st.sampled_from([60, 64, 96, 100]),
                "style": st.sampled_from(["llama", "gpt2"]),
                "positions": st.sampled_from([16, 1024]),
            }
        ),
        "data": st.fixed_dictionaries(
            {"batch": st.integers(1, 64), "sequence": st.sampled_from([16, 18, 32, 33])}
        ),
    }
)


@given(data=settings)
def test_exactly_what_divides_is_accepted(data) -> None:
    config = from_dict(data)
    sizes, model = parse_mesh(config.mesh, None), config.model
    split, rows = sizes["model"], sizes["replica"] * sizes["data"] * config.microbatches
    divides = (
        config.data.batch % rows == 0
        and (config.data.batch // rows * config.data.sequence) % config.loss_chunks == 0
        and model.heads % split == 0
        and model.mlp % split == 0
        and model.heads % model.kv_heads == 0
        and 0 in (model.kv_heads % split, split % model.kv_heads)
        and (not config.sequence_parallel or config.data.sequence % split == 0)
        and (model.style == "llama" or config.data.sequence <= model.positions)
    )
    with contextlib.nullcontext() if divides else pytest.raises(ConfigError):
        configs.validate(config)


# ---- environment and process --------------------------------------------------------------------


def test_a_jaxpar_variable_is_refused(monkeypatch, capsys) -> None:
    """F1: nothing would read it."""
    monkeypatch.setenv("JAXPAR_MESHH", "8x1")
    message = refusal(capsys)
    assert message.endswith("JAXPAR_MESHH means nothing to jaxpar; did you mean --mesh?")


@pytest.mark.parametrize("flags", ["xla_dump_to=x", "--xla_dump_to=x xla_more=1"])
def test_an_xla_flag_without_dashes_is_refused(monkeypatch, capsys, flags) -> None:
    """F4: XLA ends the process on it, without a traceback."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert "is not a --flag" in refusal(capsys)


def test_well_formed_xla_flags_are_left_alone(monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=8")
    parse()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--xla_bogus_flag=1", "XLA_FLAGS holds --xla_bogus_flag=1, which XLA does not know"),
        ("--xla_dump_too=x", "did you mean --xla_dump_to?"),
        ("--xla_dump_to=x --xla_cpu_enable_fast_meth=1", "did you mean --xla_cpu_enable_fast_math?"),
        ("--xla_dump_to", "it takes a value, --xla_dump_to=VALUE"),
        ("--xla_tpu_scoped=1", "flags of the TPU compiler belong in LIBTPU_INIT_ARGS"),
        ("--xla_force_host_platform_device_count=abc", "device_count=abc, a value that XLA cannot read"),
        ("--xla_force_host_platform_device_count=99999999999", "a value that XLA cannot read"),
        ("--help", "XLA_FLAGS is refused by XLA, which would abort the process"),
    ],
)  # fmt: skip
def test_an_xla_flag_that_would_abort_the_process_is_refused(
    monkeypatch, capsys, flags, words
) -> None:
    """F4."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert words in refusal(capsys, "--mesh", "4x-1")


def test_a_config_is_read_without_jax() -> None:
    code = (
        "import sys\n"
        "from jaxpar import config\n"
        "config.validate(config.load(['--mesh', '4x2', '--zero', '3']))\n"
        "print(sorted({'jax', 'jaxlib', 'flax', 'optax', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", ["train", "bench"])
def test_a_process_refuses_before_it_imports_jax(command) -> None:
    """M4: so that it takes well under two seconds."""
    argv = ["step"] if command == "bench" else []
    argv += ["--mesh", "4x3", "--devices", "8"]
    code = (
        "import sys\n"
        f"from jaxpar.{command}.__main__ import main\n"
        "try:\n"
        f"    code = main({argv!r})\n"
        "except SystemExit as error:\n"
        "    code = error.code\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stdout)\n"
        "sys.exit(code)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == "[]\n"
    assert "mesh 4x3 needs 12 devices and 8 are visible" in done.stderr
    assert done.stderr.count("\n") == 1
