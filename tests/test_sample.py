"""Sampling: draws that follow the odds, text in whole characters, prompts of any length, errors in one line."""

from __future__ import annotations

import dataclasses
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import jaxpar
from jaxpar import checkpoint
from jaxpar import config as configs
from jaxpar.config import ModelConfig, RunConfig
from jaxpar.data import tokenizers
from jaxpar.models import decoder
from jaxpar.sample import Choice, Sampler, TextStream, choose, weights
from jaxpar.sample import __main__ as command
from jaxpar.sample.generate import bucket
from jaxpar.sample.text import printable

TINY = ModelConfig(
    layers=1,
    embed=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp=32,
    vocab=256,
    positions=24,
    dropout=0.1,
)


# ---- one draw ----------------------------------------------------------------------------------


def probabilities(logits, choice: Choice) -> np.ndarray:
    """Temperature, top-k and top-p in plain numpy."""
    scaled = np.asarray(logits, np.float64) / choice.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")[: choice.top_k]
    kept = p[order] / p[order].sum()
    reached = np.searchsorted(np.cumsum(kept), choice.top_p * (1 - 1e-12)) + 1
    order, kept = order[:reached], kept[:reached]
    out = np.zeros_like(p)
    out[order] = kept / kept.sum()
    return out


LOGITS = np.array([0.3, 2.0, -1.0, 1.2, 1.9, -3.0, 0.7, 0.0])

choose_many = jax.jit(choose, static_argnames="choice")


def counts(choice: Choice, draws: int = 20_000) -> np.ndarray:
    keys = jax.random.split(jax.random.key(7), draws)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (draws, len(LOGITS)))
    return np.bincount(choose_many(logits, keys, choice=choice), minlength=len(LOGITS))


@pytest.mark.core
@pytest.mark.parametrize(
    "choice",
    [
        Choice(),
        Choice(temperature=2.0),
        Choice(temperature=0.5, top_k=3),
        Choice(top_p=0.7),
        Choice(temperature=1.5, top_k=6, top_p=0.9),
        Choice(top_k=100),
    ],
    ids=str,
)
def test_draws_follow_the_odds(choice) -> None:
    want = probabilities(LOGITS, choice)
    got = counts(choice)
    assert got[want == 0].sum() == 0
    kept = want > 0
    assert stats.chisquare(got[kept], want[kept] * got.sum()).pvalue > 1e-3


@pytest.mark.parametrize(
    "choice",
    [Choice(temperature=0.0), Choice(top_k=1), Choice(top_p=1e-9), Choice(temperature=1e-40)],
    ids=str,
)
def test_the_likeliest_alone(choice) -> None:
    assert counts(choice, 100).tolist() == [0, 100, 0, 0, 0, 0, 0, 0]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=8, max_size=8, unique=True),
    st.integers(1, 9),
    st.floats(0.05, 1.0),
    st.integers(0, 2**31),
)
def test_no_draw_leaves_the_nucleus(logits, k, p, seed) -> None:
    """Over any logits, against numpy; probabilities at the very edge of `p` are left open by rounding."""
    choice = Choice(temperature=0.7, top_k=k, top_p=p)
    wide = probabilities(logits, dataclasses.replace(choice, top_p=min(1.0, p * 1.00001)))
    keys = jax.random.split(jax.random.key(seed), 16)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (16, 8))
    assert (wide[np.asarray(choose(rows, keys, choice))] > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0; 0 is the likeliest"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": 0}, "top_k 0; at least 1"),
        ({"top_p": 0.0}, "top_p 0.0; above 0"),
        ({"top_p": 1.1}, "top_p 1.1; above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Choice(**options)


# ---- text --------------------------------------------------------------------------------------


def streamed(tokenizer, ids) -> tuple[list[str], str]:
    stream = TextStream(tokenizer)
    parts = [stream.add(int(i)) for i in ids]
    return parts, stream.rest()


@pytest.mark.core
@given(st.text(max_size=200))
def test_bytes_become_text_in_whole_characters(text) -> None:
    ids = tokenizers.Bytes().encode(text)
    parts, rest = streamed(tokenizers.Bytes(), ids)
    assert "".join(parts) + rest == text
    for part in parts:
        part.encode()  # no half of a character
    assert "\N{REPLACEMENT CHARACTER}" in text or "\N{REPLACEMENT CHARACTER}" not in "".join(parts)


@given(st.lists(st.integers(0, 300), max_size=200))
def test_bytes_that_are_no_text_lose_nothing(ids) -> None:
    parts, rest = streamed(tokenizers.Bytes(), ids)
    assert "".join(parts) + rest == tokenizers.Bytes().decode(ids)


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory) -> tokenizers.Tokenizer:
    """A byte-level BPE whose tokens end inside characters."""
    import tokenizers as library

    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat, naïve façade — 日本語 👍🏽"] * 4, trainer
    )
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizers.load(str(path))


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from("the cat ïç—日本語👍🏽"), max_size=150))
def test_byte_pairs_become_the_text_that_they_are(byte_pairs, text) -> None:
    parts, rest = streamed(byte_pairs, byte_pairs.encode(text))
    assert "".join(parts) + rest == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)


