"""`python -m jaxpar.sample RUN --prompt TEXT`: what a checkpoint writes after a text, on any mesh.

The text goes to stdout as it comes, everything else to stderr. Exit codes: 0 done; 2 bad usage or input, said in one line;
1 a damaged checkpoint, weights that give no text, or an interruption.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpar import config as configs
from jaxpar.axes import BATCH_AXES, parse_mesh
from jaxpar.cli import Parser, find_run, refuse
from jaxpar.config import ConfigError, RunConfig
from jaxpar.devices import announce, simulate

if TYPE_CHECKING:
    from jaxpar.data.tokenizers import Tokenizer
    from jaxpar.sample.generate import Sampler

FAILURE = 1

_UNTIMED = 2
"""Tokens whose programs were compiled on the way."""


def parser() -> Parser:
    """The flags."""
    p = Parser(prog="python -m jaxpar.sample", description="Continue a text.")
    p.add_argument("run", metavar="RUN", help="run folder, or one checkpoint in it")
    p.add_argument(
        "--prompt", action="append", metavar="TEXT",
        help="text to continue; may be given several times; an empty one starts a new document",
    )  # fmt: skip
    p.add_argument(
        "--prompt-file", metavar="FILE", help="file with the text to continue, all of it"
    )
    p.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="most tokens to write [200]"
    )
    p.add_argument(
        "--temperature", type=float, default=0.8, metavar="X",
        help="divides the logits; 0 takes the likeliest token [0.8]",
    )  # fmt: skip
    p.add_argument("--top-k", type=int, metavar="N", help="only the N likeliest tokens")
    p.add_argument(
        "--top-p", type=float, default=1.0, metavar="X",
        help="only the likeliest tokens that together have this probability [1]",
    )  # fmt: skip
    p.add_argument("--seed", type=int, default=0, metavar="N", help="decides every draw [0]")
    p.add_argument("--repeat", type=int, default=1, metavar="N", help="samples of each prompt [1]")
    p.add_argument(
        "--step", type=int, metavar="N", help="checkpoint to read; the newest by default"
    )
    p.add_argument("--mesh", metavar="TEXT", help="data x model, or axes by name [one device]")
    p.add_argument("--devices", type=int, metavar="N", help="devices to simulate on a CPU")
    p.add_argument(
        "--no-cache", action="store_true",
        help="read the whole text again for every token, to compare with",
    )  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, or exits 2 on bad usage."""
    args = parser().parse(list(sys.argv[1:] if argv is None else argv))
    try:
        check(args)
        home = find_run(args.run)
        config = on_mesh(configs.from_yaml(home / "config.yaml"), args.mesh, args.devices)
        prompts = read_prompts(args)
        simulate(config.mesh, config.devices)
        # What follows imports JAX, which reads the flags that `simulate` sets.
        from jaxpar.checkpoint import CheckpointError, Damaged

        try:
            sampler, tokenizer = load(config, args)
        except Damaged as error:
            refuse(error, FAILURE)
        except CheckpointError as error:
            refuse(error)
        ids = [tokenizer.encode(text) for text in prompts]
        notes(config, sampler, ids, args.tokens)
        steps = start(sampler, ids * args.repeat, args, tokenizer.end)
    except ValueError as error:  # every error of a config, a mesh or a prompt is one
        refuse(error)
    try:
        write(steps, prompts * args.repeat, tokenizer)
    except ValueError as error:
        refuse(error, FAILURE)
    except BrokenPipeError:
        # Nobody reads any more; what the interpreter would still flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return FAILURE
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse numbers out of range, before anything is read."""
    for name, least in (("tokens", 1), ("repeat", 1), ("seed", 0), ("step", 0), ("top_k", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; at least {least}")
    if args.seed >= 2**32:
        raise ConfigError(f"--seed is {args.seed}; at most {2**32 - 1}")
    if not 0 <= args.temperature < math.inf:
        raise ConfigError(
            f"--temperature is {args.temperature}; 0 takes the likeliest token, 1 the model's own odds"
        )
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p is {args.top_p}; above 0 and up to 1, which keeps all")


def on_mesh(config: RunConfig, mesh: str | None, devices: int | None) -> RunConfig:
    """The config of a run with the mesh to write on: one device where nothing is said, else all over `model`.

    Raises:
        ConfigError or MeshError: a mesh that does not divide the model or fit the devices.
    """
    mesh = mesh or ("1" if devices is None else f"1x{devices}")
    sizes = parse_mesh(mesh, devices)
    rows = math.prod(sizes[axis] for axis in BATCH_AXES)
    # What a training step would need besides does not matter here.
    changed = dataclasses.replace(
        config, mesh=mesh, devices=devices, topology=None, microbatches=1, loss_chunks=1,
        sequence_parallel=False, data=dataclasses.replace(config.data, batch=rows),
    )  # fmt: skip
    configs.validate(changed)
    return changed


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The texts to continue; an empty one where none is given.

    Raises:
        ConfigError: a file that cannot be read as UTF-8.
    """
    prompts = list(args.prompt or [])
    if args.prompt_file is not None:
        try:
            prompts.append(pathlib.Path(args.prompt_file).read_bytes().decode())
        except OSError as error:
            raise ConfigError(f"prompt file {args.prompt_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"prompt file {args.prompt_file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
                f"{error.start}"
            ) from error
    return prompts or [""]


def load(config: RunConfig, args: argparse.Namespace) -> tuple[Sampler, Tokenizer]:
    """The model on its mesh and its tokenizer.

    Raises:
        CheckpointError: nothing that can be read. DataError: no tokenizer. MeshError: too few devices.
    """
    import jax

    from jaxpar import checkpoint
    from jaxpar.data import tokenizers
    from jaxpar.mesh import make_mesh
    from jaxpar.sample import weights
    from jaxpar.sample.generate import Sampler

    if config.precision == "float64":
        jax.config.update("jax_enable_x64", True)
    say(announce(config.devices))
    tokenizer = tokenizers.load(config.data.tokenizer)
    count = math.prod(parse_mesh(config.mesh, config.devices).values())
    mesh = make_mesh(config.mesh, devices=jax.devices()[:count])
    folder, step = checkpoint.locate(args.run, args.step)
    params, step = weights.load(config, mesh, folder, step, say)
    say(f"checkpoint of step {step}, {str(mesh).splitlines()[0]}")
    vocab = min(tokenizer.vocab, config.model.vocab)
    return Sampler(config.model, mesh, params, precision=config.precision, vocab=vocab), tokenizer


def notes(config: RunConfig, sampler: Sampler, ids: Sequence[Any], count: int) -> None:
    """Say where a text leaves what the model was trained on."""
    for i, prompt in enumerate(ids):
        length = max(1, len(prompt))
        kept, written = sampler.room(length, count)
        which = f"prompt {i + 1}: " if len(ids) > 1 else ""
        places = config.model.positions
        if kept < length:
            say(
                f"{which}the last {kept} of {length} tokens are read: {places} learned positions hold them and the "
                f"{written} to write"
            )
        if written < count:
            say(
                f"{which}{written} of {count} tokens are written: there are {places} learned positions"
            )
        if kept + written > config.data.sequence:
            say(
                f"{which}the text may grow to {kept + written} tokens, past the {config.data.sequence} of a training "
                "row: the model never saw such positions"
            )


def start(sampler: Sampler, ids: Sequence[Any], args: argparse.Namespace, end: int) -> Any:
    """The tokens to come, checked and not yet begun."""
    from jaxpar.sample.choice import Choice

    choice = Choice(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    options = {"choice": choice, "seed": args.seed, "end": end, "cache": not args.no_cache}
    return sampler.stream(ids, args.tokens, **options)


def write(steps: Any, prompts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Print the prompts and what follows: one as it comes, several one after the other at the end.

    Raises:
        ValueError: logits that are not finite.
    """
    from jaxpar.sample.generate import ENDED
    from jaxpar.sample.text import TextStream, printable

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks is no error
    shown = printable if sys.stdout.isatty() else str
    streams = [TextStream(tokenizer) for _ in prompts]
    alone = len(prompts) == 1
    texts = list(prompts)
    if alone:
        print(shown(texts[0]), end="", flush=True)
    written, since, timed = 0, 0.0, 0
    for i, tokens in enumerate(steps):
        for row, (stream, token) in enumerate(zip(streams, tokens.tolist(), strict=True)):
            if token == ENDED:
                continue
            written += 1
            timed += i >= _UNTIMED
            text = stream.add(token)
            texts[row] += text
            if alone:
                print(shown(text), end="", flush=True)
        since = time.perf_counter() if i == _UNTIMED - 1 else since
    seconds = time.perf_counter() - since
    rests = [stream.rest() for stream in streams]
    if alone:
        print(shown(rests[0]))
    else:
        for i, (text, rest) in enumerate(zip(texts, rests, strict=True)):
            print(f"--- {i + 1} of {len(texts)}\n{shown(text + rest)}")
    sys.stdout.flush()
    rate = f", {timed / seconds:,.1f} tokens/s after the first {_UNTIMED} of each" if timed else ""
    say(f"{written} tokens{rate}")


def say(line: str) -> None:
    """A line about the run, apart from the text."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
