"""A folder of checkpoints and its one writer: saves that training does not wait for, and what stays of them.

```
training   step │ save ├─ step ── step ── step ── check ── step ─ ...     save() hands over and returns
background      └─ arrays, fingerprints ─ rename ─ retention ┘            a failure is raised at the next call
```

A checkpoint appears under its name complete or not at all, is never written over, and the newest never goes.
"""

from __future__ import annotations

import datetime
import functools
import json
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxpar import fingerprint
from jaxpar.checkpoint import arrays, files, restoring
from jaxpar.checkpoint.files import CheckpointError, Damaged
from jaxpar.checkpoint.retention import retained

if TYPE_CHECKING:
    from jaxpar.parallel import Parallel

_OURS = ("fingerprints", "versions", "saved_at", "metric")
"""Keys of the JSON that `save` alone sets; `step` and `form` a caller may give."""


class Checkpoints:
    """The checkpoints of a run.

    One object writes to a folder; any number may read. With several processes, all call the same methods in the same
    order, and the first one renames and deletes.

    Args:
        folder: made with the first save.
        keep: newest checkpoints that stay; 0 keeps all.
        keep_best: checkpoints of the lowest metric that stay as well.
        keep_every: checkpoints at multiples of so many steps stay for good; 0 for none.
        asynchronous: whether `save` returns before the checkpoint is on disk.
        say: takes a line that a person should see and that is no error.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        *,
        keep: int = 3,
        keep_best: int = 0,
        keep_every: int = 0,
        asynchronous: bool = True,
        say: Callable[[str], None] = print,
    ):
        if min(keep, keep_best, keep_every) < 0:
            raise ValueError(
                "keep, keep_best and keep_every count checkpoints and steps: 0 or more"
            )
        self.folder = pathlib.Path(folder).absolute()
        self._keep = {"keep": keep, "keep_best": keep_best, "keep_every": keep_every}
        self._asynchronous = asynchronous
        self._say = say
        self._writer: arrays.Writer | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    # ---- writing ------------------------------------------------------------------------------

    def save(
        self, step: int, state: Any, meta: Mapping[str, Any], *, metric: float | None = None
    ) -> None:
        """Write the checkpoint of `step`; returns as soon as `state` may be donated.

        A save that is still under way is waited for first.

        Args:
            state: pytree of arrays in true shapes (`Parallel.unpad`).
            meta: JSON values to be read again; `fingerprints`, `versions`, `saved_at`, `metric` and `step` are added.
            metric: what `keep_best` goes by, lower is better.

        Raises:
            CheckpointError: an earlier save failed, this step is there already, or the disk refuses.
            TypeError: `meta` is not JSON.
        """
        self.wait()
        path = self.folder / str(step)
        self._make_way(path)
        if self._writer is None:
            self.clean()
            self._writer = arrays.Writer()
        leaves = restoring.flat(state)
        described = _described(step, meta, metric)
        prints = _fingerprints(leaves)
        held, later = arrays.held(leaves)
        begin = functools.partial(
            self._writer.start,
            path,
            held,
            lambda: files.sealed({**described, "fingerprints": prints()}),
        )
        if not later:
            try:
                begin()
            except (OSError, ValueError) as error:
                raise self._failed(step, error) from error
        self._thread = threading.Thread(
            target=self._finish,
            args=(step, begin if later else None),
            name=f"checkpoint {step}",
        )
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def check(self) -> None:
        """Return at once.

        Raises:
            CheckpointError: the save under way has failed; said once.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Return when the save under way is complete, and what no longer stays is deleted.

        Raises:
            CheckpointError: it failed; said once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def saving(self) -> bool:
        """Whether a save is under way; returns at once."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """`wait`, and let go of Orbax; the object may be used again."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _make_way(self, path: pathlib.Path) -> None:
        if not path.exists():
            return
        reason = files.why_incomplete(path)
        if not reason:
            raise CheckpointError(f"{path} is there already; a checkpoint is never written over")
        self.set_aside(int(path.name), "damaged", reason)

    def _finish(self, step: int, begin: Callable[[], None] | None) -> None:
        """In the background: until the checkpoint is complete, then retention."""
        assert self._writer is not None
        try:
            if begin is not None:
                begin()
            self._writer.wait()
        # Whatever it is, the training loop has to hear of it, and this thread has no caller.
        except BaseException as error:
            self._failure = self._failed(step, error)
            return
        try:
            self._retain()
        except (OSError, CheckpointError) as error:
            self._say(f"checkpoint {step} is complete, but old ones stay: {arrays.reason(error)}")

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        if jax.process_index() == 0:
            files.remove_partial(self.folder, step)
        left = [s for s in files.steps(self.folder) if s != step]
        before = f"checkpoint {left[-1]} is the newest" if left else "there is no earlier one"
        return CheckpointError(
            f"checkpoint of step {step} could not be written to {self.folder / str(step)}: "
            f"{arrays.reason(error)}; {before}"
        )

    def _retain(self) -> None:
        if jax.process_index() != 0 or not self._keep["keep"]:
            return
        found = files.steps(self.folder)
        metrics = {step: self._metric(step) for step in found} if self._keep["keep_best"] else {}
        for step in sorted(set(found) - retained(found, metrics, **self._keep)):
            files.remove(self.folder, step)

    def _metric(self, step: int) -> float | None:
        try:
            return files.read_meta(self.folder / str(step))["metric"]
        except Damaged:  # restore says so, if it comes to that
            return None

    # ---- what is there ------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return files.steps(self.folder)

    def incomplete(self) -> list[str]:
        """One line for each thing in the folder that does not count as a checkpoint, and why."""
        return files.incomplete(self.folder)

    def damaged(self) -> list[str]:
        """Names that were checkpoints and are not whole, set aside or not yet."""
        return files.damaged(self.folder)

    def clean(self) -> list[str]:
        """Delete what killed saves and deletions left; returns the names. For the folder's one writer."""
        return files.clean(self.folder) if jax.process_index() == 0 else []

    def set_aside(self, step: int, label: str, why: str) -> None:
        """Rename a checkpoint to ``STEP.LABEL``, so that it does not count; deletes nothing, and says why.

        Raises:
            CheckpointError: the disk refuses.
        """
        if jax.process_index() != 0:
            return
        try:
            aside = files.set_aside(self.folder, step, label)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} cannot be set aside as {label}: {error.strerror}"
            ) from error
        if aside is not None:
            self._say(f"checkpoint {step} is set aside as {aside.name}: {why}")

    # ---- reading ------------------------------------------------------------------------------

    def restore(
        self,
        par: Parallel,
        *,
        step: int | None = None,
        allow_cast: bool = False,
        reset_optimizer: bool = False,
        weights_only: bool = False,
        rng: Any = 0,
        set_aside: bool = True,
    ) -> restoring.Restored:
        """The state of a checkpoint in the stored shapes and shardings of `par`, verified.

        Without a step the newest is taken; where it is damaged it is set aside, and the one before it is taken.

        Args:
            allow_cast: floating point leaves may change their dtype, and masters may come or go.
            reset_optimizer: the optimizer state is as `par` makes it; all else is restored.
            weights_only: parameters and masters are restored, all else is as in ``par.init(rng)``.
            rng: key or seed; only for `weights_only`.
            set_aside: whether a damaged checkpoint is renamed; for the folder's one writer, not for those who only read.

        Raises:
            CheckpointError: none is there, all are damaged, or the one to be taken does not fit `par`: that one is
                never passed over for an older.
        """
        self.wait()
        found = files.numbered(self.folder)
        if step is not None and step not in found:
            raise CheckpointError(
                f"no checkpoint of step {step} under {self.folder}: there are {self.steps()}"
            )
        damage: list[str] = []
        for candidate in [step] if step is not None else found[::-1]:
            try:
                restored = restoring.restore(
                    self.folder / str(candidate),
                    par,
                    allow_cast=allow_cast,
                    reset_optimizer=reset_optimizer,
                    weights_only=weights_only,
                    rng=rng,
                )
            except Damaged as error:
                if step is not None:
                    raise
                damage.append(f"checkpoint {candidate} is damaged: {error}")
                if set_aside:
                    self._set_damaged_aside(candidate, damage)
                continue
            notes = [f"{line}; going back to {candidate}" for line in damage]
            restored.notes[:0] = notes
            return restored
        kind = Damaged if damage else CheckpointError
        lines = "; ".join([*damage, *self.incomplete()])
        raise kind(f"no complete checkpoint under {self.folder}{': ' * bool(lines)}{lines}")

    def _set_damaged_aside(self, step: int, damage: list[str]) -> None:
        if jax.process_index() != 0:
            return
        try:
            files.set_aside(self.folder, step)
        except OSError as error:  # a disk that may only be read: the older one is read all the same
            damage[-1] += f" (it stays under its name: {error.strerror})"


