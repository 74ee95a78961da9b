"""`python -m jaxpar.train`: read the config, choose the devices, then import JAX and run.

A bad config is refused before JAX is imported, so in well under a second. Exit codes: 0 done; 2 bad
usage, config or input, said in one line; 75 told to stop and saved, start again; 1 any other failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpar import config as configs
from jaxpar.devices import announce, simulate
from jaxpar.train import run_folder
from jaxpar.train.guard import DivergedError
from jaxpar.train.interrupt import INTERRUPTED, Interrupted, Interrupts

if TYPE_CHECKING:
    from jaxpar.layout import Layout

USAGE_ERROR, FAILURE = 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, or exits 2 on a bad config."""
    config = configs.parse(argv)
    with Interrupts() as interrupts:
        try:
            return run(config, interrupts)
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            return INTERRUPTED


def run(config: configs.RunConfig, interrupts: Interrupts) -> int:
    """Show the layout or train; returns the exit code.

    Raises:
        Interrupted: told to stop; everything is in a checkpoint.
    """
    try:
        if config.topology is None:
            simulate(config.mesh, config.devices)
        if config.show == "layout":
            return show(config)
        folder = run_folder.choose(config)
        find_data(config)
        # What follows imports JAX, which reads the flags that `simulate` sets.
        from jaxpar.train import job as jobs
        from jaxpar.train import loop
        from jaxpar.train.report import Reporter

        devices = announce(config.devices)
        job = jobs.prepare(config)
        layout = job.par.layout
        lines = (devices, job.dataset, job.par.mesh, layout, *unsplit(layout))
        print(*lines, sep="\n", flush=True)
    except ValueError as error:  # every error of a config, a mesh, rules or input is one
        return refuse(error)
    from jaxpar.checkpoint import CheckpointError
    from jaxpar.data import DataError

    try:
        with run_folder.claim(folder, config) as held:
            print(loop.train(job, held, Reporter(config.steps), interrupts))
    except (DataError, run_folder.RunFolderError) as error:
        return refuse(error)
    except (CheckpointError, DivergedError) as error:
        return refuse(error, FAILURE)
    except OSError as error:  # a disk that is full says so of any file
        where = error.filename or folder.path
        return refuse(OSError(f"{where}: {error.strerror or error}"), FAILURE)
    return 0


def show(config: configs.RunConfig) -> int:
    """Print the layout of a config without training."""
    from jaxpar.topology import abstract_devices
    from jaxpar.train.job import build

    if config.topology is not None:
        abstract_devices(config.topology)  # sets what libtpu would else miss when JAX starts
    devices = announce(config.devices)
    par = build(config)
    lines = [par.mesh, par.layout, *unsplit(par.layout)]
    print(*([devices] if config.topology is None else []), *lines, sep="\n")
    return 0


def find_data(config: configs.RunConfig) -> None:
    """Refuse files on this machine that are not there, before JAX is imported; other storage is asked when it is read.

    Raises:
        DataError: no such file, an empty one, or files that do not go together.
    """
    from jaxpar.data import files, sources

    source = config.data.source
    for name in (*(source if isinstance(source, dict) else [source]), config.data.heldout):
        if name not in (None, "stdlib") and not files.is_remote(name):
            sources.inputs(name)


def unsplit(layout: Layout) -> list[str]:
    """A line for each big parameter that is whole on every device, though the mesh has an axis to split it over."""
    total = layout.bytes_per_device("parameter")
    return [
        f"warning: {leaf.path} is whole on every device: {size:,} bytes, {size / total:.0%} of the parameters there"
        for leaf in layout.unsharded()
        if (size := leaf.bytes_per_device(layout.sizes)) > total / 20
    ]


def refuse(error: Exception, code: int = USAGE_ERROR) -> int:
    """Say on one line of stderr what is wrong."""
    text = " ".join(str(error).split())
    print(f"error: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
