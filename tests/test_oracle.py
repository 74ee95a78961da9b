"""The oracle against closed forms, finite differences, numpy, scipy and optax."""

import ast
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from scipy.special import log_softmax, logsumexp

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("x64")]


def config(style="llama", **changes):
    fields = {
        "style": style,
        "layers": 2,
        "embed": 12,
        "heads": 4,
        "kv_heads": 2 if style == "llama" else 4,
        "head_dim": 4,
        "mlp": 20,
        "vocab": 23,
        "positions": 11,
        "rope_theta": 100.0,
        "norm_eps": 1e-5,
        "tied": style == "gpt2",
    }
    return SimpleNamespace(**fields | changes)


CONFIGS = [config("llama"), config("llama", tied=True), config("gpt2"), config("gpt2", tied=False)]
NAMES = ["llama", "llama-tied", "gpt2", "gpt2-untied"]
both_styles = pytest.mark.parametrize("cfg", [CONFIGS[0], CONFIGS[2]], ids=["llama", "gpt2"])


def batch(cfg, seed=0, rows=3, length=8):
    return oracle.batch_of(cfg, seed, rows, length)


def test_the_oracle_imports_no_jaxpar():
    imported = set()
    for node in ast.walk(ast.parse(Path(oracle.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert "jax" in imported
    assert "jaxpar" not in imported


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("cfg", CONFIGS, ids=NAMES)
def test_each_gradient_leaf_agrees_with_finite_differences(cfg, z_loss):
    params, data = oracle.init_params(cfg, 1), batch(cfg)

    @jax.jit
    def mean(flat):
        total, weight = oracle.loss(oracle.unflatten(flat), data, cfg, z_loss)
        return total / weight

    value, grads, _ = oracle.value_and_grad(params, data, cfg, z_loss)
    flat = oracle.flatten(params)
    assert value == pytest.approx(float(mean(flat)), rel=1e-13)

    rng, h = np.random.default_rng(0), 1e-3
    for path, grad in oracle.flatten(grads).items():
        direction = rng.standard_normal(grad.shape)
        direction /= np.linalg.norm(direction)
        at = [float(mean(flat | {path: flat[path] + k * h * direction})) for k in (-2, -1, 1, 2)]
        numeric = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * h)  # error of order h^4
        assert abs(numeric - np.sum(grad * direction)) <= 1e-8, path


@pytest.mark.parametrize("cfg", CONFIGS, ids=NAMES)
def test_no_gradient_leaf_is_trivial_except_the_key_bias(cfg):
    """A key bias adds the same to every score of a query, and softmax does not see that."""
    _, grads, norm = oracle.value_and_grad(oracle.init_params(cfg, 1), batch(cfg), cfg)
    flat = oracle.flatten(grads)
    for path, grad in flat.items():
        if path == "blocks/attention/key_bias":
            assert np.max(np.abs(grad)) < 1e-15
        else:
            assert np.max(np.abs(grad)) > 1e-3, path
    everything = np.concatenate([grad.ravel() for grad in flat.values()])
    assert norm == pytest.approx(np.linalg.norm(everything), rel=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@both_styles
def test_the_dtype_of_the_parameters_is_the_dtype_of_everything(cfg, dtype):
    params = oracle.init_params(cfg, 1, dtype)
    assert oracle.logits(params, batch(cfg)["tokens"], cfg).dtype == dtype
    _, grads, _ = oracle.value_and_grad(params, batch(cfg), cfg)
    ones = jax.tree.map(np.ones_like, params)
    updated = oracle.adamw(params, grads, ones, ones, 1, 1e-3, weight_decay=0.1)[:3]
    for leaf in jax.tree.leaves((grads, updated)):
        assert leaf.dtype == dtype


def test_float32_and_float64_differ_only_by_rounding():
    cfg = CONFIGS[0]
    wide, _, wide_norm = oracle.value_and_grad(oracle.init_params(cfg, 1), batch(cfg), cfg)
    narrow, _, narrow_norm = oracle.value_and_grad(
        oracle.init_params(cfg, 1, np.float32), batch(cfg), cfg
    )
    assert narrow == pytest.approx(wide, rel=1e-5)
    assert narrow != wide
    assert narrow_norm == pytest.approx(wide_norm, rel=1e-5)


@both_styles
def test_a_later_token_changes_no_earlier_loss(cfg):
    params, data = oracle.init_params(cfg, 1), batch(cfg)
    data["targets"] = np.abs(data["targets"]) % cfg.vocab  # every target valid
    before = np.asarray(oracle.token_losses(params, data, cfg))
    for place in range(1, data["tokens"].shape[1]):
        tokens = data["tokens"].copy()
        tokens[:, place] = (tokens[:, place] + 1) % cfg.vocab
        after = np.asarray(oracle.token_losses(params, data | {"tokens": tokens}, cfg))
        np.testing.assert_array_equal(after[:, :place], before[:, :place])
        assert np.all(after[:, place:] != before[:, place:])


def test_rows_do_not_see_each_other():
    cfg = CONFIGS[0]
    params, data = oracle.init_params(cfg, 1), batch(cfg)
    whole = oracle.token_losses(params, data, cfg)
    alone = oracle.token_losses(params, {k: v[1:2] for k, v in data.items()}, cfg)
    np.testing.assert_allclose(alone[0], whole[1], rtol=1e-12)


def test_rope_turns_each_pair_as_a_complex_number():
    theta, positions = 50.0, np.array([0, 3, 7])
    x = np.random.default_rng(0).standard_normal((3, 2, 6))
    pairs = (x[..., :3] + 1j * x[..., 3:]) * np.exp(
        1j * positions[:, None, None] * theta ** (-2 * np.arange(3) / 6)
    )
    got = oracle.rotate(jnp.asarray(x), positions, theta)
    np.testing.assert_allclose(got, np.concatenate([pairs.real, pairs.imag], -1), atol=1e-14)


def test_a_rope_score_depends_on_the_distance_alone():
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 8))) for _ in range(2))

    def score(m, n):
        at_m = oracle.rotate(query, np.array([m]), 100.0)
        return float(jnp.sum(at_m * oracle.rotate(key, np.array([n]), 100.0)))

    assert score(5, 2) == pytest.approx(score(103, 100), rel=1e-12)
    assert score(0, 0) == pytest.approx(float(jnp.sum(query * key)), rel=1e-12)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_attention_is_the_weighted_mean_that_its_definition_says():
    rng = np.random.default_rng(0)
    B, S, H, K, D = 2, 5, 4, 2, 3
    query, key, value = (rng.standard_normal((B, S, n, D)) for n in (H, K, K))
    got = np.asarray(oracle.attend(*map(jnp.asarray, (query, key, value))))
    for b, s, h in np.ndindex(B, S, H):
        group = {0: 0, 1: 0, 2: 1, 3: 1}[h]
        scores = [query[b, s, h] @ key[b, t, group] / 3**0.5 for t in range(s + 1)]
        weight = np.exp(scores)
        want = (weight / weight.sum()) @ value[b, : s + 1, group]
        np.testing.assert_allclose(got[b, s, h], want, rtol=1e-12, atol=1e-14)


