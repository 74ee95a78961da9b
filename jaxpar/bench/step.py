"""Time the compiled train step of a config on random tokens, and what Python adds to it."""

from __future__ import annotations

import dataclasses
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar import config as configs
from jaxpar.bench.chips import chip_of, chips_in, flops_per_token, matmul_parameters
from jaxpar.parallel import Parallel
from jaxpar.train.job import build
from jaxpar.train.metrics import MetricsWriter
from jaxpar.train.steps import run_steps

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBench:
    """Measurements of one train step; None where this machine cannot say.

    Attributes:
        mesh: the mesh, sizes above 1.
        device: kind of device.
        tokens: tokens a step, over all devices.
        compile_seconds: tracing, lowering and compiling: the first step less the median one.
        step_seconds: median, after warm-up, until the results are there.
        fastest_seconds: the fastest of them.
        tokens_per_second: at the median.
        matmul_parameters: parameters that every token is multiplied with.
        flops_per_token: model FLOPs a token (`jaxpar.bench.chips`).
        model_flops_per_second: over all devices, at the median.
        mfu: fraction of the bfloat16 peak of the chips, or None where the peak is not known.
        call_seconds: what `Parallel.step` costs beyond the call of the compiled program.
        loop_seconds: what the training loop adds: reading, writing and counting a row.
        device_bytes: per device, of the compiled step: arguments, outputs, temporaries, aliased,
            and the compiler's peak; where it gives none, the sum of all less the aliased.
        process_bytes: largest resident memory of this process so far.
    """

    mesh: str
    device: str
    tokens: int
    compile_seconds: float
    step_seconds: float
    fastest_seconds: float
    tokens_per_second: float
    matmul_parameters: int
    flops_per_token: int
    model_flops_per_second: float
    mfu: float | None
    call_seconds: float
    loop_seconds: float
    device_bytes: dict[str, int] | None
    process_bytes: int

    def __str__(self) -> str:
        if self.mfu is None:
            mfu = f"not known: no peak rate is on record for {self.device}"
        else:
            mfu = f"{self.mfu:.1%} of the bfloat16 peak"
        memory = "not reported by this backend"
        if self.device_bytes is not None:
            parts = [f"{name} {n / MIB:,.1f}" for name, n in self.device_bytes.items()]
            memory = ", ".join(parts) + " MiB"
        rows = {
            "mesh": f"{self.mesh} on {self.device}",
            "compile": f"{self.compile_seconds:.1f} s",
            "step": f"{self.step_seconds:.4f} s median, {self.fastest_seconds:.4f} s fastest",
            "tokens": f"{self.tokens:,} a step, {self.tokens_per_second:,.0f} a second",
            "model FLOPs": f"{self.flops_per_token:,} a token = 6 x {self.matmul_parameters:,} "
            "matrix parameters (no input embedding) + 12 L s H D of attention",
            "rate": f"{self.model_flops_per_second / 1e9:,.1f} GFLOP/s",
            "MFU": mfu,
            "Python": f"{(self.call_seconds + self.loop_seconds) * 1e3:.3f} ms a step beyond the "
            f"compiled call: {self.call_seconds * 1e3:.3f} in the step, "
            f"{self.loop_seconds * 1e3:.3f} in the loop",
            "per device": memory,
            "process": f"{self.process_bytes / MIB:,.0f} MiB resident at most",
        }
        return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


