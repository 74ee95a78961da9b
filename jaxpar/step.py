"""A loss, a layout and an optimizer become one compiled train step.

```
 state, batch                      jax.shard_map: manual over replica, data, ... (and model, if the model says so)
      │        ┌──────────────────────────────────────────────────────────────────────────────────────────────┐
      ├───────►│ parameters ─gather─► for each microbatch: d(sum of losses)/d(parameters), added in float32   │
      │        │             ─reduce─► gradient shards, sum of losses, sum of weights, sum of squares         │
      │        └──────────────────────────────────────────────────────────────────────────────────────────────┘
      │                  one division by the sum of weights, one clip by the global norm
      └───────►  optimizer (any optax chain, on whole-array semantics) ─► new shards ─gather─► state
```

Sums, never means of means: the loss and the gradient are divided once, after all microbatches and all shards. A step
whose loss, gradient or update is not finite, or that has no valid target, changes nothing but the batch index and the count
of skipped steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar import remat as remat_policies
from jaxpar.arguments import contract
from jaxpar.collectives import all_gather, varies, varying
from jaxpar.mesh import Mesh
from jaxpar.placement import Mover, Placement
from jaxpar.remat import GATHERED
from jaxpar.staged import BLOCKS, Staged, staged_loss
from jaxpar.state import TrainState

RESERVED = {"loss", "weight", "grad_norm", "skipped"}
"""Metrics that every step reports."""


def mean(total: Any, weight: Any) -> Any:
    """``total / weight``, and `total` (which is 0) where no row had any weight."""
    return total / jnp.where(weight > 0, weight, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What a step is made of; its methods are pure functions to be jitted.

    Attributes:
        loss: an opaque ``loss_fn(params, batch, rng) -> (sum, weight, metrics)`` or a `Staged`.
        placements: one a leaf, in the order of `treedef`.
        clip_norm: largest global norm of the mean gradient, or None.
    """

    loss: Callable[..., Any] | Staged
    treedef: Any
    placements: tuple[Placement, ...]
    mover: Mover
    mesh: Mesh
    optimizer: optax.GradientTransformationExtraArgs
    microbatches: int
    remat: str
    clip_norm: float | None

    # ---- inside the manual region: lists are in leaf order -------------------------------------------------------

    @property
    def _axes(self) -> tuple[str, ...]:
        return self.mesh.physical(*self.mover.manual)

    def _microbatches(self, batch: Any) -> Any:
        m = self.microbatches
        return jax.tree.map(lambda a: a.reshape(m, a.shape[0] // m, *a.shape[1:]), batch)

    def _early(self, params: list[Any]) -> list[Any]:
        """Parameters as the microbatches see them: leaves that are gathered once a step, whole."""
        out = []
        for p, x in zip(self.placements, params, strict=True):
            if p.gather == "step":
                x = varying(self.mover.gather_whole(p, self.mover.cast(x)), self._axes)
            out.append(x)
        return out

    def _use(self, i: int, x: Any, held: Any, *, layer: bool) -> Any:
        """Leaf i where the model reads it. `held` is the whole parameter when `x` only collects its gradient."""
        p = self.placements[i]
        if p.gather == "use":
            return checkpoint_name(self.mover.gather(p, x, layer=layer), GATHERED)
        if p.scatter == "use":
            return self.mover.scatter_at_use(p, held, x, layer=layer)
        return self.mover.cast(x)

    def _loss(
        self, variables: list[Any], held: list[Any], batch: Any, rng: Any
    ) -> tuple[Any, Any, Any]:
        """(summed loss, weight, metrics) of one microbatch of this shard."""
        if not isinstance(self.loss, Staged):
            whole = [
                self._use(i, x, h, layer=False)
                for i, (x, h) in enumerate(zip(variables, held, strict=True))
            ]
            function = self.loss
            if self.remat != "none":
                function = remat_policies.wrap(function, self.remat, gathers=False, scanned=False)
            return function(jax.tree.unflatten(self.treedef, whole), batch, rng)
        stacked = [i for i, p in enumerate(self.placements) if p.stacked]
        names = list(range(len(self.placements)))

        def tree(values: Mapping[int, Any]) -> Any:
            """The parameter tree with `values` at their leaves and nothing elsewhere."""
            return jax.tree.unflatten(self.treedef, [values.get(i) for i in names])

        def outer() -> Any:
            rest = [i for i in names if i not in stacked]
            full = tree({i: self._use(i, variables[i], held[i], layer=False) for i in rest})
            return {k: v for k, v in full.items() if k != BLOCKS}

        def layer(parts: Any) -> Any:
            own, whole = parts
            values = {
                i: self._use(i, x, h, layer=True)
                for i, x, h in zip(stacked, own, whole, strict=True)
            }
            return tree(values)[BLOCKS]

        stack = ([variables[i] for i in stacked], [held[i] for i in stacked])
        moves = any(p.gather == "use" for p in self.placements)
        return staged_loss(
            self.loss, outer, layer, stack, batch, rng, remat=self.remat, gathers=moves
        )

    def _checked_loss(
        self, variables: list[Any], held: list[Any], batch: Any, rng: Any
    ) -> tuple[Any, Any]:
        loss, weight, metrics = contract(self._loss(variables, held, batch, rng))
        wide = jnp.promote_types(loss.dtype, jnp.float32)
        along = varies(loss) & set(self.mesh.physical("model"))
        if along:
            raise ValueError(
                f"the loss differs along {sorted(along)}: sum or gather over the model axis before returning it"
            )
        # Sums of this shard alone differ between shards even where the loss reads nothing of the batch.
        rows = self.mesh.physical(*(a for a in self.mover.manual if a != "model"))
        taken = RESERVED & set(metrics)
        if taken:
            raise ValueError(
                f"a metric may not be called {sorted(taken)[0]!r}: jaxpar reports one of that name"
            )
        pairs = {"loss": (loss, weight), **{name: tuple(pair) for name, pair in metrics.items()}}
        sums = jax.tree.map(lambda a: varying(jnp.asarray(a).astype(wide), rows), pairs)
        return sums["loss"][0], sums

    def _sums(self, sums: Any) -> Any:
        rows = self.mesh.physical(*(a for a in self.mover.manual if a != "model"))
        return lax.psum(sums, rows) if rows else sums

    def _gradients(self, params: list[Any], batch: Any, rng: Any) -> tuple[list[Any], Any, Any]:
        """(finished gradient of the summed loss, sums over all shards, sum of squares of the mean's gradient)."""
        key = jax.random.wrap_key_data(rng)
        axes = self._axes
        # Marked as varying *before* differentiation: else every use of a parameter sums its gradient over the mesh.
        params = varying(params, axes)
        variables, held = self._variables(params)
        grad = jax.value_and_grad(self._checked_loss, has_aux=True)
        if self.microbatches == 1:
            (_, sums), grads = grad(variables, held, batch, key)
            grads = self._after_microbatch(grads)
        else:
            grads, sums = self._accumulate(grad, variables, held, batch, key)
        grads = [
            self.mover.without_padding(p, self.mover.finish(p, g))
            for p, g in zip(self.placements, grads, strict=True)
        ]
        sums = self._sums(sums)
        # Of the mean, not of the sum: squares of a sum over weights of 1e19 or 1e-24 leave float32.
        scale = mean(1, sums["loss"][1])
        squares = jnp.zeros(())
        for p, g in zip(self.placements, grads, strict=True):
            wide = g.astype(jnp.promote_types(g.dtype, jnp.float32)) * scale
            squares = squares + jnp.sum(jnp.square(wide)) * self.mover.share(p)
        squares = varying(squares, axes)
        return grads, sums, lax.psum(squares, axes) if axes else squares

    def _variables(self, params: list[Any]) -> tuple[list[Any], list[Any]]:
        """What is differentiated, and the whole parameters beside it where that only collects a gradient."""
        early = self._early(params)
        held, variables = [], []
        for p, x in zip(self.placements, early, strict=True):
            collects = p.scatter == "use" and p.gather == "never"
            held.append(x if collects else None)
            variables.append(self._gradient_shard(p, x) if collects else x)
        return variables, held

    def _gradient_shard(self, p: Placement, x: jax.Array) -> jax.Array:
        """Zeros of a shard's shape, in the dtype of the gradient buffer, that collect a gradient scattered at its use."""
        dtype = self.mover.precision.gradient(self.microbatches)
        shape = list(x.shape)
        shape[p.dim] //= self.mesh.size(*p.axes)
        return varying(jnp.zeros(shape, dtype), self._axes)

    def _after_microbatch(self, grads: list[Any]) -> list[Any]:
        dtype = self.mover.precision.gradient(self.microbatches)
        out = []
        for p, g in zip(self.placements, grads, strict=True):
            g = g.astype(dtype)
            out.append(self.mover.scatter(p, g) if p.scatter == "microbatch" else g)
        return out

    def _accumulate(
        self, grad: Any, variables: Any, held: Any, batch: Any, key: Any
    ) -> tuple[list[Any], Any]:
        parts = self._microbatches(batch)

        def one(micro: Any) -> tuple[list[Any], Any]:
            (_, sums), grads = grad(variables, held, micro, key)
            return self._after_microbatch(grads), sums

        def body(carry: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, one(micro)), None

        shapes = jax.eval_shape(one, jax.tree.map(lambda a: a[0], parts))
        zero = jax.tree.map(
            lambda s: varying(jnp.zeros(s.shape, s.dtype), tuple(varies(s))), shapes
        )
        return lax.scan(body, zero, parts)[0]

    # ---- the whole-array view ------------------------------------------------------------------------------------

    def _region(
        self, function: Callable[..., Any], batch: Any, out_specs: Any
    ) -> Callable[..., Any]:
        stored = [self.mover.specs(p.stored) for p in self.placements]
        rows = jax.tree.map(lambda _: self.mesh.batch_spec(), batch)
        if not self._axes:
            # No axis is manual, but `constrain` inside the loss still needs to know the mesh.
            def here(*args: Any) -> Any:
                with jax.sharding.use_abstract_mesh(self.mesh.jax_mesh.abstract_mesh):
                    return function(*args)

            return here
        return jax.shard_map(
            function,
            mesh=self.mesh.jax_mesh,
            in_specs=(stored, rows, PartitionSpec()),
            out_specs=out_specs,
            axis_names=set(self._axes),
        )

    def gradients(self, params: Any, batch: Any, rng: Any) -> tuple[Any, Any, Any]:
        """(gradient of the mean loss, (sum, weight) of loss and metrics, global norm of that gradient).

        Gradients are split like the moments, in the dtype of the update.
        """
        flat = self.treedef.flatten_up_to(params)
        finished = [self.mover.specs(p.shard) for p in self.placements]
        outs = (finished, PartitionSpec(), PartitionSpec())
        grads, sums, squares = self._region(self._gradients, batch, outs)(flat, batch, rng)
        scale = mean(1, sums["loss"][1])
        norm = jnp.sqrt(squares)
        update = jnp.dtype(self.mover.precision.update)
        grads = [g.astype(update) * scale.astype(update) for g in grads]
        return jax.tree.unflatten(self.treedef, grads), sums, norm

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """One optimizer step. The caller jits it, with the state donated and its shardings pinned."""
        rng = jax.random.key_data(
            jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        )
        grads, sums, norm = self.gradients(state.params, batch, rng)
        weight = sums["loss"][1]
        loss = mean(*sums["loss"])
        good = jnp.isfinite(norm) & jnp.isfinite(loss) & (weight > 0)
        if self.clip_norm is not None:
            factor = self.clip_norm / jnp.maximum(norm, self.clip_norm)
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        held = state.params if state.masters is None else state.masters
        held = self._split(held, "shard")
        updates, opt_state = self._update(grads, state.opt_state, held, loss)
        new = self._split(optax.apply_updates(held, updates), "shard")
        good &= self._finite(new)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        new = self._split(keep(new, held), "shard")
        stored = jnp.dtype(self.mover.precision.params)
        params = self._restore(jax.tree.map(lambda a: a.astype(stored), new))
        skipped = state.skipped + jnp.where(good, 0, 1).astype(jnp.int32)
        metrics = {name: mean(*pair) for name, pair in sums.items()}
        metrics |= {"weight": weight, "grad_norm": norm, "skipped": jnp.where(good, 0, 1)}
        return TrainState(
            step=state.step + 1,
            params=params,
            masters=None if state.masters is None else new,
            opt_state=keep(opt_state, state.opt_state),
            skipped=skipped,
            rng=state.rng,
        ), metrics

    def _update(self, grads: Any, opt_state: Any, held: Any, loss: Any) -> tuple[Any, Any]:
        try:
            return self.optimizer.update(grads, opt_state, held, value=loss, grad=grads)
        except TypeError as error:
            if "required keyword-only" not in str(error):
                raise
            raise TypeError(
                f"the optimizer wants more than a step has ({error}): jaxpar passes gradients, state, parameters, "
                f"value (the mean loss) and grad; a line search, which calls the loss again, cannot run"
            ) from error

    def _finite(self, tree: Any) -> jax.Array:
        """Whether every element of the updated shards is finite: an optimizer can divide by zero too."""

        def bad(leaves: list[Any]) -> jax.Array:
            count = sum(jnp.any(~jnp.isfinite(x)).astype(jnp.float32) for x in leaves)
            axes = self.mesh.jax_mesh.axis_names
            return lax.psum(varying(jnp.asarray(count), axes), axes)

        # One sum of a number over all devices, where the partitioner would make one a leaf.
        leaves = self.treedef.flatten_up_to(tree)
        specs = [self.mesh.spec(p.shard) for p in self.placements]
        count = jax.shard_map(
            bad, mesh=self.mesh.jax_mesh, in_specs=(specs,), out_specs=PartitionSpec()
        )(leaves)
        return count == 0

    def evaluate(self, params: Any, batch: Any) -> Any:
        """name -> (sum, weight) over all rows, "loss" among them; the loss gets no random key."""

        def run(params: list[Any], batch: Any, rng: None) -> Any:
            variables, held = self._variables(varying(params, self._axes))
            sums = lax.map(
                lambda micro: self._checked_loss(variables, held, micro, rng)[1],
                self._microbatches(batch),
            )
            return self._sums(jax.tree.map(lambda a: a.sum(0), sums))

        flat = self.treedef.flatten_up_to(params)
        return self._region(run, batch, PartitionSpec())(flat, batch, None)

    def _split(self, tree: Any, which: str) -> Any:
        """Ask for each leaf in the split `which` of its placement: slicing a whole leaf costs no communication."""
        leaves = [
            lax.with_sharding_constraint(x, self.mesh.sharding(getattr(p, which)))
            for p, x in zip(self.placements, self.treedef.flatten_up_to(tree), strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def _restore(self, tree: Any) -> Any:
        """Parameters in their stored split from the updated shards: the all-gather of ZeRO 1 and 2."""
        out = []
        for p, x in zip(self.placements, self.treedef.flatten_up_to(tree), strict=True):
            if p.stored != p.shard:
                axes = self.mesh.physical(*p.axes)
                x = jax.shard_map(
                    functools.partial(all_gather, axes=axes, dim=p.dim),
                    mesh=self.mesh.jax_mesh,
                    in_specs=self.mesh.spec(p.shard),
                    out_specs=self.mesh.spec(p.base),
                    # The result of an all-gather is equal on all of `axes`, which the type of all_gather cannot say.
                    check_vma=False,
                )(x)
            out.append(x)
        return jax.tree.unflatten(self.treedef, out)