def test_grouped_queries_equal_all_heads_with_repeated_keys_and_values():
    grouped = config("llama", kv_heads=2)
    full = config("llama", kv_heads=4)
    params = oracle.init_params(grouped, 1)
    repeated = oracle.unflatten(oracle.flatten(params))
    attention = repeated["blocks"]["attention"]
    for name in ("key", "value"):
        attention[name] = np.repeat(attention[name], 2, axis=2)
    data = batch(grouped)
    value, grads, _ = oracle.value_and_grad(params, data, grouped)
    full_value, full_grads, _ = oracle.value_and_grad(repeated, data, full)
    assert full_value == pytest.approx(value, rel=1e-13)
    for path, grad in oracle.flatten(grads).items():
        other = oracle.flatten(full_grads)[path]
        if path.endswith(("/key", "/value")):  # a shared head gets the sum over its copies
            L, E, K, D = grad.shape
            other = other.reshape(L, E, K, 2, D).sum(axis=3)
        np.testing.assert_allclose(other, grad, rtol=1e-10, atol=1e-14, err_msg=path)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@both_styles
def test_the_loss_is_the_cross_entropy_of_scipy(cfg, z_loss):
    params, data = oracle.init_params(cfg, 1), batch(cfg)
    scores = np.asarray(oracle.logits(params, data["tokens"], cfg))
    want, count = 0.0, 0
    for row, place in np.ndindex(data["targets"].shape):
        target = data["targets"][row, place]
        if target != -100:
            want -= log_softmax(scores[row, place])[target]
            want += z_loss * logsumexp(scores[row, place]) ** 2
            count += 1
    total, weight = oracle.loss(params, data, cfg, z_loss)
    assert float(total) == pytest.approx(want, rel=1e-13)
    assert int(weight) == count > 0


def test_norms_have_their_closed_forms():
    rng = np.random.default_rng(0)
    x, scale, bias = rng.standard_normal((5, 7)) * 3 + 1, *rng.standard_normal((2, 7))
    np.testing.assert_allclose(
        oracle.rms_norm(jnp.asarray(x), scale, 1e-3),
        x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale,
        rtol=1e-13,
    )
    np.testing.assert_allclose(
        oracle.layer_norm(jnp.asarray(x), scale, bias, 1e-3),
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * scale + bias,
        rtol=1e-12,
        atol=1e-14,
    )


