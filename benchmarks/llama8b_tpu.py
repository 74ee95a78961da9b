"""Llama 3.1 8B on 64 TPU v5p chips that are not here: what the real TPU compiler makes of the train step.

    python benchmarks/llama8b_tpu.py [--only NAME]

Sequence 4096, batch 64, full remat, bfloat16 compute on float32 weights, gradients sent in bfloat16. Prints a
Markdown table: memory, and the bytes that each device sends by kind. Needs libtpu (the `tpu` extra); a row takes a
minute or two on two cores.
"""

from __future__ import annotations

import argparse
import collections
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from jaxpar import config as configs
from jaxpar.plan import hlo
from jaxpar.train.job import build

GIB = 2**30
RUNS = {
    "64": ("data=64", 3),
    "16x4": ("data=16,model=4", 3),
    "64-zero1": ("data=64", 1),
    "2-slices": ("replica=2,data=64", 3),
}


def row(mesh: str, zero: int) -> str:
    """Compile the step on `mesh` and describe it in one row."""
    slices = "2*v5p:4x4x4" if "replica=2" in mesh else "v5p:4x4x4"
    rows = 128 if "replica=2" in mesh else 64
    flags = ["--config", "configs/llama3-8b.yaml", "--mesh", mesh, "--topology", slices]
    flags += ["--zero", str(zero), "--batch", str(rows)]
    par = build(configs.load(flags))
    shape = jax.ShapeDtypeStruct((rows, 4096), jnp.int32)
    begin = time.perf_counter()
    compiled = par.lower({"tokens": shape, "targets": shape}).compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    sent: collections.Counter[str] = collections.Counter()
    for c in hlo.collectives(compiled.as_text(), par.mesh.jax_mesh):
        sent[c.kind] += c.wire
    kinds = ", ".join(f"{kind} {n / GIB:.2f}" for kind, n in sent.most_common())
    return (
        f"| {mesh} | {zero} | {memory.argument_size_in_bytes / GIB:.2f} | {memory.temp_size_in_bytes / GIB:.2f} "
        f"| {memory.peak_memory_in_bytes / GIB:.2f} | {sum(sent.values()) / GIB:.2f} | {kinds} | {seconds:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RUNS)
    only = parser.parse_args().only
    print(f"JAX {jax.__version__}, v5p:4x4x4, GiB a device\n")
    print("| mesh | ZeRO | arguments | temporaries | peak | wire | wire by kind | compile s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (mesh, zero) in RUNS.items():
        if only in (None, name):
            print(row(mesh, zero), flush=True)


if __name__ == "__main__":
    main()
