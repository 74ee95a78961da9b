"""How long a save keeps training waiting: asynchronous against synchronous, the same state, one machine.

    python benchmarks/checkpoint.py --megabytes 200 --devices 8 --rounds 5

A jitted step that works on the whole state (donated, as in training) runs in a loop, its results awaited as the trainer
does, one step behind. Each round takes, in this order: steps without a save (their median is the undisturbed step); one
synchronous save; one asynchronous save with steps until it is complete. Then

    delay = time of the steps from the call of save until it is complete - their number x the undisturbed step

is all that the save cost the loop: the call itself and the steps that it slowed down. `call` is the call alone. Prints a
row of a Markdown table: medians over the rounds, and delay and call as shares of the synchronous save.

On a machine that trains on its own cores, the threads that write take cores from the step. ``--elsewhere SECONDS`` stands
for an accelerator: the step is so many seconds of waiting in place of the work, and the cores are free meanwhile. What
is left then is mostly `snapshot`: the copy of the state and its checksums, which run on the devices between two steps. Here
these are the cores; an accelerator does both in its own memory, at a thousand times the bandwidth.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from typing import Any


def main() -> None:
    """Measure, and print one row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200, help="of the state")
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to simulate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--elsewhere", type=float, help="a step waits so many seconds, not works")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpar import fingerprint
    from jaxpar.checkpoint import Checkpoints, arrays
    from jaxpar.mesh import make_mesh

    mesh = make_mesh(f"data={args.devices}").jax_mesh
    split = NamedSharding(mesh, PartitionSpec("data"))
    # As many leaves as a small decoder with its moments has, all random: nothing to compress.
    leaves, width = 36, 1024
    rows = args.megabytes * 250_000 // leaves // width // args.devices * args.devices
    value = jax.jit(
        lambda seed: jax.random.normal(jax.random.key(seed), (rows, width)), out_shardings=split
    )
    state = {f"w{i}": value(i) for i in range(leaves)}
    square = jax.device_put(
        jax.random.normal(jax.random.key(1), (width, width)) / 32,
        NamedSharding(mesh, PartitionSpec()),
    )

    def step(
        state: dict[str, jax.Array], square: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        new = {name: x * 0.999 + 0.001 * jnp.tanh(x @ square) for name, x in state.items()}
        return new, jnp.mean(new["w0"])

    def wait(value: Any) -> Any:
        time.sleep(args.elsewhere)
        return value

    def elsewhere(
        state: dict[str, jax.Array], square: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        mean = jnp.mean(state["w0"])
        mean = jax.pure_callback(wait, jax.ShapeDtypeStruct((), mean.dtype), mean)
        return {**state, "w0": state["w0"] + 1e-9 * mean}, mean

    run = jax.jit(
        step if args.elsewhere is None else elsewhere,
        donate_argnums=0,
        out_shardings=(split, NamedSharding(mesh, PartitionSpec())),
    )
    loss = None

    def take() -> float:
        nonlocal state, loss
        before = loss
        since = time.perf_counter()
        state, loss = run(state, square)
        if before is not None:
            before.block_until_ready()
        return time.perf_counter() - since

    def settle() -> None:
        jax.block_until_ready(state)

    folder = tempfile.mkdtemp(dir=args.folder)
    store = Checkpoints(folder, keep=1)
    for _ in range(3):
        take()
    store.save(0, state, {})  # compiles the copy and the sums
    store.wait()
    plain, synchronous, calls, delays, snapshots = [], [], [], [], []
    number = 0
    try:
        for _ in range(args.rounds):
            alone = [take() for _ in range(10)][2:]
            plain.append(statistics.median(alone))
            settle()
            number += 1
            since = time.perf_counter()
            store.save(number, state, {})
            store.wait()
            synchronous.append(time.perf_counter() - since)
            for _ in range(3):
                take()
            settle()
            number += 1
            since = time.perf_counter()
            store.save(number, state, {})
            calls.append(time.perf_counter() - since)
            taken = 0
            while store.saving():
                take()
                taken += 1
            settle()
            delays.append(time.perf_counter() - since - taken * plain[-1])
            store.wait()
            since = time.perf_counter()
            jax.block_until_ready((arrays.held(state), fingerprint.of(list(state.values()))))
            snapshots.append(time.perf_counter() - since)
    finally:
        store.close()
        shutil.rmtree(folder)
    size = leaves * rows * width * 4 / 1e6
    sync, call, delay, alone, snapshot = map(
        statistics.median, (synchronous, calls, delays, plain, snapshots)
    )
    each = " ".join(f"{d / s:.2f}" for d, s in zip(delays, synchronous, strict=True))
    head = ("state, MB", "step, s", "synchronous, s", "call, s", "snapshot, s", "delay, s")
    head += ("call", "delay", "delay - snapshot")
    row = (f"{size:.0f}", *(f"{x:.3f}" for x in (alone, sync, call, snapshot, delay)))
    row += (
        f"{call / sync:.1%}",
        f"{delay / sync:.1%} ({each})",
        f"{(delay - snapshot) / sync:.1%}",
    )
    print("|", " | ".join(head), "|\n" + "|---" * len(head) + "|")
    print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