def test_a_terminal_gets_no_control_characters() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x07é") == "a\ufffd[2Jb\tc\nd\ufffdé"


# ---- prompts -----------------------------------------------------------------------------------


def sampler(style: str = "llama", **changes) -> Sampler:
    config = dataclasses.replace(TINY, style=style, **changes)
    params = decoder.init(config, jax.random.key(0))
    return Sampler(config, jaxpar.make_mesh("1", devices=jax.devices()[:1]), params)


@pytest.fixture(scope="module")
def llama() -> Sampler:
    return sampler()


@pytest.fixture(scope="module")
def gpt2() -> Sampler:
    return sampler("gpt2", kv_heads=4)


@pytest.mark.parametrize(("length", "size"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_buckets(length, size) -> None:
    assert bucket(length) == size


@pytest.mark.parametrize(
    ("length", "count", "room"),
    [
        (10, 5, (10, 5)),
        (24, 1, (24, 1)),
        (20, 5, (20, 5)),
        (24, 5, (20, 5)),
        (40, 24, (1, 24)),
        (3, 99, (1, 24)),
    ],
)
def test_learned_positions_have_an_end(gpt2, llama, length, count, room) -> None:
    """24 positions; the last token written needs none."""
    assert gpt2.room(length, count) == room
    assert llama.room(length, count) == (length, count)


def test_of_a_long_prompt_the_last_tokens_are_read(gpt2) -> None:
    random = np.random.default_rng(0)
    long = random.integers(0, 256, 60)
    (whole,) = gpt2.generate([long], 5, choice=Choice(temperature=0))
    (end,) = gpt2.generate([long[-20:]], 5, choice=Choice(temperature=0))
    assert whole.tolist() == end.tolist()


def test_a_text_stops_at_the_end_token_and_others_go_on(llama) -> None:
    rows = [[1, 2], [3], [4, 5, 6]]
    free = [r.tolist() for r in llama.generate(rows, 12, seed=1)]
    end = free[1][4]
    stopped = [r.tolist() for r in llama.generate(rows, 12, seed=1, end=end)]
    assert stopped == [r[: r.index(end)] if end in r else r for r in free]
    assert len(stopped[1]) <= 4
    last = list(llama.stream(rows[1:2], 12, seed=1, end=free[1][0]))
    assert [t.tolist() for t in last] != []


def test_an_empty_prompt_starts_from_the_end_token(llama) -> None:
    (empty,) = llama.generate([[]], 5, end=0, seed=2)
    (ended,) = llama.generate([[0]], 5, end=0, seed=2)
    assert empty.tolist() == ended.tolist()


@pytest.mark.parametrize(
    ("rows", "count", "message"),
    [
        ([], 1, "no prompt"),
        ([[]], 1, "at least one token"),
        ([[[1, 2]]], 1, "one dimension"),
        ([[1], [256]], 1, "prompt 1 holds token 256; the model has the ids 0 to 255"),
        ([[-1]], 1, "holds token -1"),
        ([[1]], 0, "count 0; at least 1"),
    ],
)
def test_prompts_are_checked_before_anything_runs(llama, rows, count, message) -> None:
    with pytest.raises(ValueError, match=message):
        llama.stream(rows, count)


def test_weights_that_are_not_finite_give_no_text() -> None:
    broken = sampler()
    broken.params["final_norm"]["scale"] = broken.params["final_norm"]["scale"] * jnp.nan
    with pytest.raises(ValueError, match="not finite"):
        broken.generate([[1]], 3)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [("stage=2", "mesh axis stage=2"), ("1x8", "heads"), ("context=2", "mesh axis context=2")],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, message) -> None:
    config = TINY
    params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    devices = jax.devices()[: 8 if mesh == "1x8" else 2]
    with pytest.raises(ValueError, match=message):
        Sampler(config, jaxpar.make_mesh(mesh, devices=devices), params)


def test_parameters_of_another_model_are_refused() -> None:
    params = decoder.init(dataclasses.replace(TINY, mlp=64), jax.random.key(0))
    with pytest.raises(ValueError, match=r"blocks/mlp/down is \[1, 64, 16\], and \[1, 32, 16\]"):
        Sampler(TINY, jaxpar.make_mesh("1", devices=jax.devices()[:1]), params)


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with two checkpoints of a trained shape, and its config."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    config = RunConfig(mesh="2x2", model=TINY)
    (folder / "config.yaml").write_text(configs.to_yaml(config))
    staged, init, rules = decoder.make(TINY)
    mesh = jaxpar.make_mesh("2x2", devices=jax.devices()[:4])
    par = jaxpar.parallelize(staged, init, optax.adamw(1e-3), mesh=mesh, rules=rules, zero=3)
    store = checkpoint.Checkpoints(
        folder / "checkpoints", asynchronous=False, say=lambda line: None
    )
    for step, seed in ((3, 0), (7, 1)):
        store.save(step, par.unpad(par.init(seed)), {})
    store.close()
    return folder


@pytest.fixture
def cli(monkeypatch, capsys):
    """(exit code, stdout, stderr) of ``python -m jaxpar.sample ARGS``."""
    # Eight devices stay as they are for the other tests of this process.
    monkeypatch.setattr(command, "simulate", lambda mesh, devices: None)
    monkeypatch.setattr(command, "announce", lambda devices: "devices")

    def call(*args) -> tuple[int | str | None, str, str]:
        try:
            code = command.main([str(a) for a in args])
        except SystemExit as error:
            code = error.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_run_continues_a_text_the_same_on_every_mesh(run, cli) -> None:
    code, out, err = cli(run, "--prompt", "def é", "--tokens", 12, "--seed", 3)
    assert code == 0
    assert out.startswith("def é")
    assert len(out) > len("def é")
    assert "checkpoint of step 7" in err
    assert "12 tokens" in err
    other = cli(run, "--prompt", "def é", "--tokens", 12, "--seed", 3, "--mesh", "2x2")
    assert other[:2] == (0, out)


def test_a_checkpoint_is_chosen_by_path_or_by_step(run, cli) -> None:
    args = ("--prompt", "a", "--tokens", 8, "--temperature", 0)
    by_path = cli(run / "checkpoints" / "3", *args)
    by_step = cli(run, *args, "--step", 7)
    assert "checkpoint of step 3" in by_path[2]
    assert "checkpoint of step 7" in by_step[2]
    assert by_step[1] != by_path[1]


def test_several_samples_of_several_prompts(run, cli, tmp_path) -> None:
    (tmp_path / "prompt.txt").write_text("from a file")
    code, out, _ = cli(
        run,
        "--prompt",
        "one",
        "--prompt-file",
        tmp_path / "prompt.txt",
        "--repeat",
        2,
        "--tokens",
        4,
    )
    assert code == 0
    heads = [
        out.index(f"--- {i} of 4\n{text}") for i, text in enumerate(("one", "from a file") * 2, 1)
    ]
    assert heads == sorted(heads)


def test_an_empty_prompt_and_no_cache(run, cli) -> None:
    one, other = (cli(run, "--tokens", 6, "--seed", 1, *more) for more in ((), ("--no-cache",)))
    assert one[0] == other[0] == 0
    assert one[1] == other[1]


def test_a_text_past_the_training_length_is_said(run, cli) -> None:
    _, _, err = cli(run, "--prompt", "x" * 125, "--tokens", 8)
    assert "may grow to 133 tokens, past the 128 of a training row" in err


def test_a_terminal_sees_text_as_it_comes(run, cli, monkeypatch) -> None:
    writes = []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            writes.append(text)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    code, _, _ = cli(run, "--prompt", "a\x1bb", "--tokens", 20, "--temperature", 5)
    assert code == 0
    assert writes[0] == "a\ufffdb"
    assert len([w for w in writes[1:] if w]) > 5


@pytest.mark.core
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--temprature", "1"), "unknown flag --temprature; did you mean --temperature?"),
        (("--temperature", "-1"), "--temperature is -1.0; 0 takes the likeliest token"),
        (("--top-p", "0"), "--top-p is 0.0; above 0 and up to 1"),
        (("--top-p", "1.5"), "--top-p is 1.5; above 0"),
        (("--top-k", "0"), "--top-k is 0; at least 1"),
        (("--tokens", "0"), "--tokens is 0; at least 1"),
        (("--repeat", "none"), "argument --repeat: invalid int value"),
        (("--seed", "-1"), "--seed is -1; at least 0"),
        (("--step", "5"), "step 5"),
        (("--mesh", "1x3"), "heads 4 does not divide by model=3"),
        (("--mesh", "2x2x2"), "stage=2"),
        (("--mesh", "1x2", "--devices", "4"), "mesh 1x2 needs 2 devices and 4 are visible"),
        (("--prompt-file", "absent.txt"), "prompt file absent.txt: No such file"),
    ],
    ids=lambda f: f[0] if isinstance(f, tuple) else "",
)
def test_bad_usage_is_one_line_and_exit_code_2(run, cli, flags, message) -> None:
    code, out, err = cli(run, *flags)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_no_run_is_one_line_and_names_the_nearest(run, cli, tmp_path) -> None:
    for path, message in (
        (run.parent / "tinny", "no run at"),
        (tmp_path, "hold a config.yaml"),
    ):
        code, _, err = cli(path, "--prompt", "x")
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
    assert "did you mean tiny?" in cli(run.parent / "tinny")[2]


