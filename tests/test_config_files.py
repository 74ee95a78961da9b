"""Config files and presets: what wins over what, what a file may hold and why one is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar import config as configs
from jaxpar.config import (
    PRESETS,
    ConfigError,
    RunConfig,
    from_dict,
    from_yaml,
    to_dict,
    to_yaml,
    yaml12,
)

pytestmark = pytest.mark.core

SHIPPED = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def parse(*argv: str) -> RunConfig:
    return configs.parse(argv)


def refusal(path: str) -> str:
    """What a file is refused with."""
    with pytest.raises(ConfigError) as caught:
        from_yaml(path)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


# ---- what wins ----------------------------------------------------------------------------------


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path) -> None:
    path = written(
        tmp_path, "steps: 40\nmesh: '8'\nmodel: {preset: gpt2, layers: 3}\ndata: {batch: 8}\n"
    )
    config = parse("--config", path, "--batch", "16", "--heads", "6", "--kv-heads", "6")
    assert (config.steps, config.mesh, config.data.batch) == (40, "8", 16)
    assert (config.model.layers, config.model.heads) == (3, 6)
    assert config.model.embed == PRESETS["gpt2"]["embed"]
    assert config.data.sequence == RunConfig().data.sequence


def test_a_preset_flag_replaces_the_shape_of_the_file(tmp_path) -> None:
    path = written(tmp_path, "model: {preset: gpt2, layers: 3}\n")
    config = parse("--config", path, "--preset", "peer", "--embed", "64")
    assert config.model.preset == "peer"
    assert config.model.layers == PRESETS["peer"]["layers"]
    assert config.model.embed == 64


def test_defaults_are_the_toy_preset() -> None:
    model = dataclasses.asdict(RunConfig().model)
    assert model == {"preset": "toy", **PRESETS["toy"]}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_every_field_of_a_model(name) -> None:
    assert set(PRESETS[name]) == {f.name for f in dataclasses.fields(configs.ModelConfig)} - {
        "preset"
    }
    assert from_dict({"model": {"preset": name}}).model == configs.ModelConfig(
        preset=name, **PRESETS[name]
    )


# Parameters as their authors' checkpoints hold them.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name) -> None:
    assert parameters(PRESETS[name]) == PUBLISHED[name]


def test_the_toy_has_about_a_million_parameters() -> None:
    assert 0.5e6 < parameters(PRESETS["toy"]) < 1.5e6


def parameters(shape: dict[str, typing.Any]) -> int:
    """Closed form of the decoder's parameter count."""
    layers, embed, mlp, vocab = (shape[n] for n in ("layers", "embed", "mlp", "vocab"))
    heads, kv_heads, size = (shape[n] for n in ("heads", "kv_heads", "head_dim"))
    gpt2 = shape["style"] == "gpt2"
    attention = embed * size * (heads + 2 * kv_heads) + heads * size * embed
    feed_forward = embed * mlp * (2 if gpt2 else 3)
    norm = embed * (2 if gpt2 else 1)
    biases = size * (heads + 2 * kv_heads) + embed + mlp + embed if gpt2 else 0
    tables = vocab * embed * (1 if shape["tied"] else 2) + (
        shape["positions"] * embed if gpt2 else 0
    )
    return layers * (attention + feed_forward + 2 * norm + biases) + norm + tables


# ---- YAML ---------------------------------------------------------------------------------------


