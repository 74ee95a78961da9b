"""What cannot be meant is refused where it comes in, with what was meant to come; nothing is refused that works."""

import functools
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.arguments import CONTRACT, contract, initialiser, key_of
from jaxpar.axes import MeshError
from jaxpar.config import ModelConfig
from jaxpar.models import decoder
from jaxpar.rules import LayoutError

AXES = {"out": "model", "in": None}
RULES = jaxpar.Rules([("w", ("in", "out"))], axes=AXES)
MESH = functools.cache(lambda: jaxpar.make_mesh("4x2"))
BATCH = {"x": np.ones((8, 4), np.float32)}


def init(rng):
    return {"w": jax.random.normal(rng, (4, 2))}


def loss(params, batch, rng):
    return jnp.sum(batch["x"] @ params["w"]), batch["x"].shape[0], {}


def parallel(function: Any = loss, first: Any = init, optimizer: Any = None, **options: Any) -> Any:
    given = {"mesh": MESH(), "rules": RULES, **options}
    return jaxpar.parallelize(function, first, optimizer or optax.sgd(0.1), **given)


OPTIONS = [
    ({"mesh": "4x2"}, TypeError, "mesh is a str '4x2'; make one with jaxpar.make_mesh('4x2')"),
    ({"rules": [("w", ("in", "out"))]}, TypeError, "rules is a list; make them with jaxpar.Rules("),
    ({"zero": True}, ValueError, "zero True; the stages are 0, 1, 2 and 3"),
    ({"zero": 1.0}, ValueError, "zero 1.0; the stages"),
    ({"microbatches": 2.0}, ValueError, "microbatches 2.0; a whole number"),
    ({"microbatches": 2.5}, ValueError, "microbatches 2.5; a whole number"),
    ({"microbatches": "2"}, ValueError, "microbatches '2'; a whole number"),
    ({"small": -1}, ValueError, "small -1; a whole number of bytes"),
    ({"remat": None}, ValueError, "remat None; a name: 'none'"),
    ({"precision": None}, ValueError, "precision None; a name such as"),
    ({"reduce_dtype": jnp.bfloat16}, ValueError, "a name, 'bfloat16' or 'float32'"),
    ({"reduce_dtype": "float64"}, ValueError, "reduce_dtype float64 needs"),
    ({"optimizer": 0.1}, TypeError, "optimizer is 0.1; pass an optax optimizer such as"),
    (
        {"optimizer": optax.adamw},
        TypeError,
        "optimizer adamw, a function, failed when it was given",
    ),
    ({"optimizer": lambda layout: 0.1}, TypeError, "returned a float; pass an optax optimizer"),
    ({"first": None}, TypeError, "init_or_shapes is None; init(rng) -> params, or a tree"),
    ({"first": {"w": "x"}}, LayoutError, "w is a str, not an array; keep parameters"),
    ({"first": lambda rng: {"w": jnp.tanh}}, LayoutError, "equinox.partition(model"),
]


@pytest.mark.core
@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS)
def test_options_of_another_kind_are_refused(options, kind, message):
    with pytest.raises(kind) as error:
        parallel(**options)
    assert message in str(error.value)


@pytest.mark.core
def test_a_mesh_of_jax_and_no_optimizer_at_all_are_refused():
    nothing: Any = None
    with pytest.raises(TypeError, match=r"mesh is a jax.sharding.Mesh; .*make_mesh\('4x2'\)"):
        parallel(mesh=MESH().jax_mesh)
    with pytest.raises(TypeError, match="optimizer is None; pass an optax optimizer"):
        jaxpar.parallelize(loss, init, nothing, mesh=MESH(), rules=RULES)


@pytest.mark.core
def test_an_initialiser_is_a_function_in_any_wrapping_and_a_module_is_a_tree():
    module = equinox.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    assert initialiser(module) is None
    for function in (init, functools.partial(init), jax.jit(init), equinox.filter_jit(init)):
        assert initialiser(function) is function
    wrapped = parallel(first=equinox.filter_jit(init)).init(0)
    assert np.array_equal(wrapped.params["w"], parallel().init(0).params["w"])
    with pytest.raises(LayoutError, match=r"activation is a .*, not an array; .*equinox.partition"):
        parallel(first=module)


