"""A run from its first step, or from where it was cut short, to its end.

```
            ┌────────────── go back (`guard`): steps stay not finite ──────────────┐
            ▼                                                                      │
restore or initialise ─► compile ─► steps, evaluations, checkpoints ─► last step ──┴─► evaluate, sample
   phase "restoring"     "compiling"   "stepping" "evaluating" "saving"
                                            │
                                            └─ SIGTERM, SIGINT (`interrupt`) ─► save once ─► Interrupted
```

What a run does next is a function of its checkpoint alone: batch k of the data order, key k of the random numbers, the
learning rate of the count of updates. So stopping and going on changes no number.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxpar import checkpoint, data, feeding, optim
from jaxpar import config as configs
from jaxpar.state import TrainState, advanced
from jaxpar.train import metrics, sampling
from jaxpar.train.evaluation import evaluate
from jaxpar.train.guard import GoBack, Guard, LeftOut
from jaxpar.train.interrupt import Interrupted, Interrupts
from jaxpar.train.job import Job
from jaxpar.train.report import Reporter, Result
from jaxpar.train.run_folder import RunFolder, RunFolderError, write_config
from jaxpar.train.steps import run_steps


@dataclasses.dataclass(kw_only=True)
class Position:
    """Where a run is.

    Attributes:
        step: index of its next batch.
        skipped: batches so far that changed nothing: not finite, or left out.
        left_out: batches that it goes round, and how often it went back.
        reset_at: updates that had been applied when the optimizer was last made anew, whose count began at 0 again.
    """

    step: int
    skipped: list[int]
    left_out: LeftOut
    reset_at: int = 0


def train(job: Job, folder: RunFolder, reporter: Reporter, interrupts: Interrupts) -> Result:
    """Take the steps of a run that are not taken yet, evaluate, save and sample.

    Args:
        folder: held by this process (`run_folder.claim`).

    Raises:
        Interrupted: told to stop; everything is in a checkpoint.
        DataError: a token id outside the vocabulary.
        CheckpointError: a checkpoint could not be written, or the one there does not fit.
        RunFolderError: the data are not those that the run began with.
        DivergedError: losses stay not finite.
    """
    config = job.config
    store = checkpoint.Checkpoints(
        folder.checkpoints,
        keep=config.keep_checkpoints,
        keep_best=config.keep_best,
        keep_every=config.keep_every,
        asynchronous=config.async_checkpoint,
        say=reporter.say,
    )
    try:
        with interrupts.during("restoring"):
            state, position = _begin(job, folder, store, reporter.say)
        at = f"checkpoint {position.step} is complete" if position.step else "no step was taken"
        interrupts.holds_saved(at)
        write_config(folder, config, position.step)
        (folder.path / "layout.json").write_text(job.par.layout.to_json() + "\n")
        with interrupts.during("compiling"):
            reporter.say("compiling the step and the evaluation")
            # All at once and first: nothing that a signal could lose exists yet.
            job.par.compile(job.dataset.train.batch(0))
            job.par.compile_evaluation(job.dataset.heldout.batch(0))
        with metrics.MetricsWriter(folder.path, position.step) as writer, reporter:
            if writer.dropped:
                reporter.say(
                    f"{writer.dropped} rows of metrics after step {position.step} go to dropped.jsonl"
                )
            run = Run(job, folder, store, writer, reporter, interrupts)
            while True:
                try:
                    state = run.take(state, position)
                    break
                except GoBack as row:
                    state, position = run.go_back(row, position)
            return run.finish(state)
    finally:
        store.close()


class Run:
    """One process's part of a run: what `train` does between restoring and the result."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        store: checkpoint.Checkpoints,
        writer: metrics.MetricsWriter,
        reporter: Reporter,
        interrupts: Interrupts,
    ):
        self.job, self.config, self.par = job, job.config, job.par
        self.folder, self.store, self.writer = folder, store, writer
        self.reporter, self.interrupts = reporter, interrupts
        self.last = min(self.config.steps, self.config.stop_after or self.config.steps)
        rows = metrics.read(writer.path)
        self.evaluated = {r["step"]: r["eval_loss"] for r in rows if "eval_loss" in r}
        self.seconds: list[float] = []
        self.row: dict[str, Any] = next((r for r in reversed(rows) if "loss" in r), {})

    def take(self, state: TrainState, position: Position) -> TrainState:
        """The steps from `position` to the last.

        Raises:
            GoBack: too many of them in a row were not finite.
            Interrupted: told to stop; saved.
        """
        guard = Guard(self.config.max_bad_steps)

        def record(row: dict[str, Any]) -> None:
            if row["skipped"]:
                position.skipped.append(row["step"])
            self.row = row
            self.seconds.append(row["step_seconds"])
            self.writer.write(row)
            self.reporter.row(row)
            self.store.check()
            guard.see(row["step"], bool(row["skipped"]))

        def pauses(done: int) -> bool:
            every = (self.config.eval_every, self.config.checkpoint_every)
            return done == self.last or any(n and done % n == 0 for n in every)

        def pause(done: int, state: TrainState) -> None:
            position.step = done
            self._pause(done, state, position)

        if position.step == self.last or pauses(position.step):
            self._pause(position.step, state, position)  # cut short before its evaluation
        for first, end in _stretches(position.step, self.last, self.position_gaps(position)):
            position.skipped += range(position.step, first)
            state = advanced(state, first)
            self.interrupts.holds_unsaved()
            with self.interrupts.during("stepping"):
                state, done = run_steps(
                    self.par,
                    state,
                    self._batches(first, end),
                    tokens=self.config.data.batch * self.config.data.sequence,
                    rate=functools.partial(
                        optim.learning_rate, self.config.optimizer, self.config.steps
                    ),
                    record=record,
                    pauses=pauses,
                    pause=pause,
                    applied=first - len(position.skipped) - position.reset_at,
                    stop=lambda: self.interrupts.requested is not None,
                )
            position.step = first if done is None else done
            if self.interrupts.requested:
                self._leave(state, position)
        if position.step < self.last:  # the last batches are left out
            position.skipped += range(position.step, self.last)
            state, position.step = advanced(state, self.last), self.last
            self._pause(self.last, state, position)
        return state

    def position_gaps(self, position: Position) -> tuple[int, ...]:
        """Batches that are left out from here on."""
        return tuple(s for s in position.left_out.steps if s >= position.step)

    def go_back(self, row: GoBack, position: Position) -> tuple[TrainState, Position]:
        """The state of the last checkpoint from before `row`, and what is left out from there on.

        Raises:
            DivergedError: too often.
        """
        self.store.wait()
        earlier = [s for s in self.store.steps() if s <= row.first]
        target = max(earlier, default=0)
        left_out = position.left_out.after(row, target, self.config.max_rollbacks)
        out = [s for s in left_out.steps if s >= target]
        self.reporter.say(
            f"steps {row.first} to {row.last} were not finite: going back to "
            f"{f'checkpoint {target}' if earlier else 'the start'}, leaving out batches {_ranges(out)}"
        )
        for step in self.store.steps():
            if step > target:
                self.store.set_aside(step, "abandoned", "saved among steps that were not finite")
        with self.interrupts.during("restoring"):
            if earlier:
                restored = self.store.restore(self.par, step=target)
                state, skipped = restored.state, list(restored.meta["skipped"])
                reset_at = restored.meta.get("reset_at", 0)
            else:
                state, skipped, reset_at = first_state(self.job), [], 0
        self.writer.drop(target)
        self.evaluated = {s: loss for s, loss in self.evaluated.items() if s <= target}
        return state, Position(step=target, skipped=skipped, left_out=left_out, reset_at=reset_at)

    def finish(self, state: TrainState) -> Result:
        """The results of a run whose last step is taken."""
        stopped = self.last < self.config.steps
        prompt, sample = "", ""
        if self.config.sample_tokens and not stopped:
            with self.interrupts.during("sampling"):
                prompt, sample = sampling.continuation(self.job, state)
        seconds = statistics.median(self.seconds[1:] or self.seconds or [float("nan")])
        return Result(
            steps=self.last,
            of=self.config.steps,
            skipped=int(state.skipped),
            loss=_number(self.row.get("loss")),
            eval_loss=self.evaluated.get(self.last),
            step_seconds=seconds,
            tokens_per_second=self.config.data.batch * self.config.data.sequence / seconds,
            prompt=prompt,
            sample=sample,
            folder=os.fspath(self.folder.path),
            checkpoint=os.fspath(self.folder.checkpoints / str(self.last)),
        )

    def _pause(self, done: int, state: TrainState, position: Position) -> None:
        """Evaluate and save after `done` steps, where that is due and not done yet."""
        config, end = self.config, done == self.config.steps
        due = end or (config.eval_every and done and done % config.eval_every == 0)
        if due and done not in self.evaluated:
            with self.interrupts.during("evaluating"):
                try:
                    self._evaluate(done, state, whole=end)
                except Interrupted:
                    self._leave(state, position)
        due = done == self.last or (
            config.checkpoint_every and done and done % config.checkpoint_every == 0
        )
        if due and done not in self.store.steps():
            self._save(state, position)
            if done == self.last:
                self.store.wait()
                self.interrupts.holds_saved(f"checkpoint {done} is complete")

    def _evaluate(self, done: int, state: TrainState, *, whole: bool) -> None:
        limit = None if whole else self.config.eval_batches
        heldout = self.job.dataset.heldout
        read = feeding.reader(self.par.mesh, heldout, self.config.data.batch)
        check = self.interrupts.check
        loss = evaluate(self.par, state, heldout, limit, check=check, read=read)["loss"]
        self.evaluated[done] = loss
        self.writer.write({"step": done, "eval_loss": loss})
        on = "every held-out token" if whole else "a part of the held-out tokens"
        self.reporter.say(f"evaluation after {done} steps, {on}: loss {loss:.4f}")

    def _save(self, state: TrainState, position: Position) -> None:
        left_out = position.left_out
        meta = {
            "step": position.step,
            "config": configs.to_dict(self.config),
            "layout": json.loads(self.par.layout.to_json()),
            "data": {**self.job.dataset.fingerprint, "position": position.step},
            "skipped": sorted(position.skipped),
            "reset_at": position.reset_at,
            "left_out": {**dataclasses.asdict(left_out), "steps": list(left_out.steps)},
        }
        with self.interrupts.during("saving"):
            metric = self.evaluated.get(position.step)
            self.store.save(position.step, self.par.unpad(state), meta, metric=metric)

    def _leave(self, state: TrainState, position: Position) -> None:
        """Save if that is not done, and end the run."""
        with self.interrupts.during("saving"):
            self.store.wait()  # what is under way may be this very step
        if position.step not in self.store.steps():
            self._save(state, position)
        with self.interrupts.during("saving"):
            self.store.wait()
        self.interrupts.holds_saved(f"checkpoint {position.step} is complete")
        how = "the same command" if self.config.run_dir else f"--run-dir {self.folder.path}"
        raise Interrupted(
            f"{self.interrupts.requested}: stopped after {position.step} of {self.config.steps} steps and saved in "
            f"{self.folder.path}; {how} goes on from there"
        )

    def _batches(self, first: int, end: int) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        count = self.config.data.batch
        rows = feeding.own_rows(self.par.mesh, count)
        train = self.job.dataset.train

        def make(steps: Sequence[int]) -> Iterator[tuple[int, Any, dict[str, Any]]]:
            for step, batch in zip(steps, train.batches(steps, rows), strict=True):
                # What was trained on can be compared between runs without keeping it.
                crc = zlib.crc32(np.ascontiguousarray(batch["tokens"]).data)
                yield step, feeding.put_rows(self.par.mesh, batch, count), {"data_crc": crc}

        group = train.together(len(rows))
        return data.prefetch_groups(lambda steps: list(make(steps)), range(first, end), group=group)