def test_a_one_layer_model_without_attention_output_is_its_mlp():
    """With attention/out at zero a block is its mlp, which jax.nn knows."""
    for style, activation in (
        ("llama", lambda y, p: jax.nn.silu(y @ p["gate"][0]) * (y @ p["up"][0])),
        ("gpt2", lambda y, p: jax.nn.gelu(y @ p["up"][0] + p["up_bias"][0], approximate=True)),
    ):
        cfg = config(style, layers=1)
        params = oracle.init_params(cfg, 1)
        params["blocks"]["attention"]["out"] *= 0
        tokens = batch(cfg)["tokens"]
        x, p = params["embed"]["tokens"][tokens], params["blocks"]["mlp"]

        def norm(x, scale, bias=None, cfg=cfg):
            if bias is None:
                return oracle.rms_norm(x, scale, cfg.norm_eps)
            return oracle.layer_norm(x, scale, bias, cfg.norm_eps)

        def first(tree):
            return {name: leaf[0] for name, leaf in tree.items()}

        if style == "gpt2":
            x = x + params["embed"]["positions"][: tokens.shape[1]]
            x = x + params["blocks"]["attention"]["out_bias"][0]
        y = activation(norm(x, **first(params["blocks"]["mlp_norm"])), p) @ p["down"][0]
        x = x + y + (p["down_bias"][0] if style == "gpt2" else 0)
        x = norm(x, **params["final_norm"])
        want = x @ (params["embed"]["tokens"].T if cfg.tied else params["head"]["kernel"])
        np.testing.assert_allclose(oracle.logits(params, tokens, cfg), want, rtol=1e-11, atol=1e-13)


@both_styles
def test_no_valid_target_gives_loss_and_gradient_zero(cfg):
    data = oracle.batch_of(cfg, 0, 3, 8, valid=lambda row: 0)
    value, grads, norm = oracle.value_and_grad(oracle.init_params(cfg, 1), data, cfg)
    assert value == 0
    assert norm == 0
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(grads))


def test_adamw_is_the_one_of_optax_with_a_mask():
    cfg = CONFIGS[0]
    params = oracle.init_params(cfg, 1)
    decay = [path for path in oracle.flatten(params) if not path.endswith("scale")]
    assert 0 < len(decay) < len(oracle.flatten(params))
    mask = oracle.unflatten({path: path in decay for path in oracle.flatten(params)})
    schedule = optax.linear_schedule(1e-2, 1e-3, 4)
    theirs = optax.adamw(schedule, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3, mask=mask)

    mine, expected, state = params, params, theirs.init(params)
    mu = nu = jax.tree.map(np.zeros_like, params)
    count = 0
    for step in range(5):
        grads = oracle.init_params(cfg, 100 + step)
        rate = float(schedule(jnp.int32(step)))  # int32 / int is float32, also with x64 on
        mine, mu, nu, count = oracle.adamw(
            mine, grads, mu, nu, count, rate, 0.8, 0.95, 1e-6, 0.3, decay
        )
        updates, state = theirs.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
    assert count == 5
    want = {"params": expected, "mu": state[0].mu, "nu": state[0].nu}
    for (path, got), leaf in zip(
        oracle.flatten({"params": mine, "mu": mu, "nu": nu}).items(),
        oracle.flatten(want).values(),
        strict=True,
    ):
        np.testing.assert_allclose(got, leaf, rtol=1e-12, atol=1e-14, err_msg=path)


def test_a_decay_path_that_is_no_parameter_is_refused():
    cfg = CONFIGS[0]
    params = oracle.init_params(cfg, 1)
    with pytest.raises(KeyError, match="embed/token'"):
        oracle.adamw(params, params, params, params, 0, 1e-3, decay=["embed/token"])


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_the_one_of_optax(limit):
    grads = oracle.init_params(CONFIGS[0], 1)
    got = oracle.clip(grads, oracle.global_norm(grads), limit)
    want, _ = optax.clip_by_global_norm(limit).update(grads, optax.EmptyState())
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)


def test_a_run_learns_and_reports_the_norm_before_clipping():
    cfg = CONFIGS[0]
    params, data = oracle.init_params(cfg, 1), batch(cfg)
    run = oracle.run(params, [data] * 30, cfg, lr=1e-2, clip_norm=0.1)
    first, _, norm = oracle.value_and_grad(params, data, cfg)
    assert (run.losses[0], run.grad_norms[0]) == (first, norm)
    assert run.losses[-1] < run.losses[0] - 1
    assert norm > 0.1
    assert run.count == 30
    assert run.skipped == 0


def test_a_skipped_batch_is_no_update():
    cfg = CONFIGS[0]
    params, data = oracle.init_params(cfg, 1), batch(cfg)
    empty = data | {"targets": np.full_like(data["targets"], -100)}
    rates = []

    def lr(count):
        rates.append(count)
        return 1e-2

    with_empty = oracle.run(params, [data, empty, data], cfg, lr=lr)
    without = oracle.run(params, [data, data], cfg, lr=1e-2)
    assert rates == [0, 1]
    assert with_empty.skipped == 1
    assert with_empty.count == without.count == 2
    assert with_empty.losses[1] == 0
    for a, b in zip(jax.tree.leaves(with_empty[3:]), jax.tree.leaves(without[3:]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_batches_have_unequal_numbers_of_valid_targets():
    cfg = CONFIGS[0]
    valid = np.sum(oracle.batch_of(cfg, 0, 16, 16)["targets"] != -100, axis=1)
    assert len(set(valid)) > 4
    assert valid.min() >= 1
    chosen = oracle.batch_of(cfg, 0, 4, 16, valid=[3, 16, 1, 9].__getitem__)
    assert list(np.sum(chosen["targets"] != -100, axis=1)) == [3, 16, 1, 9]
