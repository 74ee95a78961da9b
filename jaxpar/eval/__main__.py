"""`python -m jaxpar.eval RUN`: mean loss of a checkpoint over every held-out token.

Any mesh, any checkpoint of the run, its own held-out text or another source. Exit codes: 0 done; 2 bad usage or input; 1 a
damaged checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence

from jaxpar import config as configs
from jaxpar.checkpoint import Damaged
from jaxpar.cli import Parser, find_run, refuse
from jaxpar.devices import announce, simulate


def parser() -> Parser:
    """The flags."""
    p = Parser(prog="python -m jaxpar.eval", description="Mean loss over every held-out token.")
    p.add_argument("run", metavar="RUN", help="run folder, or one checkpoint in it")
    p.add_argument(
        "--step", type=int, metavar="N", help="checkpoint to read; the newest by default"
    )
    p.add_argument(
        "--heldout", metavar="SOURCE", help="text to evaluate on instead of the run's held-out text"
    )
    p.add_argument("--mesh", help="mesh to run on; the run's by default")
    p.add_argument("--devices", type=int, metavar="N", help="devices to simulate on a CPU")
    p.add_argument("--batch", type=int, metavar="N", help="rows of one batch; the run's by default")
    p.add_argument(
        "--batches", type=int, metavar="N", help="evenly spread batches to take; all by default"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, or exits 2 on bad usage."""
    args = parser().parse(list(sys.argv[1:] if argv is None else argv))
    try:
        config = _config(args)
        simulate(config.mesh, config.devices)
        from jaxpar import checkpoint
        from jaxpar.train.evaluation import evaluate
        from jaxpar.train.job import prepare

        say = print if not args.json else lambda line: None
        devices = announce(config.devices)
        folder, step = checkpoint.locate(args.run)
        job = prepare(config, say)
        store = checkpoint.Checkpoints(folder, say=say)
        step = step if args.step is None else args.step
        restored = store.restore(job.par, step=step, weights_only=True, set_aside=False)
    except ValueError as error:
        refuse(error, 1 if isinstance(error, Damaged) else 2)
    say(devices)
    for note in restored.notes:
        say(note)
    means = evaluate(job.par, restored.state, job.dataset.heldout, args.batches)
    loss = means.pop("loss")
    result = {
        "step": restored.step,
        "loss": loss,
        "bits": loss / math.log(2),
        "perplexity": math.exp(min(loss, 700.0)),
        **means,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"step {restored.step}: loss {loss:.4f} nats ({result['bits']:.3f} bits) a token, perplexity "
            f"{result['perplexity']:.4g}, over {int(means['targets']):,} held-out tokens"
        )
    return 0


def _config(args: object) -> configs.RunConfig:
    """The run's config with what the flags change.

    Raises:
        ConfigError: no run there, or a combination that cannot run.
    """
    given = vars(args)
    config = configs.from_yaml(find_run(given["run"]) / "config.yaml")
    data = config.data
    if given["heldout"]:
        data = dataclasses.replace(data, heldout=given["heldout"])
    if given["batch"]:
        data = dataclasses.replace(data, batch=given["batch"])
    changes = {k: given[k] for k in ("mesh", "devices") if given[k] is not None}
    if "mesh" in changes:
        changes.setdefault("devices", None)
    # Nothing is updated: the moments need no split, and one microbatch is enough.
    config = dataclasses.replace(config, data=data, microbatches=1, **changes)
    configs.validate(config)
    return config


if __name__ == "__main__":
    sys.exit(main())