@pytest.mark.core
def test_a_number_among_the_parameters_is_an_array():
    rules = jaxpar.Rules([("w", ("in", "out")), ("gain", (), "norm")], axes=AXES)
    par = parallel(first=lambda rng: init(rng) | {"gain": 1.0}, rules=rules)
    assert par.init(0).params["gain"] == 1


RETURNED = [
    (jnp.ones(()), TypeError, f"{CONTRACT}; this one returned one array"),
    ((1.0, 1.0), TypeError, f"{CONTRACT}; this one returned 2 things"),
    ((1.0, 1.0, None), TypeError, f"{CONTRACT}; here metrics is NoneType, and {{}} if there are"),
    ((1.0, 1.0, {"m": jnp.ones(())}), TypeError, f"{CONTRACT}; here metric 'm' is one array"),
    ((1.0, None, {}), TypeError, "weight is None: the number of rows or tokens"),
    ((np.ones(3), 1.0, {}), ValueError, "the loss has shape (3,); return the sum over rows"),
    ((np.int32(1), 1.0, {}), ValueError, "the loss is int32, which has no gradient"),
    ((1j, 1.0, {}), ValueError, "the loss is complex64, which has no gradient"),
]


@pytest.mark.core
@pytest.mark.parametrize(("returned", "kind", "message"), RETURNED)
def test_a_loss_that_breaks_its_contract_is_told_the_contract(returned, kind, message):
    with pytest.raises(kind) as error:
        contract(returned)
    assert message in str(error.value)


@pytest.mark.core
def test_the_contract_is_asked_of_every_loss_and_a_plain_number_keeps_it():
    with pytest.raises(TypeError, match="this one returned 2 things"):
        parallel(lambda p, b, r: loss(p, b, r)[:2]).lower(BATCH)
    state, metrics = (par := parallel(lambda p, b, r: (1.0, 2, {"m": [1, 1]}))).step(
        par.init(0), BATCH
    )
    assert (float(metrics["loss"]), float(metrics["m"])) == (0.5, 1)
    assert np.array_equal(state.params["w"], par.init(0).params["w"])


SEEDS = [
    (0.5, TypeError, "rng is a float; a seed such as 0"),
    (None, TypeError, "rng is a NoneType; a seed"),
    (True, TypeError, "rng is a bool; a seed"),
    (-1, ValueError, "seed -1; from 0 to 4294967295"),
    (2**32, ValueError, "seed 4294967296; from 0 to 4294967295"),
    (np.zeros(3, np.uint32), TypeError, "rng is a uint32 of shape (3,); a seed"),
]


@pytest.mark.core
@pytest.mark.parametrize(("rng", "kind", "message"), SEEDS)
def test_seeds_and_keys_that_cannot_be_are_refused(rng, kind, message):
    with pytest.raises(kind) as error:
        parallel().init(rng)
    assert message in str(error.value)


@pytest.mark.core
def test_a_key_of_another_implementation_is_refused_and_an_old_key_is_taken():
    with pytest.raises(ValueError, match="rng is a key<rbg> and this JAX makes key<fry>"):
        parallel().init(jax.random.key(0, impl="rbg"))
    one, two = (parallel().init(k).params["w"] for k in (7, jax.random.PRNGKey(7)))
    assert np.array_equal(one, two)
    assert jnp.issubdtype(key_of(np.int64(3)).dtype, jax.dtypes.prng_key)


BATCHES = [
    (tuple(BATCH.values()), TypeError, "a batch is a dict of arrays"),
    (None, TypeError, "a batch is a dict of arrays"),
    ({"x": [[1.0] * 4] * 8}, TypeError, "'x' of the batch is a list; a batch is a flat dict"),
    ({"a": BATCH}, TypeError, "'a' of the batch is a dict; a batch is a flat dict"),
    ({"x": np.array(["a"] * 8)}, TypeError, "'x' of the batch holds <U1"),
    ({}, ValueError, "a batch holds at least one array"),
]