def bench_step(
    config: configs.RunConfig, *, warmup: int, repeats: int, each: bool = False
) -> StepBench:
    """Measure the train step of a config.

    Args:
        warmup: steps that do not count.
        repeats: steps that do.
        each: print the seconds of every step as it is done.

    Raises:
        MeshError, LayoutError, ValueError: as `jaxpar.train.job.build`.
    """
    par = build(config)
    shape = (config.data.batch, config.data.sequence)
    random = np.random.default_rng(config.seed)
    vocab, names = config.model.vocab, ("tokens", "targets")
    host = {name: random.integers(0, vocab, shape, np.int32) for name in names}
    batch = par.put(host)
    state = jax.block_until_ready(par.init(config.seed))
    begin = time.perf_counter()
    state, metrics = par.step(state, batch)
    jax.block_until_ready(metrics)
    first = time.perf_counter() - begin
    seconds = []
    for i in range(warmup + repeats):
        begin = time.perf_counter()
        state, metrics = par.step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
        if each:
            print(f"completed step: {i}, seconds: {seconds[-1]:.4f}", flush=True)
    seconds = seconds[warmup:]
    median = statistics.median(seconds)
    tokens = shape[0] * shape[1]
    devices = par.mesh.jax_mesh.devices.flat
    chip = chip_of(devices[0].device_kind)
    rate = tokens / median * flops_per_token(config.model, config.data.sequence)
    return StepBench(
        mesh=" x ".join(f"{k}={v}" for k, v in par.mesh.sizes.items() if v > 1) or "one device",
        device=f"{len(devices)} x {devices[0].device_kind}",
        tokens=tokens,
        compile_seconds=first - median,
        step_seconds=median,
        fastest_seconds=min(seconds),
        tokens_per_second=tokens / median,
        matmul_parameters=matmul_parameters(config.model),
        flops_per_token=flops_per_token(config.model, config.data.sequence),
        model_flops_per_second=rate,
        mfu=None if chip is None else rate / (chips_in(list(devices)) * chip.flops),
        call_seconds=call_seconds(par, state, batch, repeats=_pairs(median)),
        loop_seconds=loop_seconds(state, batch, metrics),
        device_bytes=device_bytes(par),
        process_bytes=process_bytes(),
    )


def _pairs(step_seconds: float) -> int:
    """Pairs of steps for `call_seconds`: about ten seconds of them, within reason."""
    return min(50, max(5, int(10 / (2 * step_seconds))))


def call_seconds(par: Parallel, state: Any, batch: Any, *, repeats: int) -> float:
    """Time until the call of the step returns, less that of the compiled program itself.

    Medians of calls in turn: both return before the devices are done, and both see the same load.
    Not below 0, where the difference is lost in the noise.
    """
    (compiled,) = par.compiled.values()
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * repeats):
        run = par.step if i % 2 else compiled
        begin = time.perf_counter()
        state, metrics = run(state, batch)
        times[bool(i % 2)].append(time.perf_counter() - begin)
        jax.block_until_ready((state, metrics))
    return max(0.0, statistics.median(times[True]) - statistics.median(times[False]))


class _Done:
    """A step that is done at once, with the metrics of a real one: what is left is the loop."""

    def __init__(self, metrics: Mapping[str, Any]):
        self._metrics = metrics

    def step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        return state, self._metrics


def loop_seconds(state: Any, batch: Any, metrics: Mapping[str, Any], *, steps: int = 200) -> float:
    """Median time of a step of the training loop around a step that takes no time."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder, MetricsWriter(folder) as writer:

        def record(row: dict[str, Any]) -> None:
            writer.write(row)
            ends.append(time.perf_counter())

        run_steps(
            _Done(metrics),
            state,
            ((i, batch, {}) for i in range(steps)),
            tokens=1,
            rate=lambda count: 0.0,
            record=record,
            pauses=lambda done: False,
            pause=lambda done, state: None,
        )
    return float(np.median(np.diff(ends)))


def device_bytes(par: Parallel) -> dict[str, int] | None:
    """Bytes per device of the compiled step, from XLA; None where the backend does not say."""
    (compiled,) = par.compiled.values()
    try:
        stats = compiled.memory_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None
    parts = {
        "arguments": "argument_size_in_bytes",
        "outputs": "output_size_in_bytes",
        "temporaries": "temp_size_in_bytes",
        "aliased": "alias_size_in_bytes",
    }
    # Which fields there are depends on the backend and the version of jaxlib.
    if stats is None or not all(hasattr(stats, field) for field in parts.values()):
        return None
    found: dict[str, int] = {name: getattr(stats, field) for name, field in parts.items()}
    # The CPU's own peak leaves the temporaries out, which makes it none.
    peak = {"peak": getattr(stats, "peak_memory_in_bytes", 0)}
    if peak["peak"] < found["temporaries"]:
        held = found["arguments"] + found["outputs"] + found["temporaries"] - found["aliased"]
        peak = {"sum": held}
    return {**found, **peak}


def process_bytes() -> int:
    """Largest resident memory of this process so far; all simulated devices live in it."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
