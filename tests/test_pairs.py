"""The committed covering matrix holds every pair, and is what its generator gives."""

import itertools

import pairs
import pytest

pytestmark = pytest.mark.core

# What the promise "same numbers everywhere" names; pairs.py may add factors and values, not drop
# one of these.
PROMISED = {
    "mesh": {"1", "8x1", "4x2", "2x4", "1x8", "replica=2,data=2,model=2"},
    "zero": {"0", "1", "2", "3"},
    "microbatches": {"1", "4"},
    "remat": {"none", "full"},
    "tied": {"True", "False"},
    "style": {"llama", "gpt2"},
}


def missing_pairs(rows):
    """Every (factor, value, factor, value) that can exist and stands in no row."""
    return [
        (a, value_a, b, value_b)
        for a, b in itertools.combinations(pairs.FACTORS, 2)
        for value_a, value_b in itertools.product(pairs.FACTORS[a], pairs.FACTORS[b])
        if pairs.allowed({a: value_a, b: value_b})
        and not any(row[a] == value_a and row[b] == value_b for row in rows)
    ]


def test_every_pair_of_values_of_two_factors_is_in_the_committed_matrix():
    assert missing_pairs(pairs.read()) == []


def test_a_pair_that_stands_in_one_row_only_is_missed_when_that_row_goes():
    rows = pairs.read()
    zero_3_on_8x1 = [row for row in rows if (row["mesh"], row["zero"]) == ("8x1", "3")]
    assert len(zero_3_on_8x1) == 1
    rows.remove(zero_3_on_8x1[0])
    assert ("mesh", "8x1", "zero", "3") in missing_pairs(rows)


def test_the_committed_matrix_is_what_the_generator_gives():
    assert pairs.CSV.read_text() == pairs.text(pairs.generate()), (
        "run python tests/pairs.py --write"
    )


def test_every_promised_factor_and_value_is_there():
    for factor, values in PROMISED.items():
        assert values <= set(pairs.FACTORS[factor]), factor


def test_no_row_is_impossible_or_twice_there():
    rows = pairs.read()
    assert all(pairs.allowed(row) for row in rows)
    assert len({tuple(row.items()) for row in rows}) == len(rows)


def test_an_unknown_argument_is_bad_usage(capsys):
    assert pairs.main(["--wirte"]) == 2
    assert "usage" in capsys.readouterr().err
