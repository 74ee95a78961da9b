"""Compiled programs are read right: kind, payload, group, axes, executions, whatever form the compiler wrote.

The snippets keep the syntax of the CPU, GPU and TPU compilers and leave out all that does not matter here.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.plan import hlo

MAIN = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"


def program(*lines: str, before: str = "") -> str:
    """An entry computation of these instructions, after other computations."""
    head, entry = MAIN.split("\n\n")
    body = "".join(f"  {line}\n" for line in lines)
    return f"{head}\n\n{before}\n{entry}{body}}}\n"


@functools.cache
def mesh(**sizes: int) -> jax.sharding.Mesh:
    """A mesh over the first devices, in their order."""
    count = math.prod(sizes.values())
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def one(*lines: str, before: str = "", on: jax.sharding.Mesh | None = None) -> hlo.Collective:
    (found,) = hlo.collectives(program(*lines, before=before), on)
    return found


# ---- groups ------------------------------------------------------------------------------------

REDUCE = "%r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=%s, to_apply=%add"
CUBE = {"replica": 2, "data": 2, "model": 2}


@pytest.mark.core
@pytest.mark.parametrize(
    ("groups", "count", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2, ("model",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", 2, ("data",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2, ("replica",)),
        ("{{0,1,2,3},{4,5,6,7}}", 4, ("data", "model")),
        ("{{0,1,4,5},{2,3,6,7}}", 4, ("replica", "model")),
        ("{{0,1,2,3,4,5,6,7}}", 8, ("replica", "data", "model")),
        # Groups may come in any order, and so may their members.
        ("{{7,6},{3,2},{0,1},{5,4}}", 2, ("model",)),
        ("{}", 8, ("replica", "data", "model")),
        ("[4,2]<=[8]", 2, ("model",)),
        ("[1,8]<=[8]", 8, ("replica", "data", "model")),
        ("[2,4]<=[8]", 4, ("data", "model")),
        ("[4,2]<=[2,4]T(1,0)", 2, ("replica",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", 2, ("data",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", 4, ("replica", "model")),
        ("mesh['replica'=2,'data'=2,'model'=2] {'data'}", 2, ("data",)),
        ("mesh['replica'=2,'data'=2,'model'=2] {'replica','model'}", 4, ("replica", "model")),
        # No set of axes: two devices that differ along all three.
        ("{{0,7},{1,6},{2,5},{3,4}}", 2, ()),
    ],
)
def test_every_form_of_groups(groups, count, axes):
    found = one(REDUCE.replace("%s", groups), on=mesh(**CUBE))
    assert (found.group, found.axes) == (count, axes)
    assert (found.payload, found.wire) == (32, 2 * 32 * (count - 1) / count)


@pytest.mark.core
def test_empty_groups_are_every_device_of_the_program():
    """Without a mesh its first line says how many."""
    assert one(REDUCE.replace("%s", "{}")).group == 8


def test_part_of_a_named_axis():
    """Four along an axis of eight, after a factor of two (the sub-axes of Shardy)."""
    found = one(REDUCE.replace("%s", "mesh['data'=8] {'data':(2)4}"))
    assert (found.group, found.axes) == (4, ("data",))


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("model",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
    ],
)
def test_pairs_of_a_permute(pairs, axes):
    line = f"%r = f32[8]{{0}} collective-permute(%p), source_target_pairs={pairs}"
    found = one(line, on=mesh(data=2, model=4))
    assert (found.kind, found.axes, found.wire) == ("collective-permute", axes, 32)


# ---- payloads ----------------------------------------------------------------------------------

G = "replica_groups=[1,8]<=[8]"


@pytest.mark.core
@pytest.mark.parametrize(
    ("line", "kind", "payload", "dtypes"),
    [
        (f"%r = f32[64]{{0}} all-gather(%p), {G}, dimensions={{0}}", "all-gather", 256, "f32"),
        (f"%r = f32[8]{{0}} reduce-scatter(%p), {G}, to_apply=%add", "reduce-scatter", 256, "f32"),
        (f"%r = bf16[64,2]{{1,0}} all-reduce(%p), {G}, to_apply=%add", "all-reduce", 256, "bf16"),
        (f"%r = f32[] all-reduce(%p), {G}, to_apply=%add", "all-reduce", 4, "f32"),
        (f"%r = f8e4m3fn[64]{{0}} all-gather(%p), {G}", "all-gather", 64, "f8e4m3fn"),
        (f"%r = s4[64]{{0}} all-gather(%p), {G}", "all-gather", 32, "s4"),
        (f"%r = c128[4]{{0}} all-gather(%p), {G}", "all-gather", 64, "c128"),
        (f"%r = pred[64]{{0}} all-gather(%p), {G}", "all-gather", 64, "pred"),
        # Tiles of a TPU are no shapes.
        (
            f"%r = bf16[2,64]{{1,0:T(8,128)(2,1)S(1)}} all-reduce(%p), {G}, to_apply=%add",
            "all-reduce",
            256,
            "bf16",
        ),
    ],
)
def test_payload_is_the_whole_array(line, kind, payload, dtypes):
    found = one(line)
    assert (found.kind, found.payload, found.dtypes) == (kind, payload, (dtypes,))
    assert found.wire == payload * 7 / 8 * (2 if kind == "all-reduce" else 1)
    assert not found.asynchronous


def test_a_combined_collective_sends_the_sum_of_its_parts():
    shape = (
        "(f32[8]{0:T(128)}, bf16[4]{0}, f32[]{:T(128)}, f32[2]{0}, f32[2]{0}, /*index=5*/f32[1]{0})"
    )
    found = one(f"%r = {shape} all-reduce(%a, %b, %c, %d, %e, /*index=5*/%f), {G}, to_apply=%add")
    assert found.payload == 32 + 8 + 4 + 8 + 8 + 4
    assert found.dtypes == ("bf16", "f32")


# ---- started and awaited apart -----------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("shape", "op", "payload"),
    [
        ("(f32[8]{0}, f32[64]{0})", "all-gather", 256),
        ("((f32[8]{0}, bf16[8]{0}), (f32[64]{0}, bf16[64]{0}))", "all-gather", 256 + 128),
        # Scratch of the TPU compiler comes after the result.
        ("(f32[8]{0}, f32[64]{0}, u32[]{:S(2)}, u32[]{:S(2)})", "all-gather", 256),
        ("(bf16[8]{0}, bf16[8]{0}, u32[]{:S(2)}, u32[]{:S(2)})", "collective-permute", 16),
        ("f32[8]{0}", "all-reduce", 32),
        ("(f32[8]{0}, f32[4]{0})", "all-reduce", 48),
        ("((f32[64]{0}), f32[8]{0}, s32[])", "reduce-scatter", 256),
        ("((f32[64]{0}), f32[64]{0})", "all-to-all", 256),
    ],
)
def test_a_start_counts_once_by_its_result(shape, op, payload):
    found = one(
        f"%s = {shape} {op}-start(%p), {G}, to_apply=%add",
        f"%d = f32[64]{{0}} {op}-done(%s)",
    )
    assert (found.kind, found.payload, found.asynchronous) == (op, payload, True)


WRAPPED = f"""%wrapped (q: f32[64]) -> f32[8] {{
  %q = f32[64]{{0}} parameter(0)
  ROOT %rs = f32[8]{{0}} reduce-scatter(%q), {G}, dimensions={{0}}, to_apply=%add
}}
"""


@pytest.mark.core
def test_a_collective_wrapped_in_an_asynchronous_call_counts_once():
    found = one(
        "%s = ((f32[64]{0}), f32[8]{0}, s32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[64]{0}), f32[8]{0}, s32[]) async-update(%s), calls=%wrapped",
        "%d = f32[8]{0} async-done(%u), calls=%wrapped",
        before=WRAPPED,
    )
    assert (found.kind, found.payload, found.asynchronous) == ("reduce-scatter", 256, True)


def test_fusions_that_start_and_await_count_once():
    """Both name the same collective in the programs of the TPU compiler."""
    fused = "".join(
        f"%{name} (q: f32[8]) -> f32[64] {{\n"
        f"  %q = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %ag.{name} = f32[64]{{0}} all-gather(%q), {G}, dimensions={{0}}\n}}\n\n"
        for name in ("async_collective_start", "async_collective_done")
    )
    found = one(
        "%async-collective-start = f32[64]{0} fusion(%p), calls=%async_collective_start",
        "%async-collective-done = f32[64]{0} fusion(%p), calls=%async_collective_done",
        before=fused,
    )
    assert (found.payload, found.asynchronous) == (256, True)


# ---- TPU ---------------------------------------------------------------------------------------

FUSED = f"""%all-reduce-scatter.1.clone (q: bf16[64,128]) -> bf16[8,128] {{
  %q = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %all-reduce.2 = bf16[64,128]{{1,0:T(8,128)(2,1)}} all-reduce(%q), {G}, to_apply=%add
  ROOT %slice = bf16[8,128]{{1,0:T(8,128)(2,1)}} dynamic-slice(%all-reduce.2, %i, %z)
}}
"""


@pytest.mark.core
def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter():
    found = one(
        "%all-reduce-scatter.1 = bf16[8,128]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1.clone",
        before=FUSED,
    )
    assert (found.kind, found.payload) == ("reduce-scatter", 64 * 128 * 2)
    assert found.wire == 64 * 128 * 2 * 7 / 8


def test_an_all_reduce_and_a_slice_that_are_not_fused_stay_an_all_reduce():
    found = one(
        f"%r = bf16[64,128]{{1,0}} all-reduce(%p), {G}, to_apply=%add",
        "%s = bf16[8,128]{1,0} dynamic-slice(%r, %i, %z)",
    )
    assert (found.kind, found.wire) == ("all-reduce", 2 * 64 * 128 * 2 * 7 / 8)


# ---- loops -------------------------------------------------------------------------------------

LOOP = f"""%inner (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%x), {G}, to_apply=%add
}}

