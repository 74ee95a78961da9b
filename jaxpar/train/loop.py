"""A config becomes a run: data, mesh and model are built, steps taken, and everything written down.

```
device   | step 0      | step 1      | step 2      |     the host hands over step k, and only then
host     0 1 ........... row 0, 2 .... row 1, 3 ....     waits for step k - 1 and writes its row:
                                                         the device always has its next step
```
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpar import checkpoint, data, optim
from jaxpar import config as configs
from jaxpar.mesh import make_mesh
from jaxpar.models import decoder
from jaxpar.parallel import Parallel, parallelize
from jaxpar.sample import generate
from jaxpar.state import TrainState
from jaxpar.train.metrics import MetricsWriter
from jaxpar.train.report import Reporter, Result

_TEMPERATURE = 0.8
"""Of the sample at the end: a small model's own odds are wide enough to hide what it knows."""


class RunFolderError(ValueError):
    """A run folder that would be written over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """All that a run needs, built and not started.

    Attributes:
        par: the train step.
        windows: training batches.
        heldout: evaluation batches.
    """

    config: configs.RunConfig
    par: Parallel
    windows: data.Windows
    heldout: data.HeldOut


def build(config: configs.RunConfig) -> Parallel:
    """The train step of a config on its mesh; compiles nothing.

    Raises:
        MeshError, LayoutError, ValueError: options that do not fit each other or the devices.
    """
    if config.precision == "float64":
        jax.config.update("jax_enable_x64", True)
    staged, init, rules = decoder.make(
        config.model,
        loss_chunks=config.loss_chunks,
        z_loss=config.z_loss,
        sequence_parallel=config.sequence_parallel,
        attention_chunks=config.attention_chunks,
    )

    def optimizer(layout: Any) -> Any:
        matrices = (
            optim.muon_dimensions(layout.params) if config.optimizer.optimizer == "muon" else None
        )
        mask = layout.decay_mask()
        return optim.make(config.optimizer, config.steps, decay_mask=mask, matrices=matrices)

    return parallelize(
        staged,
        init,
        optimizer,
        mesh=make_mesh(config.mesh, topology=config.topology),
        rules=rules,
        zero=config.zero,
        microbatches=config.microbatches,
        remat=config.remat,
        precision=config.precision,
        reduce_dtype=config.reduce_dtype,
        clip_norm=config.clip_norm,
        schedule=config.schedule,
    )


def prepare(config: configs.RunConfig) -> Job:
    """Build a run and check its input.

    Raises:
        DataError: input that cannot be used. And what `build` raises.
    """
    corpus = data.load(config.data.source)
    shape = {"seq": config.data.sequence, "rows": config.data.batch, "vocab": config.model.vocab}
    windows = data.Windows(tokens=corpus.train, seed=config.seed, **shape)
    heldout = data.HeldOut(tokens=corpus.heldout, **shape)
    return Job(config=config, par=build(config), windows=windows, heldout=heldout)


def choose_folder(config: configs.RunConfig) -> pathlib.Path:
    """The run folder of a config, named by the time where it names none; touches nothing.

    Raises:
        RunFolderError: something is in it, and the config does not say to overwrite it.
    """
    folder = pathlib.Path(config.run_dir or time.strftime("runs/%Y-%m-%d_%H-%M-%S"))
    if folder.is_file():
        raise RunFolderError(f"run folder {folder} is a file; choose another with --run-dir")
    if folder.is_dir() and any(folder.iterdir()):
        if not config.overwrite:
            raise RunFolderError(
                f"run folder {folder} is not empty; choose another with --run-dir, or lose what "
                "is in it with --overwrite"
            )
        if not (folder / "config.yaml").is_file():
            raise RunFolderError(f"{folder} does not look like a run folder: not overwritten")
    return folder


def train(job: Job, folder: pathlib.Path, reporter: Reporter) -> Result:
    """Take all steps of a run, evaluate, save and sample.

    Args:
        folder: what `choose_folder` gave; made new.

    Raises:
        DataError: a token id outside the vocabulary.
    """
    config, par = job.config, job.par
    if folder.is_dir():  # what is in it may go: `choose_folder`
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(configs.to_yaml(config))
    (folder / "layout.json").write_text(par.layout.to_json() + "\n")
    saved: dict[int, pathlib.Path] = {}
    losses: list[float] = []
    rows: list[dict[str, Any]] = []

    with MetricsWriter(folder) as writer, reporter:

        def record(row: dict[str, Any]) -> None:
            rows.append(row)
            writer.write(row)
            reporter.row(row)

        def pause(done: int, state: TrainState) -> None:
            last = done == config.steps
            if last or (config.eval_every and done % config.eval_every == 0):
                limit = None if last else config.eval_batches
                losses.append(evaluate(par, state, job.heldout, limit)["loss"])
                writer.write({"step": done, "eval_loss": losses[-1]})
                on = "every held-out token" if last else "a part of the held-out tokens"
                reporter.say(f"evaluation after {done} steps, {on}: loss {losses[-1]:.4f}")
            if last or (config.checkpoint_every and done % config.checkpoint_every == 0):
                meta = {"step": done, "skipped": [r["step"] for r in rows if r["skipped"]]}
                saved[done] = checkpoint.save(folder / "checkpoints", done, par.unpad(state), meta)

        def pauses(done: int) -> bool:
            every = (config.eval_every, config.checkpoint_every)
            return done == config.steps or any(n and done % n == 0 for n in every)

        batches = data.prefetch(lambda s: par.put(job.windows.batch(s)), range(config.steps))
        state = run_steps(
            par,
            par.init(config.seed),
            batches,
            tokens=config.data.batch * config.data.sequence,
            rate=functools.partial(optim.learning_rate, config.optimizer, config.steps),
            record=record,
            pauses=pauses,
            pause=pause,
        )
    prompt, sample = continuation(job, state) if config.sample_tokens else ("", "")
    seconds = statistics.median([r["step_seconds"] for r in rows][1:] or [rows[0]["step_seconds"]])
    return Result(
        steps=len(rows),
        skipped=sum(r["skipped"] for r in rows),
        loss=rows[-1]["loss"],
        eval_loss=losses[-1],
        step_seconds=seconds,
        tokens_per_second=config.data.batch * config.data.sequence / seconds,
        prompt=prompt,
        sample=sample,
        folder=os.fspath(folder),
        checkpoint=os.fspath(saved[config.steps]),
    )


def run_steps(
    par: Any,
    state: Any,
    batches: Iterable[Mapping[str, Any]],
    *,
    tokens: int,
    rate: Callable[[int], float],
    record: Callable[[dict[str, Any]], None],
    pauses: Callable[[int], bool],
    pause: Callable[[int, Any], None],
) -> Any:
    """Take one step a batch, one ahead of what is read back.

    Args:
        par: its ``step(state, batch) -> (state, metrics)`` returns before the device is done.
        tokens: tokens a batch.
        rate: count of applied updates -> learning rate.
        record: takes the row of each step, in order. step_seconds is the time from the end of one
            step on the device to the end of the next; the first holds the compilation.
        pauses: whether to stop for `pause` after so many steps.
        pause: takes the number of steps done and the state; its time counts for no step.

    Returns:
        The last state.
    """
    pending: tuple[int, Mapping[str, Any]] | None = None
    applied = 0
    since = time.perf_counter()

    def read() -> None:
        nonlocal applied, since
        if pending is None:
            return
        step, metrics = pending
        values = jax.device_get(metrics)  # waits for this step and no other
        now = time.perf_counter()
        seconds, since = now - since, now
        record(
            {
                "step": step,
                **{name: value.item() for name, value in values.items()},
                "learning_rate": rate(applied),
                "step_seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
        )
        applied += 1 - int(values["skipped"])

    for step, batch in enumerate(batches):
        state, metrics = par.step(state, batch)
        read()
        pending = (step, metrics)
        if pauses(step + 1):
            read()
            pending = None
            pause(step + 1, state)
            since = time.perf_counter()
    read()
    return state


def evaluate(
    par: Parallel, state: TrainState, heldout: data.HeldOut, limit: int | None = None
) -> dict[str, float]:
    """Mean over held-out targets of the loss and of every metric: one sum over one weight.

    Args:
        limit: batches to take, evenly spread over all; all by default.
    """
    count = min(limit or len(heldout), len(heldout))
    chosen = [i * len(heldout) // count for i in range(count)]
    totals: dict[str, np.ndarray] = {}
    pending: Any = None

    def add(sums: Any) -> None:
        for name, pair in jax.device_get(sums or {}).items():
            totals[name] = totals.get(name, 0) + np.asarray(pair, np.float64)

    for batch in data.prefetch(lambda i: par.put(heldout.batch(i)), chosen):
        sums = par.evaluate(state, batch)
        add(pending)
        pending = sums
    add(pending)
    return {name: float(total / weight) for name, (total, weight) in totals.items()}


def continuation(job: Job, state: TrainState) -> tuple[str, str]:
    """The end of a held-out text, and what the model writes after it."""
    config = job.config
    # All parameters on one device: the built-in models that train on what is here fit on one.
    device = job.par.mesh.jax_mesh.devices.flat[0]
    params = jax.device_put(job.par.unpad(state).params, device)
    logits = jax.jit(functools.partial(decoder.next_token_logits, config.model))
    prompt = job.heldout.tokens[: config.data.sequence]
    out = generate(
        lambda tokens: logits(params, tokens),
        prompt,
        config.sample_tokens,
        temperature=_TEMPERATURE,
        seed=config.seed,
    )
    return data.decode(prompt[-120:]), data.decode(out)
