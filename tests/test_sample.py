"""Sampling: fixed context, one compilation, frequencies that follow the softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.sample import generate


def successor(tokens):
    """A model that is sure of last token + 1, modulo 10."""
    return 1000.0 * jax.nn.one_hot((tokens[:, -1] + 1) % 10, 10)


def test_follows_the_model_and_compiles_once() -> None:
    logits = jax.jit(successor)
    out = generate(logits, np.array([3, 4, 5]), 12, temperature=1.0)
    assert out.tolist() == [6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7]
    assert logits._cache_size() == 1


def test_the_context_is_the_last_tokens_of_prompt_and_output() -> None:
    seen = []

    def logits(tokens):
        seen.append(tokens[0].tolist())
        return successor(jnp.asarray(tokens))

    generate(logits, np.array([1, 2, 3]), 3)
    assert seen == [[1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_frequencies_follow_the_softmax_at_a_temperature() -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.7]]))
    out = generate(lambda tokens: logits, np.array([0]), 4000, temperature=2.0)
    expected = np.sqrt([0.1, 0.2, 0.7])
    expected /= expected.sum()
    # Standard error of a frequency is at most 0.008 here.
    np.testing.assert_allclose(np.bincount(out, minlength=3) / 4000, expected, atol=0.03)


def test_temperature_zero_is_the_likeliest_and_a_seed_repeats() -> None:
    logits = np.array([[0.0, 0.1, 0.05]])
    assert set(generate(lambda t: logits, np.array([0]), 20, temperature=0.0).tolist()) == {1}
    one, same, other = (
        generate(lambda t: logits, np.array([0]), 50, seed=seed).tolist() for seed in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize("prompt", [[], [[1, 2]]])
def test_a_prompt_is_one_dimension_with_a_token(prompt) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        generate(successor, np.array(prompt), 1)


@pytest.mark.parametrize("temperature", [-1.0, float("nan")])
def test_a_temperature_is_not_below_zero(temperature) -> None:
    with pytest.raises(ValueError, match="temperature"):
        generate(successor, np.array([1]), 1, temperature=temperature)