def save(
    folder: str | pathlib.Path,
    step: int,
    state: Any,
    meta: Mapping[str, Any] | None = None,
    *,
    metric: float | None = None,
) -> pathlib.Path:
    """Write one checkpoint and wait for it; nothing in the folder is deleted. `Checkpoints.save`.

    Returns:
        The folder of the checkpoint.
    """
    store = Checkpoints(folder, keep=0, asynchronous=False)
    try:
        store.save(step, state, meta or {}, metric=metric)
    finally:
        store.close()
    return store.folder / str(step)


def _described(step: int, meta: Mapping[str, Any], metric: float | None) -> dict[str, Any]:
    """The JSON of a checkpoint, but for the fingerprints; a copy, as the caller goes on."""
    taken = [key for key in _OURS if key in meta]
    if taken:
        raise ValueError(f"meta {taken[0]!r}: this key is added by save; choose another")
    if meta.get("step", step) != step:
        raise ValueError(f"meta says step {meta['step']} in the checkpoint of step {step}")
    ours = {
        "step": step,
        "metric": None if metric is None else float(metric),
        "form": {"name": "stacked", "weights": False},
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": arrays.versions(),
    }
    return json.loads(json.dumps({**ours, **meta}))


def _fingerprints(leaves: Mapping[str, Any]) -> Callable[[], dict[str, str]]:
    """Starts the sums on the devices; the result waits for them and names them.

    Numpy arrays are summed at once: they may change as soon as `save` returns.
    """
    device = {name: x for name, x in leaves.items() if isinstance(x, jax.Array)}
    host = {n: fingerprint.on_host(x) for n, x in leaves.items() if n not in device}
    sums = fingerprint.of(list(device.values()))

    def wait() -> dict[str, str]:
        rows = dict(zip(device, jax.device_get(sums), strict=True))
        return {n: fingerprint.text(rows[n]) if n in rows else host[n] for n in leaves}

    return wait
