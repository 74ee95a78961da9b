"""`python -m jaxpar.bench step`: time the train step of a config; its flags are those of training.

Exit codes as in `jaxpar.train`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from jaxpar import config as configs
from jaxpar.cli import Parser
from jaxpar.devices import announce, simulate
from jaxpar.train.__main__ import refuse


def parser() -> Parser:
    """The flags of a bench; those of training are added for help, and read by `jaxpar.config`."""
    p = Parser(
        prog="python -m jaxpar.bench",
        usage="python -m jaxpar.bench step [flag ...]",
        description="Time the train step of a config, on random tokens.",
        formatter_class=configs.Help,
    )
    p.add_argument("what", choices=["step"], help="step: one train step, on random tokens")
    p.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before [3]")
    p.add_argument("--repeats", type=int, default=20, metavar="N", help="steps timed [20]")
    p.add_argument("--each", action="store_true", help="print the seconds of every step as well")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    p = parser()
    if {"-h", "--help"} & set(argv):
        configs.add_flags(p)
        p.print_help()
        return 0
    try:
        own, rest = p.parse_known_args(argv)
        if own.warmup < 0 or own.repeats < 1:
            raise configs.ConfigError("--warmup is 0 or more steps, and --repeats at least 1")
    except configs.ConfigError as error:
        return refuse(error)
    config = configs.parse(rest, prog=f"{p.prog} {own.what}")
    if config.show or config.topology:
        return refuse(
            ValueError("--show and --topology are of jaxpar.train: a bench runs the step")
        )
    try:
        simulate(config.mesh, config.devices)
        # What follows imports JAX, which reads the flags that `simulate` sets.
        from jaxpar.bench.step import bench_step

        devices = announce(config.devices)
        result = bench_step(config, warmup=own.warmup, repeats=own.repeats, each=own.each)
    except ValueError as error:
        return refuse(error)
    print(devices, file=sys.stderr, flush=True)
    print(json.dumps(dataclasses.asdict(result)) if own.json else result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