def first_state(job: Job, say: Callable[[str], None] = print) -> TrainState:
    """The state before step 0: random, or with the weights that ``init_from`` names."""
    config = job.config
    if config.init_from is None:
        return job.par.init(config.seed)
    folder, step = checkpoint.locate(config.init_from)
    restored = checkpoint.Checkpoints(folder).restore(
        job.par,
        step=step,
        weights_only=True,
        allow_cast=config.allow_cast,
        rng=config.seed,
        set_aside=False,
    )
    for line in (*restored.notes, f"weights of step {restored.step} in {folder}"):
        say(line)
    return restored.state


def _begin(
    job: Job, folder: RunFolder, store: checkpoint.Checkpoints, say: Callable[[str], None]
) -> tuple[TrainState, Position]:
    """The state that a run starts from, and where it is."""
    config = job.config
    for line in folder.notes:
        say(f"changed since this run was last started: {line}")
    for line in store.incomplete():
        say(line)
    store.clean()
    if not store.steps() and not store.damaged():
        if folder.resumes:
            say(f"{folder.path} has no complete checkpoint: starting at step 0")
        return first_state(job, say), Position(step=0, skipped=[], left_out=LeftOut())
    try:
        restored = store.restore(
            job.par, allow_cast=config.allow_cast, reset_optimizer=config.reset_optimizer
        )
    except checkpoint.CheckpointError as error:
        if not store.steps() or isinstance(error, checkpoint.Damaged):
            raise
        raise RunFolderError(str(error)) from error  # whole, and of another run: a matter of flags
    for line in restored.notes:
        say(line)
    meta = restored.meta
    before = {k: v for k, v in meta["data"].items() if k != "position"}
    now = json.loads(json.dumps(job.dataset.fingerprint))
    if before != now:
        changed = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        raise RunFolderError(
            f"the data of {folder.path} are not those of its checkpoint {restored.step} ({', '.join(changed)} differ): "
            "rows would be repeated or left out; bring the old data back, or start another run with --init-from"
        )
    if restored.step > config.steps:
        raise RunFolderError(
            f"{folder.path} is at step {restored.step}, past --steps {config.steps}"
        )
    say(f"going on from checkpoint {restored.step} of {config.steps} in {folder.path}")
    kept = meta["left_out"]
    left_out = LeftOut(tuple(kept["steps"]), kept["rollbacks"], kept["target"])
    applied = restored.step - len(meta["skipped"])
    position = Position(
        step=restored.step,
        skipped=list(meta["skipped"]),
        left_out=left_out,
        reset_at=applied if config.reset_optimizer else meta.get("reset_at", 0),
    )
    return restored.state, position


def _stretches(first: int, last: int, gaps: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges of steps from `first` to `last` without the gaps.

    >>> _stretches(0, 10, (3, 4, 9))
    [(0, 3), (5, 9)]
    """
    edges = [first - 1, *(g for g in gaps if first <= g < last), last]
    pairs = [(a + 1, b) for a, b in itertools.pairwise(edges)]
    return [(a, b) for a, b in pairs if a < b]


def _ranges(steps: list[int]) -> str:
    """``3-5, 9`` of 3, 4, 5, 9.

    >>> _ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][-1] + 1 == step:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
