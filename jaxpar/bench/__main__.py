"""`python -m jaxpar.bench step`: time the train step of a config; its flags are those of training.

Exit codes as in `jaxpar.train`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from jaxpar import config as configs
from jaxpar.devices import announce, simulate
from jaxpar.train.__main__ import refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpar.bench",
        description=__doc__,
        epilog="Every flag of python -m jaxpar.train works too: --mesh 4x2 --zero 3 ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=["step"], help="step: one train step, on random tokens")
    parser.add_argument(
        "--warmup", type=int, default=3, metavar="N", help="steps before (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="steps timed (%(default)s)"
    )
    parser.add_argument(
        "--each", action="store_true", help="print the seconds of every step as well"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    own, rest = parser.parse_known_args(argv)
    if own.warmup < 0 or own.repeats < 1:
        return refuse(ValueError("--warmup is 0 or more steps, and --repeats at least 1"))
    config = configs.parse(rest, prog=f"{parser.prog} {own.what}")
    if config.show or config.topology:
        return refuse(
            ValueError("--show and --topology are of jaxpar.train: a bench runs the step")
        )
    try:
        simulate(config.mesh, config.devices)
        # What follows imports JAX, which reads the flags that `simulate` sets.
        from jaxpar.bench.step import bench_step

        print(announce(config.devices), file=sys.stderr, flush=True)
        result = bench_step(config, warmup=own.warmup, repeats=own.repeats, each=own.each)
    except ValueError as error:
        return refuse(error)
    print(json.dumps(dataclasses.asdict(result)) if own.json else result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