def values(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Anything that a field of this type may hold."""
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{name: values(kind) for name, kind in hints.items()})
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is int:
        return st.integers(-(2**63), 2**63 - 1)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(*(values(kind) for kind in typing.get_args(hint)))
    if hint in (bool, str, type(None)):
        return st.from_type(hint)
    return st.one_of([values(kind) for kind in typing.get_args(hint)])


def named_presets(config: RunConfig, name: str) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, preset=name))


any_config = st.builds(named_presets, values(RunConfig), st.sampled_from(list(PRESETS)))


@given(config=any_config)
def test_yaml_gives_back_every_config(tmp_path_factory, config) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert from_yaml(path) == config


@given(config=any_config)
def test_a_config_is_plain_data(config) -> None:
    assert from_dict(to_dict(config)) == config
    json.dumps(to_dict(RunConfig()))


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("meshh: 4x2", "meshh", "did you mean mesh?"),
        ("stpes: 3", "stpes", "did you mean steps?"),
        ("model: {layer: 3}", "model.layer", "did you mean layers?"),
        ("optimizer: {learning_rat: 1.0}", "optimizer.learning_rat", "did you mean learning_rate?"),
        ("layers: 3", "layers", "it belongs under 'model'"),
        ("learning_rate: 1.0", "learning_rate", "it belongs under 'optimizer'"),
        ("batch: 3", "batch", "it belongs under 'data'"),
        ("1: 3", "1", ""),
        ("optimizer: {lr: 1.0}", "optimizer.lr", "did you mean learning_rate?"),
        ("lr: 1.0", "lr", "it belongs under 'optimizer' as learning_rate"),
        ("x: {steps: 3}", "x", ""),
    ],
)
def test_an_unknown_key_names_file_key_and_nearest(tmp_path, text, key, hint) -> None:
    path = written(tmp_path, text)
    message = refusal(path)
    assert path in message
    assert f"unknown key {key}" in message
    assert hint in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("steps: true", "steps"),
        ("steps: 1.5", "steps"),
        ("steps: many", "steps"),
        ("steps: null", "steps"),
        ("steps: [1]", "steps"),
        ("mesh: 8", "mesh"),
        ("overwrite: 1", "overwrite"),
        ("overwrite: 'yes'", "overwrite"),
        ("zero: 4", "zero"),
        ("zero: true", "zero"),
        ("precision: bf17", "precision"),
        ("clip_norm: false", "clip_norm"),
        ("optimizer: {learning_rate: fast}", "optimizer.learning_rate"),
        ("optimizer: {optimizer: adam}", "optimizer.optimizer"),
        ("model: {layers: '4'}", "model.layers"),
        ("model: 3", "model"),
        ("model: null", "model"),
    ],
)
def test_a_wrong_type_names_file_and_key(tmp_path, text, key) -> None:
    path = written(tmp_path, text)
    message = refusal(path)
    assert path in message
    assert re.search(rf"\b{re.escape(key)}\b", message.replace(path, ""))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reduce_dtype: bfloat", "reduce_dtype is 'bfloat'; one of bfloat16, float32; did you mean bfloat16?, or null"),
        ("zero: 4", "zero is 4; one of 0, 1, 2, 3"),
        ("optimizer: {optimizer: adam}", "optimizer.optimizer is 'adam'; one of adamw, sgd, lamb, adafactor, muon; did"),
        ("mesh: 8", 'mesh is 8; text: write it in quotes, "8"'),
        ("mesh: [4, 2]", 'mesh is [4, 2]; text: write it in quotes, "4x2"'),
        ("mesh: {data: 4, model: 2}", 'text: write it in quotes, "data=4,model=2"'),
        ("mesh:", "mesh is empty; text"),
        ("remat: no", "remat is False; text, in quotes where it is yes, no, on"),
        ("topology: 4", 'topology is 4; text: write it in quotes, "4", or null'),
        ("overwrite: 'yes'", "overwrite is 'yes'; true or false"),
        ("clip_norm: fast", "clip_norm is 'fast'; a number, or null"),
        ("data: {source: 3}", 'data.source is 3; text: write it in quotes, "3", or a mapping of names to numbers'),
        ("data: {source: {a: b}}", "data.source is {'a': 'b'}; text, or a mapping of names to numbers"),
        ("data: {source: {1: 2}}", "data.source is {1: 2}; text, or a mapping of names to numbers"),
    ],
)  # fmt: skip
def test_a_wrong_type_says_what_would_work(tmp_path, text, words) -> None:
    path = written(tmp_path, text)
    assert f"{path}: {words}" in refusal(path) or words in refusal(path)


@pytest.mark.parametrize("text", ["none", "None", "null", "~"])
def test_none_is_null_where_its_flag_takes_it(tmp_path, text) -> None:
    path = written(
        tmp_path, f"clip_norm: {text}\nreduce_dtype: {text}\ndata: {{workers: {text}}}\n"
    )
    config = from_yaml(path)
    assert (config.clip_norm, config.reduce_dtype, config.data.workers) == (None, None, None)


def test_none_stays_text_where_text_may_be_meant(tmp_path) -> None:
    config = from_yaml(written(tmp_path, "run_dir: none\nremat: none\n"))
    assert (config.run_dir, config.remat) == ("none", "none")


# ---- numbers of YAML 1.2 ------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1:30", "0100", "010", "1_000", "08", "+-3", "0b11", "1,000"])
def test_what_only_yaml_1_1_takes_for_a_whole_number_is_refused(tmp_path, text) -> None:
    """PyYAML reads 1:30 as 90 and 0100 as 64."""
    path = written(tmp_path, f"steps: {text}\n")
    assert refusal(path) == f"{path}: steps is {text!r}; a whole number in plain digits"


@given(number=st.integers(-(10**30), 10**30))
def test_a_whole_number_is_read_as_python_writes_it(number) -> None:
    assert yaml12.read(f"{number}", "it") == number
    assert yaml12.read(f"[{hex(abs(number))}, {oct(abs(number))}]", "it") == [abs(number)] * 2


@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_read_as_python_writes_it(number) -> None:
    for text in (repr(number), f"{number:e}", f"{number:E}"):
        assert yaml12.read(text, "it") == float(text)


@given(text=st.text(alphabet="0123456789_:.+-eExob", max_size=8))
def test_text_is_a_number_only_where_python_agrees(text) -> None:
    """An oracle of its own: `int` with a base of 0, and `float`, both without underscores."""
    data = yaml12.read(yaml12.write({"a": text}), "it")
    assert data == {"a": text}
    value = yaml12.read(f"a: {text}", "it")["a"] if text.strip("-:. ") == text != "" else None
    if isinstance(value, int):
        assert value == int(text, 0)
    elif isinstance(value, float):
        assert value == float(text)


@pytest.mark.parametrize("text", ["2024-01-01", "2024-13-45", "2001-12-14t21:59:43Z"])
def test_a_date_is_text(tmp_path, text) -> None:
    assert from_yaml(written(tmp_path, f"run_dir: {text}\n")).run_dir == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nsteps: !!int abc", "'abc' is not a whole number in plain digits"),
        ("seed: 1\nsteps: !!int 1:30", "'1:30' is not a whole number in plain digits"),
        ("seed: 1\nclip_norm: !!float x", "'x' is not a number"),
        ("seed: 1\nrun_dir: !!timestamp 2024-13-45", "not of the kind timestamp"),
        ("seed: 1\nrun_dir: !!timestamp x", "not of the kind timestamp"),
        ("seed: 1\nresume: !!bool maybe", "not of the kind bool"),
        (f"seed: 1\nsteps: {'9' * 5000}", "not of the kind int"),
    ],
)
def test_a_value_that_is_not_what_its_tag_says_is_refused_by_file_and_line(
    tmp_path, text, words
) -> None:
    path = written(tmp_path, text)
    message = refusal(path)
    assert words in message
    assert f'in "{path}", line 2, column ' in message


# ---- anchors ------------------------------------------------------------------------------------


def test_anchors_merge_and_what_stands_beside_them_wins(tmp_path) -> None:
    path = written(
        tmp_path,
        "x-small: &small {layers: 2, embed: 64}\n"
        "x-long: &long {<<: *small, layers: 9}\n"
        "model: {<<: *long, embed: 32}\n"
        "<<: {steps: 40, seed: 3}\n"
        "seed: 4\n",
    )
    config = from_yaml(path)
    assert (config.model.layers, config.model.embed) == (9, 32)
    assert (config.steps, config.seed) == (40, 4)


def test_a_mapping_that_merges_may_be_merged_before_it_is_read_itself() -> None:
    """PyYAML reads inner mappings last: by then the merged key stands beside the one that wins."""
    text = "a: &a {x: 1}\nouter: {inner: &b {<<: *a, x: 2}}\nc: {<<: [*b, *a], y: 3}\n"
    expected = {"a": {"x": 1}, "outer": {"inner": {"x": 2}}, "c": {"x": 2, "y": 3}}
    assert yaml12.read(text, "it") == expected


keys = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), max_size=4)


@given(parts=st.lists(keys, min_size=1, max_size=3), own=keys)
def test_of_merged_mappings_the_first_one_wins(parts, own) -> None:
    """YAML 1.1, merge key type: earlier mappings of a list win over later ones, and all give way to what stands there."""
    anchors = "".join(f"p{i}: &p{i} {json.dumps(part)}\n" for i, part in enumerate(parts))
    names = ", ".join(f"*p{i}" for i in range(len(parts)))
    rest = json.dumps(own).strip("{}")
    text = f"{anchors}whole: {{<<: [{names}], {rest}}}\n"
    expected: dict[str, int] = {}
    for part in [own, *parts]:
        expected = {**part, **expected}
    assert yaml12.read(text, "it")["whole"] == expected


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "3.0e-4", "+3e-4", "0.0003"])
def test_a_number_with_an_exponent_is_a_number(tmp_path, text) -> None:
    """YAML 1.1, as PyYAML reads it, takes 3e-4 for text."""
    path = written(tmp_path, f"optimizer: {{learning_rate: {text}}}\n")
    assert from_yaml(path).optimizer.learning_rate == 3e-4


@pytest.mark.parametrize("text", ["3e-4", "1E5", "0.5", "true", "null", "a: b", " x ", ""])
def test_text_that_looks_like_something_else_stays_text(tmp_path, text) -> None:
    config = RunConfig(run_dir=text)
    assert from_yaml(written(tmp_path, to_yaml(config))) == config


def test_whole_numbers_are_floats_too() -> None:
    assert from_dict({"clip_norm": 1}).clip_norm == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "is not YAML"),
        ("[1, 2]", "a mapping of keys to values, not list"),
        ("words", "a mapping of keys to values, not str"),
        ("model: {preset: gptt2}", "preset 'gptt2' is unknown; did you mean gpt2?"),
        ("model: {preset: [gpt2]}", "preset ['gpt2'] is unknown"),
        ("false", "a mapping of keys to values, not bool"),
        ("steps: 5\nsteps: 50", "key steps stands twice"),
        ("data: {batch: 8, batch: 16}", "key batch stands twice"),
        ("<<: {steps: 3}\n<<: {seed: 4}", "key << stands twice"),
        ("x-a: &a {seed: 1}\n<<: *a\nseed: 1\nseed: 2", "key seed stands twice"),
        ("<<: 3", "<< merges a mapping, or a list of mappings"),
        ("<<: [{seed: 1}, 3]", "<< merges a mapping, or a list of mappings"),
        ("<<: &a {<<: *a}", "not YAML"),
        ("[" * 1200, "nested too deep"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text, expected) -> None:
    path = written(tmp_path, text)
    message = refusal(path)
    assert path in message
    assert expected in message


def test_a_missing_file_and_a_folder_are_refused(tmp_path) -> None:
    assert "No such file" in refusal(str(tmp_path / "none.yaml"))
    assert "directory" in refusal(str(tmp_path))


def test_an_empty_file_is_the_defaults(tmp_path) -> None:
    assert parse("--config", written(tmp_path, "# nothing\n")) == RunConfig()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_config_is_valid(path) -> None:
    config = parse("--config", str(path))
    assert config.model.preset == path.stem


def test_every_large_preset_is_shipped() -> None:
    shipped = {path.stem for path in SHIPPED}
    assert shipped == {"toy", "peer", "gpt2", "llama3-8b", "llama3-70b", "llama3-405b"}