%count (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[], f32[8]) parameter(0)
  %call = f32[8]{{0}} call(%x), to_apply=%inner
  ROOT %t = (s32[], f32[8]) tuple(%i, %call)
}}

%outer (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[], f32[8]) parameter(0)
  ROOT %low = (s32[], f32[8]) while(%b), condition=%count, body=%body
}}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'


@pytest.mark.core
@pytest.mark.parametrize(
    ("line", "times", "loops"),
    [
        ("%high = (s32[], f32[8]) while(%p), condition=%count, body=%body", 3, ("high",)),
        (f"%high = (s32[], f32[8]) while(%p), condition=%count, body=%body, {KNOWN}", 5, ("high",)),
        (
            f"%high = (s32[], f32[8]) while(%p), condition=%c, body=%outer, {KNOWN}",
            15,
            ("high", "low"),
        ),
    ],
)
def test_executions_are_counted_through_loops_and_calls(line, times, loops):
    found = one(line, before=LOOP)
    assert (found.times, found.loops) == (times, loops)
    assert found.wire == times * 2 * 32 * 7 / 8


def test_a_comparison_in_a_fusion():
    """Its bound is a constant beside the fusion, as the TPU compiler writes it."""
    cond = """%less (a: s32[], b: s32[]) -> pred[] {
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%count2 (c: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(7)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %f = pred[]{:T(512)} fusion(%i, %n), kind=kLoop, calls=%less
}
"""
    line = "%high = (s32[], f32[8]) while(%p), condition=%count2, body=%body"
    assert one(line, before=LOOP + cond).times == 7


