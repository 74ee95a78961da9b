"""`jaxpar.parallelize`: a loss, an initialiser, an optimizer, a mesh and rules become a sharded train step.

This is the only door that the built-in trainer uses, and it needs no device: on a mesh of abstract chips it still
lowers and compiles (`Parallel.lower`), though nothing can run there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import arguments
from jaxpar import precision as precisions
from jaxpar import zero as zero_stages
from jaxpar.batch import with_row_ids
from jaxpar.layout import Layout
from jaxpar.mesh import Mesh
from jaxpar.padding import on_true_shapes, padded, true
from jaxpar.placement import SMALL, Mover, place
from jaxpar.rules import Leaf, Rules, dtype_named, paths_of
from jaxpar.staged import BLOCKS, Staged
from jaxpar.state import TrainState, reshaped
from jaxpar.step import Program, mean


def parallelize(
    loss: Callable[..., Any] | Staged,
    init_or_shapes: Callable[[Any], Any] | Any,
    optimizer: optax.GradientTransformation | Callable[[Layout], optax.GradientTransformation],
    *,
    mesh: Mesh,
    rules: Rules,
    zero: int = 0,
    microbatches: int = 1,
    remat: str = "none",
    precision: str | precisions.Precision = "float32",
    reduce_dtype: str | None = None,
    clip_norm: float | None = None,
    schedule: Any = None,
    small: int = SMALL,
) -> Parallel:
    """Make a sharded, accumulated, clipped train step.

    Args:
        loss: ``loss_fn(params, batch, rng) -> (summed_loss, weight, metrics)`` over the rows of one shard, or a
            `Staged` model. Sums, not means; a metric is a (sum, weight) pair. `rng` is the same key on every shard and
            for every microbatch: fold ``batch["row_id"]`` into it; in evaluation it is None. Dimensions that the rules
            pad arrive padded.
        init_or_shapes: ``init(rng) -> params``, or a pytree of arrays or ShapeDtypeStructs (bring the values with
            `Parallel.load`).
        optimizer: any optax transformation, which gets the mean loss as `value`, or a function of the `Layout` that makes
            one (for a decay mask by role).
        zero: ZeRO stage 0-3 (arXiv:1910.02054).
        microbatches: parts that each shard's rows are taken in.
        remat: name of a policy (`jaxpar.remat`), around each block of a `Staged` model, else around the loss.
        precision: name (`jaxpar.precision`).
        reduce_dtype: "bfloat16" or "float32" on the wire; the compute dtype by default.
        clip_norm: largest global norm of the mean gradient.
        small: bytes of a whole leaf up to which ZeRO 2 and 3 move it once a step instead of at each use.
        schedule: pipeline schedule; needs a `stage` axis, which this version does not run.

    Raises:
        LayoutError: rules that do not fit the parameters or the mesh.
        TypeError: an argument of another kind than is meant (`jaxpar.arguments`).
        ValueError: an option out of range.
    """
    arguments.check_mesh(mesh, rules)
    arguments.check_options(
        zero=zero,
        microbatches=microbatches,
        clip_norm=clip_norm,
        small=small,
        remat=remat,
        schedule=schedule,
    )
    kind = arguments.precision_of(precision, reduce_dtype)
    shapes = arguments.shapes_of(init_or_shapes)
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, _stored(s.dtype, kind.params)), shapes
    )
    leaves = rules.leaves(shapes, mesh)
    staged = isinstance(loss, Staged)
    # Where the compiler splits over `model`, a dimension that it splits cannot be scattered by hand as well: the two
    # would interleave in the other order.
    combine = mesh.size("model") == 1 or (staged and loss.model_axis == "manual")
    build = functools.partial(
        Layout.build,
        shapes,
        rules,
        mesh,
        zero=zero,
        param_dtype=kind.params,
        grad_dtype=kind.gradient(microbatches),
        master_dtype=kind.masters,
        combine=combine,
    )
    made = arguments.transformation(optimizer, functools.partial(build, optimizer=None))
    layout = build(optimizer=made)
    flat, treedef = jax.tree.flatten(leaves, is_leaf=_is_leaf)
    arguments.check_leaves(flat, staged)
    if staged and (not isinstance(shapes, Mapping) or BLOCKS not in shapes):
        raise ValueError(
            f"a Staged model needs a dict of parameters with stacked leaves under {BLOCKS!r}"
        )
    placements = tuple(
        place(
            leaf,
            zero_stages.shard(leaf, mesh.sizes, combine=combine).spec if zero else leaf.spec,
            zero=zero,
            staged=staged,
            stacked=staged and leaf.path.split("/")[0] == BLOCKS,
            nbytes=int(np.prod(leaf.stored)) * jnp.dtype(kind.compute).itemsize,
            small=small,
        )
        for leaf in flat
    )
    manual = ("replica", "data")
    if staged and loss.model_axis == "manual":
        manual += ("model",)
    manual = tuple(a for a in manual if mesh.size(a) > 1)
    if any(leaf.padded for leaf in flat):
        made = on_true_shapes(made, leaves, layout.opt_state)
    program = Program(
        loss=loss,
        treedef=treedef,
        placements=placements,
        mover=Mover(mesh=mesh, manual=manual, precision=kind),
        mesh=mesh,
        optimizer=made,
        microbatches=microbatches,
        remat=remat,
        clip_norm=clip_norm,
    )
    init = arguments.initialiser(init_or_shapes)
    return Parallel(program=program, layout=layout, leaves=leaves, init_fn=init)


def _stored(dtype: Any, params: str) -> Any:
    return jnp.dtype(params) if jnp.issubdtype(dtype, jnp.floating) else dtype


class Parallel:
    """A sharded train step; see `parallelize`.

    Attributes:
        layout: where every leaf is stored.
        mesh: the mesh it runs on.
        compiled: batch shapes -> the compiled step; one entry a run.
    """

    def __init__(self, *, program: Program, layout: Layout, leaves: Any, init_fn: Any):
        self.program = program
        self.layout = layout
        self.mesh = program.mesh
        self.compiled: dict[Any, Any] = {}
        self._leaves = leaves
        self._init = init_fn
        self._evaluations: dict[Any, Any] = {}
        self._signature: Any = None
        self._run: Any = None

    # ---- state ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def shardings(self) -> TrainState:
        """NamedSharding of every leaf of the state."""
        split = functools.partial(
            jax.tree.map, lambda leaf: self.mesh.sharding(leaf.spec), is_leaf=_is_leaf
        )
        whole = self.mesh.sharding()
        return TrainState(
            step=whole,
            params=split(self.layout.params),
            masters=None if self.layout.masters is None else split(self.layout.masters),
            opt_state=split(self.layout.opt_state),
            skipped=whole,
            rng=whole,
        )

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of every leaf of the state."""

        def leaf(x: Leaf) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                x.stored, dtype_named(x.dtype), sharding=self.mesh.sharding(x.spec)
            )

        def scalar(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.mesh.sharding())

        each = functools.partial(jax.tree.map, leaf, is_leaf=_is_leaf)
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return TrainState(
            step=scalar((), jnp.int32),
            params=each(self.layout.params),
            masters=None if self.layout.masters is None else each(self.layout.masters),
            opt_state=each(self.layout.opt_state),
            skipped=scalar((), jnp.int32),
            rng=scalar(key.shape, key.dtype),
        )

    def init(self, rng: Any = 0) -> TrainState:
        """The first state, made in its shards: no device holds a whole leaf that is split.

        Values do not depend on the mesh. `rng`: a key or a seed.
        """
        return self._make_first(arguments.key_of(rng))

    @functools.cached_property
    def _make_first(self) -> Any:
        return jax.jit(self._first, out_shardings=self.shardings)

    def lower_init(self) -> jax.stages.Lowered:
        """The initialisation, lowered and not run."""
        return self._make_first.lower(jax.eval_shape(lambda: jax.random.key(0)))

    def _first(self, key: Any) -> TrainState:
        if self._init is None:
            raise ValueError(
                "parallelize was given shapes, not an initialiser: bring values with load(params)"
            )
        values, run = jax.random.split(key)
        params = self._init(values)
        arguments.check_loaded(params, self._leaves)
        return self._state(params, jax.random.key_data(run))

    def load(self, params: Any, rng: Any = 0) -> TrainState:
        """A first state with these parameters, of true shapes.

        Raises:
            ValueError: other leaves than the layout's, or other shapes.
        """
        arguments.check_loaded(params, self._leaves)
        return self._make_state(params, arguments.key_of(rng))

    @functools.cached_property
    def _make_state(self) -> Any:
        def make(params: Any, key: Any) -> TrainState:
            return self._state(params, jax.random.key_data(key))

        return jax.jit(make, out_shardings=self.shardings)

    def _state(self, params: Any, rng: Any) -> TrainState:
        kind = self.program.mover.precision
        params = padded(jax.tree.map(jnp.asarray, params), self._leaves)

        def cast(dtype: str) -> Any:
            return jax.tree.map(lambda x: x.astype(_stored(x.dtype, dtype)), params)

        masters = None if kind.masters is None else cast(kind.masters)
        stored = cast(kind.params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=stored,
            masters=masters,
            opt_state=self.program.optimizer.init(stored if masters is None else masters),
            skipped=jnp.zeros((), jnp.int32),
            rng=rng,
        )

    def unpad(self, state: TrainState) -> TrainState:
        """The state with every leaf in its true shape, as checkpoints hold it."""
        return reshaped(state, self.layout, true)

    def pad(self, state: TrainState) -> TrainState:
        """A state of true shapes in stored shapes and shardings; the inverse of `unpad`."""
        whole = functools.partial(reshaped, layout=self.layout, change=padded)
        return jax.jit(whole, out_shardings=self.shardings)(state)

    # ---- batches --------------------------------------------------------------------------------------------------

    def abstract_batch(self, shapes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of a global batch; `shapes`: arrays or ShapeDtypeStructs of all its rows."""
        return {
            k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self._batch_sharding)
            for k, v in with_row_ids(shapes, self.mesh, self.program.microbatches).items()
        }

    @functools.cached_property
    def _batch_sharding(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh.jax_mesh, self.mesh.batch_spec())

    def _is_put(self, x: Any) -> bool:
        return isinstance(x, jax.Array) and x.sharding == self._batch_sharding

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """A global host batch on the devices, rows split over the batch axes; adds ``row_id`` if absent."""
        rows = with_row_ids(batch, self.mesh, self.program.microbatches)
        return jax.device_put(rows, self._batch_sharding)

    # ---- programs -------------------------------------------------------------------------------------------------

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """The train step for batches of these shapes, lowered and not run; works on abstract devices."""
        return self._step.lower(self.abstract_state, self.abstract_batch(batch))

    @functools.cached_property
    def _step(self) -> Any:
        return jax.jit(
            self.program.step,
            donate_argnums=0,
            out_shardings=(self.shardings, self.mesh.sharding()),
        )

    def step(
        self, state: TrainState, batch: Mapping[str, Any]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is donated. Metrics: loss, weight, grad_norm, skipped and the loss's own.

        Compiles at the first call, and again only for a batch of other shapes.

        Raises:
            ValueError: the state was given to `step` before, or is not of this mesh, stage and precision.
        """
        # Run, the program would write into memory that is another array's by now.
        if getattr(getattr(state, "step", None), "is_deleted", bool)():
            raise ValueError(
                "this state was given to step before and its memory reused; keep the one that step returned"
            )
        if (
            not isinstance(batch, Mapping)
            or "row_id" not in batch
            or not all(map(self._is_put, batch.values()))
        ):
            batch = self.put(batch)
        signature = _signature(batch)
        if signature != self._signature:
            self._signature, self._run = signature, self.compile(batch)
        try:
            return self._run(state, batch)
        except (TypeError, ValueError) as error:
            reason = self._other_state(state)
            if reason is None:
                raise
            raise ValueError(reason) from error

    def _other_state(self, state: Any) -> str | None:
        """How `state` differs from this step's own, and the way from one to the other; None if it does not."""
        if not isinstance(state, TrainState):
            return f"state is a {type(state).__name__}; step takes what init, load or step returned"
        wanted = self.abstract_state
        way = (
            "new.pad(old.unpad(state)) brings a state of the same optimizer and precision to another mesh of these "
            "devices or another ZeRO stage; a checkpoint, restored, any other"
        )
        paths = paths_of(wanted)
        if jax.tree.structure(state) != jax.tree.structure(wanted):
            other = sorted(set(paths) ^ set(paths_of(state)))
            where = f": {', '.join(other[:3])} in one alone" if other else ""
            return f"this state is of another optimizer, precision or model{where}; {way}"
        for path, x, y in zip(paths, jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
            sharding = getattr(x, "sharding", None)
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                return f"{path} of this state is {x.dtype}{x.shape}, and of this step {y.dtype}{y.shape}; {way}"
            if sharding is None or not sharding.is_equivalent_to(y.sharding, len(y.shape)):
                return f"{path} of this state lies as {sharding}, and of this step as {y.sharding}; {way}"
        return None

    def compile(self, batch: Mapping[str, Any]) -> jax.stages.Compiled:
        """The train step for batches of these shapes, compiled and not run; `step` uses it."""
        key = tuple(sorted(_signature(self.abstract_batch(batch)), key=lambda s: s[0]))
        if key not in self.compiled:
            self.compiled[key] = self.lower(batch).compile()
        return self.compiled[key]

    def cache_size(self) -> int:
        """Number of compilations of the step."""
        return len(self.compiled)

    @functools.cached_property
    def _evaluate(self) -> Any:
        return jax.jit(self.program.evaluate, out_shardings=self.mesh.sharding())

    def evaluate(
        self, state: TrainState, batch: Mapping[str, Any]
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """name -> (sum, weight) over all rows; ``"loss"`` among them. Add them up over batches, then divide.

        The loss gets ``rng=None``: no dropout."""
        batch = self.put(batch)
        run = self._evaluations.get(_signature(batch), self._evaluate)
        return run(state.params, batch)

    def compile_evaluation(self, batch: Mapping[str, Any]) -> None:
        """Compile `evaluate` for batches of these shapes ahead of its first call."""
        abstract = self.abstract_batch(batch)
        lowered = self._evaluate.lower(self.abstract_state.params, abstract)
        self._evaluations[_signature(abstract)] = lowered.compile()

    @functools.cached_property
    def _gradients(self) -> Any:
        def run(state: TrainState, batch: Any) -> Any:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
            grads, sums, norm = self.program.gradients(
                state.params, batch, jax.random.key_data(key)
            )
            return mean(*sums["loss"]), norm, grads

        return jax.jit(run)

    def gradients(
        self, state: TrainState, batch: Mapping[str, Any]
    ) -> tuple[jax.Array, jax.Array, Any]:
        """(mean loss, global gradient norm, gradient of the mean loss in true shapes), without an update."""
        loss, norm, grads = self._gradients(state, self.put(batch))

        return loss, norm, true(grads, self._leaves)


def _signature(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, x.shape, x.dtype) for name, x in batch.items())


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)
