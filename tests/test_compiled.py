"""What the compiled train step sends, keeps and computes, read from the program itself.

Every number has a closed form: bytes of the leaves of the `Layout`, B·S·E of an activation, FLOPs of
the products of a block. Simulated devices; `test_tpu_compiler.py` asks the TPU compiler the same.
"""

import functools
import itertools
import math
import re
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.config import ModelConfig
from jaxpar.models import decoder
from jaxpar.plan import hlo

# Bytes of no activation (B·S·E·4) are the bytes of a leaf: a gathered parameter would show.
BATCH, SEQ = 32, 56
MODEL = {
    "layers": 2,
    "embed": 64,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 16,
    "mlp": 192,
    "vocab": 320,
}
SCALARS = 64
"""Bytes of all sums that a step reduces beside gradients: loss, weight, squares of the norm."""
HYBRID = "replica=2,data=2,model=2"


class Program(NamedTuple):
    """A compiled step, what it was made of and what JAX said about it."""

    par: Any
    compiled: Any
    text: str
    collectives: list[hlo.Collective]
    warned: list[str]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.par.mesh.sizes)

    def over(self, axis: str, *kinds: str) -> list[hlo.Collective]:
        """Collectives of these kinds (all, if none is named) whose groups extend along `axis`."""
        return [c for c in self.collectives if axis in c.axes and (not kinds or c.kind in kinds)]


def parallel(mesh: str, model: Iterable[tuple[str, Any]] = (), **options: Any) -> jaxpar.Parallel:
    config = ModelConfig(**(MODEL | dict(model)))
    staged, init, rules = decoder.make(config)
    devices = jax.devices()[: 1 if mesh == "1" else 8]
    return jaxpar.parallelize(
        staged,
        init,
        optax.adamw(1e-3),
        mesh=jaxpar.make_mesh(mesh, devices=devices),
        rules=rules,
        clip_norm=1.0,
        **options,
    )


def tokens(batch: int = BATCH, seq: int = SEQ) -> dict[str, jax.ShapeDtypeStruct]:
    return {k: jax.ShapeDtypeStruct((batch, seq), jnp.int32) for k in ("tokens", "targets")}


