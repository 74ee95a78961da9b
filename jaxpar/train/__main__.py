"""`python -m jaxpar.train`: read the config, choose the devices, then import JAX and run.

A bad config is refused before JAX is imported, so in well under a second. Exit codes: 0 done; 2 bad
usage, config or input, said in one line; 1 any other failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpar import config as configs
from jaxpar.train.devices import announce, simulate

if TYPE_CHECKING:
    from jaxpar.layout import Layout

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, or exits 2 on a bad config."""
    config = configs.parse(argv)
    try:
        if config.topology is None:
            simulate(config.mesh, config.devices)
        # What follows imports JAX, which reads the flags that `simulate` sets.
        from jaxpar.train import loop
        from jaxpar.train.report import Reporter

        if config.show == "layout":
            if config.topology is None:
                print(announce(config.devices), flush=True)
            par = loop.build(config)
            print(par.mesh, par.layout, *unsplit(par.layout), sep="\n")
            return 0
        folder = loop.choose_folder(config)
        print(announce(config.devices), flush=True)
        job = loop.prepare(config)
        layout = job.par.layout
        print(job.par.mesh, layout, *unsplit(layout), sep="\n", flush=True)
    except ValueError as error:  # every error of a config, a mesh, rules or input is one
        return refuse(error)
    from jaxpar.data import DataError

    try:
        result = loop.train(job, folder, Reporter(config.steps))
    except DataError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was written is in {folder}", file=sys.stderr)
        return 1
    print(result)
    return 0


def unsplit(layout: Layout) -> list[str]:
    """A line for each big parameter that is whole on every device, though the mesh has an axis to split it over."""
    total = layout.bytes_per_device("parameter")
    return [
        f"warning: {leaf.path} is whole on every device: {size:,} bytes, {size / total:.0%} of the parameters there"
        for leaf in layout.unsharded()
        if (size := leaf.bytes_per_device(layout.sizes)) > total / 20
    ]


def refuse(error: ValueError) -> int:
    """Say on one line of stderr what is wrong."""
    text = " ".join(str(error).split())
    print(f"error: {text}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
