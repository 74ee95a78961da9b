"""`python -m jaxpar.checkpoint`: look into checkpoints, verify, compare and convert them.

No accelerator is touched, and a run may be writing to the folder meanwhile. DIR is a run folder, its folder of
checkpoints or one checkpoint. Exit codes: 0 done; 1 `verify` found damage, or `diff` a difference; 2 bad usage, or
nothing there, said in one line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from jaxpar.cli import Parser, refuse
from jaxpar.config import ConfigError, nearest

if TYPE_CHECKING:
    import argparse

PROG = "python -m jaxpar.checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, or exits 2 on bad usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: {PROG} COMMAND ...\n\n{__doc__}")
        print("\n".join(f"  {name:8} {command.__doc__}" for name, (command, _) in COMMANDS.items()))
        return 0
    name = words[0]
    if name not in COMMANDS:
        refuse(ConfigError(f"unknown command {name}{nearest(name, COMMANDS) or _there_are()}"))
    command, arguments = COMMANDS[name]
    parser = Parser(prog=f"{PROG} {name}", description=command.__doc__)
    arguments(parser)
    args = parser.parse(words[1:])
    # What follows imports JAX: on the CPU, so that a GPU that trains keeps all its memory.
    import jax

    jax.config.update("jax_platforms", "cpu")
    try:
        return command(args)
    except ValueError as error:  # CheckpointError is one
        refuse(error)


def _list(args: argparse.Namespace) -> int:
    """all checkpoints: step, size, date, metric, whether complete"""
    from jaxpar.checkpoint import files, report

    folder, step = files.locate(args.dir)
    _print_table(("step", "size", "saved", "metric", "complete"), report.rows(folder, step))
    return 0


def _show(args: argparse.Namespace) -> int:
    """one checkpoint: config, versions, data position, leaves"""
    from jaxpar.checkpoint import files, report

    checkpoint = report.opened(*files.locate(args.dir, args.step))
    print("\n".join(report.described(checkpoint, leaves=args.leaves)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    """read every array and compare it with what was saved"""
    from jaxpar.checkpoint import files, report

    folder, step = files.locate(args.dir, args.step)
    chosen = files.numbered(folder) if step is None else [step]
    if not chosen:
        refuse(ConfigError(f"no checkpoint under {folder}"))
    damaged = 0
    for n in chosen:
        leaves, wrong = report.wrong_leaves(folder, n, _progress(f"checkpoint {n}"))
        if not (folder / str(n)).exists():
            print(f"{n}: deleted by its run meanwhile")
            continue
        damaged += bool(wrong)
        print(f"{n}: {'DAMAGED' if wrong else 'whole'}, {leaves} leaves read")
        for name, why in wrong.items():
            print(f"  {name}: {why}" if name else f"  {why}")
    for line in files.incomplete(folder) if step is None else []:
        if line.split(":")[0] not in map(str, chosen):
            print(f"not counted: {line}")
    return 1 if damaged else 0


def _diff(args: argparse.Namespace) -> int:
    """how two checkpoints differ: leaves, shapes, dtypes, values"""
    from jaxpar.checkpoint import files, report

    a, b = (report.opened(*files.locate(path)) for path in (args.a, args.b))
    lines = report.differences(a, b)
    print("\n".join(lines) if lines else f"equal: {len(a.sources)} leaves of {a.path} and {b.path}")
    return 1 if lines else 0


def _convert(args: argparse.Namespace) -> int:
    """write a checkpoint in another form; the source stays"""
    import pathlib

    from jaxpar.checkpoint import files, forms, report

    source = report.opened(*files.locate(args.src, args.step)).path
    print(forms.convert(source, pathlib.Path(args.dst), args.form, args.dtype))
    return 0


def _one(parser: Parser) -> None:
    parser.add_argument("dir", metavar="DIR", help="run folder, its checkpoints, or one of them")


def _one_step(parser: Parser) -> None:
    _one(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint to take")


def _show_flags(parser: Parser) -> None:
    _one_step(parser)
    parser.add_argument("--leaves", action="store_true", help="list every leaf")


def _two(parser: Parser) -> None:
    parser.add_argument("a", metavar="A", help="run folder, its checkpoints, or one of them")
    parser.add_argument("b", metavar="B", help="the other")


def _convert_flags(parser: Parser) -> None:
    parser.add_argument("src", metavar="SRC", help="run folder, its checkpoints, or one of them")
    parser.add_argument("dst", metavar="DST", help="folder of checkpoints, or a .safetensors file")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint to take")
    parser.add_argument(
        "--form",
        required=True,
        choices=["stacked", "layers", "weights", "safetensors"],
        help="layers: one leaf a layer. weights: no optimizer state. safetensors: weights in one file",
    )
    parser.add_argument("--dtype", metavar="NAME", help="of the weights, such as bfloat16")


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[Parser], None]]] = {
    "list": (_list, _one),
    "show": (_show, _show_flags),
    "verify": (_verify, _one_step),
    "diff": (_diff, _two),
    "convert": (_convert, _convert_flags),
}


def _there_are() -> str:
    return f"; there are {', '.join(COMMANDS)}"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with rules on a terminal, aligned columns elsewhere."""
    from rich.console import Console
    from rich.table import Table

    if sys.stdout.isatty():
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def _progress(title: str) -> Callable[[list[str]], Iterable[str]]:
    """Walks through a list, with a bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    if not sys.stderr.isatty():
        return iter
    return lambda items: track(items, title, console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    sys.exit(main())