@pytest.mark.core
def test_a_loop_without_a_bound_is_an_error():
    """A wrong count would pass for a proof."""
    loop = LOOP.replace("constant(3)", "parameter(1)")
    line = "%high = (s32[], f32[8]) while(%p), condition=%count, body=%body"
    with pytest.raises(ValueError, match="no trip count for the loop high of main"):
        one(line, before=loop)


def test_branches_of_a_conditional_are_read():
    line = "%r = f32[8]{0} conditional(%i, %p, %p), branch_computations={%inner, %other}"
    assert one(line, before=LOOP).kind == "all-reduce"


# ---- FLOPs -------------------------------------------------------------------------------------


@pytest.mark.core
def test_flops_of_products_in_loops_and_fusions():
    dot = "%d = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    inside = f"""%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %a = f32[4,32]{{1,0}} parameter(0)
  {dot}
}}

%fused (a: f32[4,32]) -> f32[4,16] {{
  %a = f32[4,32]{{1,0}} parameter(0)
  ROOT {dot.replace("%d", "%e", 1)}
}}
"""
    text = program(
        f"%high = (s32[], f32[8]) while(%p), condition=%count, body=%body, {KNOWN}",
        "%f = f32[4,16]{1,0} fusion(%p), kind=kOutput, calls=%fused",
        before=inside,
    )
    assert hlo.matmul_flops(text) == (5 + 1) * 2 * 4 * 16 * 32


def test_flops_with_the_shapes_of_operands_written_out():
    """Older printers repeat the shape before each operand; batch dimensions count once."""
    line = (
        "%d = f32[3,4,16]{2,1,0} dot(f32[3,4,32]{2,1,0} %a, f32[3,32,16]{2,1,0} %b), "
        "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    assert hlo.matmul_flops(program(line)) == 2 * 3 * 4 * 16 * 32


# ---- real programs -----------------------------------------------------------------------------


@pytest.mark.core
def test_a_program_of_this_compiler():
    """A loop of products over two axes, whose every number is known beforehand."""
    on = mesh(data=4, model=2)

    def shard(x, w):
        def body(y, _):
            return jax.lax.psum(y @ w, "model"), None

        y, _ = jax.lax.scan(body, x, None, length=3)
        return jax.lax.psum_scatter(y, "data", scatter_dimension=0, tiled=True)

    specs = (PartitionSpec("data"), PartitionSpec())
    f = jax.shard_map(
        shard, mesh=on, in_specs=specs, out_specs=PartitionSpec("data"), check_vma=False
    )
    args = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(on, p))
        for s, p in zip(((64, 32), (32, 32)), specs, strict=True)
    ]
    text = jax.jit(f).lower(*args).compile().as_text()
    reduce, scatter = hlo.collectives(text, on)
    assert (reduce.kind, reduce.axes, reduce.times) == ("all-reduce", ("model",), 3)
    assert (reduce.payload, len(reduce.loops)) == (16 * 32 * 4, 1)
    assert (scatter.kind, scatter.axes, scatter.times) == ("reduce-scatter", ("data",), 1)
    assert (scatter.payload, scatter.loops) == (16 * 32 * 4, ())
    assert hlo.matmul_flops(text) == 3 * 2 * 16 * 32 * 32