@pytest.mark.core
@pytest.mark.parametrize(("batch", "kind", "message"), BATCHES)
def test_batches_of_another_kind_are_refused(batch, kind, message):
    par = parallel()
    state = par.init(0)
    for run in (par.step, par.evaluate, par.gradients):
        with pytest.raises(kind) as error:
            run(state, batch)
        assert message in str(error.value)


ENTRIES = [
    (["w"], "rule 'w'; write a list of (pattern, dims)"),
    ([("w",)], "rule ('w',); write a list of (pattern, dims)"),
    (
        [("w", ("in", "out"), "matrix", 1)],
        "write a list of (pattern, dims) or (pattern, dims, role)",
    ),
    ({"w": ("in", "out")}, "rules are a dict; write a list"),
    ("w", "rules are a str; write a list"),
    ([("w", None)], "rule 'w': dims are None; name every dimension"),
    ([("w", jax.sharding.PartitionSpec(None, "model"))], "dims are P(None, 'model'); name every"),
    ([(None, ("in", "out"))], "the pattern is a string, a regular expression"),
]


@pytest.mark.core
@pytest.mark.parametrize(("entries", "message"), ENTRIES)
def test_rules_of_another_kind_are_refused(entries, message):
    with pytest.raises(LayoutError) as error:
        jaxpar.Rules(entries, axes=AXES)
    assert message in str(error.value)


@pytest.mark.core
@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"in": None, "out": 1}, "axes: 'out' lies on 1; write {dimension: 'model'}"),
        ({"in": None, "out": ("model", 2)}, "axes: 'out' lies on ('model', 2)"),
        ([("in", None)], "axes is a list; write {dimension"),
    ],
)
def test_axes_of_another_kind_are_refused(axes, message):
    with pytest.raises(LayoutError) as error:
        jaxpar.Rules([("w", ("in", "out"))], axes=axes)
    assert message in str(error.value)


@pytest.mark.core
@pytest.mark.parametrize(
    ("spec", "devices", "message"),
    [
        (8, None, "mesh 8; write '4x2', 'data=4,model=2' or {'data': 4, 'model': 2}"),
        ((4, 2), None, "mesh (4, 2); write '4x2'"),
        ("2x2", 4, "devices is 4; a list such as jax.devices()[:4]"),
        ("2x1", [0, 1], "device 0 is no device; a list such as jax.devices()[:4]"),
    ],
)
def test_meshes_of_another_kind_are_refused(spec, devices, message):
    with pytest.raises(MeshError) as error:
        jaxpar.make_mesh(spec, devices=devices)
    assert message in str(error.value)


# ---- the decoder, without the config that would have refused -----------------------------------

SHAPE = {
    "layers": 1, "embed": 16, "heads": 8, "kv_heads": 2, "head_dim": 4, "mlp": 16, "vocab": 16, "positions": 8,
}  # fmt: skip
DECODERS = [
    ({"kv_heads": 3}, "8x1", 8, "heads 8 does not divide by kv_heads 3; kv_heads of [1, 2, 4, 8]"),
    ({"head_dim": 3}, "8x1", 8, "head_dim 3 is odd"),
    ({"heads": 12, "kv_heads": 6}, "2x4", 8, "kv_heads 6 and model=4: one must divide the other"),
    ({}, "2x4", 6, "sequence 6 does not divide by model=4; 4 would, or sequence_parallel=False"),
    ({"style": "gpt2", "kv_heads": 8}, "8x1", 9, "sequence 9 is longer than the 8 learned"),
]


@pytest.mark.core
@pytest.mark.parametrize(("model", "mesh", "sequence", "message"), DECODERS)
def test_a_decoder_that_does_not_fit_says_what_would(model, mesh, sequence, message):
    tokens = jax.ShapeDtypeStruct((8, sequence), jnp.int32)

    def lowered() -> None:
        staged, first, rules = decoder.make(ModelConfig(**(SHAPE | model)))
        par = parallel(staged, first, mesh=jaxpar.make_mesh(mesh), rules=rules)
        par.lower({"tokens": tokens, "targets": tokens})

    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below
        lowered()
    assert message in str(error.value)