def test_no_complete_checkpoint_is_one_line(run, cli, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    code, _, err = cli(tmp_path)
    assert code == 2
    assert "no complete checkpoint" in err.splitlines()[-1]
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    code, _, err = cli(tmp_path)
    assert code == 1  # there, and damaged: an empty folder
    assert "checkpoint 4 is damaged" in err.splitlines()[-1]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"], (
        "a reader renames nothing"
    )


def test_of_a_run_with_masters_the_weights_alone_are_read(tmp_path) -> None:
    """No masters and no optimizer state on the devices; the weights as the run computed with them."""
    config = RunConfig(mesh="2x2", model=TINY, precision="bf16_params")
    staged, init, rules = decoder.make(TINY)
    mesh = jaxpar.make_mesh("2x2", devices=jax.devices()[:4])
    par = jaxpar.parallelize(
        staged, init, optax.adamw(1e-3), mesh=mesh, rules=rules, precision="bf16_params"
    )
    state = par.init(0)
    store = checkpoint.Checkpoints(tmp_path, asynchronous=False, say=lambda line: None)
    store.save(1, par.unpad(state), {})
    store.close()
    said: list[str] = []
    one = jaxpar.make_mesh("1x2", devices=jax.devices()[:2])
    params, step = weights.load(config, one, tmp_path, None, said.append)
    assert step == 1
    assert any("made from the masters" in line for line in said)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)), params, state.params)