@functools.cache
def program(
    mesh: str,
    *,
    model: tuple[tuple[str, Any], ...] = (),
    batch: int = BATCH,
    seq: int = SEQ,
    **options: Any,
) -> Program:
    """The step for these options, compiled once for all tests."""
    par = parallel(mesh, model, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = par.lower(tokens(batch, seq)).compile()
    text = compiled.as_text()
    warned = [str(w.message) for w in caught]
    return Program(par, compiled, text, hlo.collectives(text, par.mesh.jax_mesh), warned)


def sent(collectives: Iterable[hlo.Collective]) -> int:
    """Bytes of all arrays that were moved, loops counted."""
    return sum(c.payload * c.times for c in collectives)


def whole(par: jaxpar.Parallel, *, but: tuple[str, ...] = ()) -> int:
    """Bytes of all parameters along every axis but `model`, outside paths that start with `but`."""
    model = par.mesh.size("model")
    total = 0
    for row in par.layout.rows:
        if row.kind == "parameter" and not row.path.startswith(but or "\0"):
            split = model if any("model" in names for names in row.spec) else 1
            total += math.prod(row.stored) * jnp.dtype(row.dtype).itemsize // split
    return total


# ---- gradients over data -----------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["4x2", HYBRID])
@pytest.mark.parametrize("zero", [0, 1])
def test_gradient_bytes_do_not_depend_on_accumulation(zero, mesh):
    """One reduction a step for ZeRO 0 and 1, after the last microbatch."""
    both = [program(mesh, zero=zero, microbatches=m) for m in (1, 4)]
    for axis in ("data", "replica"):
        one, four = ([c for c in p.over(axis) if c.kind != "all-gather"] for p in both)
        assert sorted((c.kind, c.axes, c.payload) for c in one) == sorted(
            (c.kind, c.axes, c.payload) for c in four
        )
        assert [c for c in (*one, *four) if c.loops or c.times != 1] == []


def test_zero_0_reduces_every_gradient_once():
    p = program("4x2", zero=0, microbatches=1)
    assert {c.kind for c in p.over("data")} == {"all-reduce"}
    assert 0 <= sent(p.over("data")) - whole(p.par) <= SCALARS


@pytest.mark.core
@pytest.mark.parametrize("small", [0, 1 << 30])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_are_reduce_scattered(zero, small):
    """Every byte of every gradient once, at its use (`small=0`) or after the backward pass."""
    p = program("4x2", zero=zero, microbatches=1, **({} if zero == 1 else {"small": small}))
    assert sent(p.over("data", "reduce-scatter")) == whole(p.par)
    assert sent(p.over("data", "all-reduce")) <= SCALARS


def test_zero_2_scatters_every_microbatch():
    """The buffer is a shard, so each microbatch sends its gradient: the price of stage 2 and 3."""
    p = program("4x2", zero=2, microbatches=4, small=0)
    assert sent(p.over("data", "reduce-scatter")) == 4 * whole(p.par)
    assert sent(p.over("data", "all-reduce")) <= SCALARS


@pytest.mark.parametrize(("axis", "mesh"), [("data", "4x2"), ("replica", HYBRID)])
def test_scatters_of_a_layer_lie_in_the_loop_over_layers(axis, mesh):
    """Stage 2 and 3 with `small=0`: one layer's gradient at a time; over replica once a step."""
    p = program(mesh, zero=3, microbatches=1, small=0)
    blocks = sent(c for c in p.over("data", "reduce-scatter") if c.loops)
    rest = ("embed", "head", "final_norm")
    assert blocks == whole(p.par, but=rest)
    assert axis == "data" or not any(c.loops for c in p.over("replica"))


@pytest.mark.core
@pytest.mark.parametrize("zero", [1, 2])
def test_one_gather_of_every_parameter_after_the_update(zero):
    p = program("4x2", zero=zero, microbatches=1, **({} if zero == 1 else {"small": 0}))
    gathers = p.over("data", "all-gather")
    assert sent(gathers) == whole(p.par)
    assert all(c.times == 1 and not c.loops for c in gathers)
    assert len(gathers) <= len(jax.tree.leaves(p.par.layout.params))
    # Text is in the order of dependencies: clipping needs every gradient, the update needs the norm.
    last = max(p.collectives.index(c) for c in p.over("data") if c.kind != "all-gather")
    assert min(map(p.collectives.index, gathers)) > last


@pytest.mark.parametrize("remat", ["none", "dots", "block_inputs", "full"])
def test_zero_3_gathers_a_layer_for_each_pass_and_keeps_none(remat):
    """Two gathers of every block: kept for the backward pass they would be whole parameters."""
    p = program("4x2", zero=3, microbatches=1, small=0, remat=remat)
    gathers = p.over("data", "all-gather")
    rest = whole(p.par, but=("blocks",))
    blocks = whole(p.par) - rest
    assert sent(c for c in gathers if not c.loops) == rest
    assert sent(c for c in gathers if c.loops) == 2 * blocks


def test_zero_3_gathers_small_leaves_once_a_step():
    """However many microbatches there are."""
    for microbatches in (1, 4):
        p = program("4x2", zero=3, microbatches=microbatches, small=1 << 30)
        gathers = p.over("data", "all-gather")
        assert sent(gathers) == whole(p.par)
        assert not any(c.loops for c in gathers)


@pytest.mark.parametrize("zero", [1, 3])
def test_replicas_reduce_shards(zero):
    """Hybrid sharding: over replica go the bytes of a shard, by all-reduce, once a step."""
    p = program(HYBRID, zero=zero, microbatches=1, **({} if zero == 1 else {"small": 0}))
    over = p.over("replica")
    assert {c.kind for c in over} == {"all-reduce"}
    assert 0 <= sent(over) - whole(p.par) / p.sizes["data"] <= SCALARS
    assert not any(c.loops for c in over)
    assert sent(c for c in over if "data" in c.axes) <= SCALARS
    assert sent(p.over("data", "reduce-scatter")) == whole(p.par)


# ---- activations over model --------------------------------------------------------------------

TENSOR = [
    *(("4x2", 4, {"zero": zero, "microbatches": 1}) for zero in (0, 1)),
    *(("4x2", 4, {"zero": zero, "microbatches": m, "small": 0}) for zero, m in ((2, 4), (3, 1))),
    (HYBRID, 4, {"zero": 3, "microbatches": 1, "small": 0}),
    # Fewer kv heads than the axis is long.
    ("2x4", 2, {"zero": 3, "microbatches": 1, "small": 0}),
]


@pytest.mark.core
@pytest.mark.parametrize(("mesh", "kv_heads", "options"), TENSOR)
def test_only_activations_are_gathered_over_model(mesh, kv_heads, options):
    """B·S·E of a shard's microbatch each time; a leaf that `model` splits stays split."""
    model = (("kv_heads", kv_heads),) if kv_heads != MODEL["kv_heads"] else ()
    p = program(mesh, model=model, **options)
    rows = BATCH // p.par.mesh.size("data", "replica") // options["microbatches"]
    activation = rows * SEQ * MODEL["embed"] * 4
    gathers = p.over("model", "all-gather")
    assert gathers
    assert {(c.axes, c.payload) for c in gathers} == {(("model",), activation)}
    assert {c.kind for c in p.collectives} <= {"all-gather", "all-reduce", "reduce-scatter"}
    # The proof holds only if no parameter has that size, whole or in part.
    layers, sizes = MODEL["layers"], range(1, 9)
    leaves = [r.bytes_per_device({}) for r in p.par.layout.rows if r.kind == "parameter"]
    assert activation not in {n / k for n in leaves for k in (*sizes, *(layers * s for s in sizes))}


def test_activations_between_blocks_are_split_along_the_sequence():
    """A pass of a block: two gathers in, two scatters out, and no all-reduce of an activation."""
    p = program("4x2", zero=0, microbatches=1)
    inside = [c for c in p.over("model") if c.loops]
    assert {c.kind for c in inside} == {"all-gather", "reduce-scatter"}
    counts = {
        k: sum(c.times for c in inside if c.kind == k) for k in ("all-gather", "reduce-scatter")
    }
    assert counts["reduce-scatter"] == MODEL["layers"] * 2 * 2
    # The backward pass gathers the cotangent of each scatter and, again, no input of a product.
    assert counts["all-gather"] == MODEL["layers"] * 2 * 2
    # Logarithm and target logit of each token, their maximum, and gradients of what model copies.
    largest = max(c.payload for c in p.over("model", "all-reduce"))
    tokens_bytes = BATCH // 4 * SEQ * 4
    norms = (2 * MODEL["layers"] + 1) * MODEL["embed"] * 4
    assert largest <= max(2 * tokens_bytes, norms)


# ---- dtype on the wire -------------------------------------------------------------------------

# The CPU compiler widens bfloat16 sums: what was asked for stands in the program before it.
# JAX 0.10 lists the devices of every group, 0.12 names the axes of the mesh.
_REDUCTION = re.compile(
    r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?replica_groups = '
    r"(?:dense<(?P<groups>.*?)>|#stablehlo\.replica_group_mesh_axes<(?P<axes>.*?\])>)"
    r".*?\}\) : \(tensor<(?P<dims>(?:\d+x)*)(?P<dtype>\w+)>",
    re.S,
)


def reductions(text: str, mesh: jaxpar.Mesh) -> list[tuple[set[str], tuple[int, ...], str]]:
    """(axes, shape, dtype) of every sum over devices in StableHLO text."""
    shape, names = mesh.jax_mesh.devices.shape, mesh.jax_mesh.axis_names
    out = []
    for found in _REDUCTION.finditer(text):
        if found["axes"]:
            axes = set(re.findall(r'name = "(\w+)"', found["axes"]))
        else:
            group = [int(d) for d in re.findall(r"\d+", found["groups"].split("]")[0])]
            places = np.array(np.unravel_index(group, shape))
            axes = {n for n, along in zip(names, places, strict=True) if len(set(along)) > 1}
        out.append((axes, tuple(int(d) for d in found["dims"].split("x") if d), found["dtype"]))
    return out


@pytest.mark.core
@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "expected"),
    [
        ("bf16", "float32", "f32"),
        ("bf16", None, "bf16"),
        ("float32", "bfloat16", "bf16"),
        ("bf16_params", "float32", "f32"),
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_sent_in_the_reduce_dtype_on_every_axis(
    zero, precision, reduce_dtype, expected
):
    par = parallel(HYBRID, zero=zero, precision=precision, reduce_dtype=reduce_dtype, small=0)
    found = reductions(par.lower(tokens()).as_text(), par.mesh)
    # Activations are summed over model alone; every other array is a gradient.
    gradients = [(a, s, d) for a, s, d in found if s and a != {"model"}]
    assert set().union(*(a for a, _, _ in gradients)) == {"replica", "data", "model"}
    assert {d for _, _, d in gradients} == {expected}
    assert {d for _, s, d in found if not s} == {"f32"}, "sums of losses stay wide"


def test_gradients_over_model_are_sent_in_the_reduce_dtype():
    """Norms, which model copies: shards of (layers, embed) and of (embed,)."""
    par = parallel("4x2", zero=1, precision="bf16", reduce_dtype="float32")
    part = MODEL["embed"] // 4
    found = reductions(par.lower(tokens()).as_text(), par.mesh)
    norms = [d for a, s, d in found if a == {"model"} and s in ((MODEL["layers"], part), (part,))]
    assert norms == ["f32"] * 3


# ---- one compilation, donation -----------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("zero", [1, 3])
def test_one_compilation_for_three_steps_and_a_load(zero, caplog):
    """Z3: the second state comes from a step, the first from init or load: one type for all."""
    par = parallel("4x2", zero=zero, microbatches=2)
    random = np.random.default_rng(0)
    batch = {k: random.integers(0, MODEL["vocab"], (BATCH, SEQ)).astype(np.int32) for k in tokens()}
    state = par.init(0)
    with jax.log_compiles(True), caplog.at_level("WARNING"):
        for _ in range(3):
            before = state
            state, _ = par.step(state, par.put(batch))
            assert all(x.is_deleted() for x in jax.tree.leaves(before)), "Z10: donated"
        loaded = par.load(jax.tree.map(np.asarray, par.unpad(state).params))
        for _ in range(2):
            loaded, _ = par.step(loaded, batch)
    assert par.cache_size() == 1
    steps = [r for r in caplog.messages if r.startswith("Finished XLA compilation of jit(step)")]
    assert len(steps) == 1


@pytest.mark.parametrize("precision", ["float32", "bf16_params"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_byte_of_the_state_is_donated(zero, precision):
    """Z10: the new state takes the place of the old."""
    options = {} if precision == "float32" else {"precision": precision}
    options |= {"small": 0} if zero > 1 else {}
    p = program("4x2", zero=zero, microbatches=1, **options)
    kinds = ("parameter", "master", "moment", "other")
    counters = 4 + 4 + 8  # step, skipped, key
    state = sum(p.par.layout.bytes_per_device(kind) for kind in kinds) + counters
    assert p.compiled.memory_analysis().alias_size_in_bytes == state
    assert [w for w in p.warned if "donated" in w] == []


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("mesh", ["8x1", "4x2"])
def test_initialisation_makes_no_whole_parameter(mesh):
    """Z9: an embedding of 16 MiB and a head of as much, on eight devices."""
    par = parallel(mesh, (("vocab", 1 << 16),), zero=3)
    memory = par.lower_init().compile().memory_analysis()
    layout = par.layout
    state = layout.bytes_per_device() - layout.bytes_per_device("gradient")
    assert memory.output_size_in_bytes <= 1.001 * state
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes <= 2 * state
    assert memory.temp_size_in_bytes < 4 * (1 << 16) * MODEL["embed"], "less than one whole table"


POLICIES = ("none", "dots", "block_inputs", "full")


def test_remat_policies_keep_less_and_less():
    """8 layers, 256 tokens a row: activations dwarf the state."""
    temp = {}
    for remat in POLICIES:
        p = program("8x1", model=(("layers", 8),), batch=8, seq=256, zero=0, remat=remat)
        temp[remat] = p.compiled.memory_analysis().temp_size_in_bytes
    assert temp["none"] > temp["dots"] > temp["block_inputs"] >= temp["full"]
    activation = 256 * MODEL["embed"] * 4
    # One more input a layer, and far less than what no remat keeps.
    assert temp["block_inputs"] - temp["full"] <= 1.5 * 8 * activation
    assert temp["none"] > 2 * temp["full"]


# ---- FLOPs -------------------------------------------------------------------------------------


def block_flops(rows: int, seq: int) -> tuple[int, int]:
    """(all products of one block's forward pass, the last of them) on one device."""
    e, h, k, d, f = (MODEL[n] for n in ("embed", "heads", "kv_heads", "head_dim", "mlp"))
    t = rows * seq
    weights = 2 * t * (2 * e * h * d + 2 * e * k * d + 3 * e * f)
    attention = 2 * 2 * rows * h * seq * seq * d
    return weights + attention, 2 * t * e * f


@pytest.mark.core
def test_full_remat_costs_one_more_forward_pass_but_for_its_last_product():
    """No gradient reads the output of a block's last product (down), so it is not made again.

    forward 1, backward 2 of each product: 3 without remat, 4 - down/forward with it.
    """
    rows = BATCH // 8
    forward, down = block_flops(rows, SEQ)
    head = 3 * 2 * rows * SEQ * MODEL["embed"] * MODEL["vocab"]
    layers = MODEL["layers"]
    none, full = (
        hlo.matmul_flops(program("8x1", zero=0, microbatches=1, remat=r).text)
        for r in ("none", "full")
    )
    assert none == layers * 3 * forward + head
    assert full == layers * (4 * forward - down) + head
    ratio = (full - head) / (none - head)
    assert ratio == pytest.approx((4 - down / forward) / 3, rel=0.02)
    assert ratio == pytest.approx(4 / 3, rel=0.1)


@pytest.mark.parametrize("options", [{"zero": 3, "small": 0}, {"zero": 1, "microbatches": 4}])
def test_flops_depend_on_neither_stage_nor_accumulation(options):
    plain = program("8x1", zero=0, microbatches=1, remat="none")
    assert hlo.matmul_flops(program("8x1", remat="none", **options).text) == hlo.matmul_flops(
        plain.text
    )


def test_flops_are_split_over_model():
    plain = program("8x1", zero=0, microbatches=1, remat="none")
    split = program("4x2", zero=0, microbatches=1)
    assert hlo.matmul_flops(split.text) == hlo.matmul_flops(plain.text)


# ---- bytes of the recipe -----------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("zero", [0, 3])
def test_bytes_a_parameter_of_the_mixed_precision_recipe(zero):
    """2 + 2 + 4 + 4 + 4 (arXiv:1910.02054, section 3.1), in the layout and in the real arrays."""
    par = parallel("8x1", zero=zero, precision="bf16_params", microbatches=1)
    count = par.layout.parameters()
    share = {"parameter": 8 if zero == 3 else 1, "gradient": 8 if zero >= 2 else 1}
    for kind, each in {"parameter": 2, "gradient": 2, "master": 4, "moment": 8}.items():
        split = share.get(kind, 8 if zero else 1)
        assert par.layout.bytes_per_device(kind) * split == each * count, kind
    state = par.init(0)
    adam = next(s for s in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(s))
    trees = {
        "bfloat16": (state.params,),
        "float32": (state.masters, adam.mu, adam.nu),
    }
    for dtype, held in trees.items():
        for x in itertools.chain.from_iterable(map(jax.tree.leaves, held)):
            assert x.dtype == dtype
    device = jax.devices()[0]
    real = sum(
        s.data.nbytes
        for x in jax.tree.leaves((state.params, state.masters, adam.mu, adam.nu))
        for s in x.addressable_shards
        if s.device == device
    )
    kinds = ("parameter", "master", "moment")
    assert real == sum(par.layout.bytes_per_device(k) for k in kinds)


def test_accumulated_gradients_are_float32():
    par = parallel("8x1", zero=2, precision="bf16_params", microbatches=4)
    assert par.layout.bytes_per_device("gradient") * 8 == 4 * par.layout.parameters()


def _is_adam(x: Any) -> bool:
    return hasattr(x, "mu") and hasattr(x, "nu")
