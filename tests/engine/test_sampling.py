"""Sampling: greedy, temperature, nucleus; a token depends on seed, index and logits alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.sampling import NUCLEUS_TOKENS, SEED_MAX, check, choose, choose_many
from engine.model.request import Sampling
from kvstore.errors import InvalidRequest

LOGITS = torch.tensor([0.0, 2.0, 1.0, 2.0, -math.inf, -1.0])

rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12)
seeds = st.integers(0, SEED_MAX)
indexes = st.integers(0, 2**32)
temperatures = st.floats(0.01, 5)
shares = st.floats(0.01, 1)


def probabilities(logits: torch.Tensor, temperature: float) -> np.ndarray:
    return torch.softmax(logits.double() / temperature, dim=-1).numpy()


def frequencies(logits: torch.Tensor, sampling: Sampling, draws: int) -> np.ndarray:
    drawn = [choose(logits, sampling, index) for index in range(draws)]
    return np.bincount(drawn, minlength=len(logits)) / draws


def test_temperature_0_takes_the_largest_and_of_equal_ones_the_lowest_id():
    assert choose(LOGITS, Sampling(), 0) == 1
    assert choose(torch.zeros(9), Sampling(), 5) == 0
    assert choose(LOGITS, Sampling(top_p=0.1, seed=7), 3) == 1


@given(rows, seeds, indexes, temperatures, shares)
def test_a_token_is_the_same_whenever_and_wherever_it_is_drawn(values, seed, index, temperature, top_p):
    logits = torch.tensor(values)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    token = choose(logits, sampling, index)
    assert 0 <= token < len(values)
    assert choose(logits.clone(), sampling, index) == token
    others = (Sampling(), sampling, dataclasses.replace(sampling, seed=seed ^ 1))
    assert choose_many(torch.stack((logits, logits, logits)), others, (0, index, index))[1] == token


@given(rows, temperatures, shares, seeds)
def test_what_is_drawn_is_in_the_smallest_set_that_holds_top_p(values, temperature, top_p, seed):
    logits = torch.tensor(values)
    shares_of = probabilities(logits, temperature)
    token = choose(logits, Sampling(temperature=temperature, top_p=top_p, seed=seed), 0)
    heavier = shares_of[shares_of > shares_of[token]].sum()
    assert heavier < top_p + 1e-9, "without it, those above it would be enough"


def test_a_seed_and_an_index_each_change_what_is_drawn():
    flat = torch.zeros(1000)
    by_index = {choose(flat, Sampling(temperature=1.0), index) for index in range(100)}
    by_seed = {choose(flat, Sampling(temperature=1.0, seed=seed), 0) for seed in range(100)}
    assert len(by_index) > 85 and len(by_seed) > 85
    assert [choose(flat, Sampling(temperature=1.0, seed=1), index) for index in range(4)] == [303, 900, 408, 736]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_the_softmax_at_that_temperature(temperature):
    seen = frequencies(LOGITS, Sampling(temperature=temperature, seed=3), 4000)
    # 4 standard deviations of the most uncertain share.
    assert np.abs(seen - probabilities(LOGITS, temperature)).max() < 4 * 0.5 / math.sqrt(4000)
    assert seen[4] == 0


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.floats(0.05, 8), shares)
def test_a_large_vocabulary_gives_what_sorting_all_of_it_gives(seed, width, top_p):
    logits = torch.randn(3 * NUCLEUS_TOKENS, generator=torch.Generator().manual_seed(seed)) * width
    logits = logits.round(decimals=1)  # with ties
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=seed)
    weights = np.exp(logits.numpy().astype(np.float64) - float(logits.max()))
    order = np.argsort(-weights, kind="stable")
    nucleus = order[: int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1]
    for index in range(5):
        token = choose(logits, sampling, index)
        assert token in nucleus or math.isclose(weights[token], weights[nucleus[-1]])
    shifted = torch.full_like(logits, -math.inf)
    shifted[nucleus] = logits[nucleus]
    assert choose(shifted, dataclasses.replace(sampling, top_p=1.0), 0) in nucleus


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.5, True, None]),
        ("temperature", [-0.1, math.nan, math.inf, "1", None, False]),
        ("top_p", [0, 0.0, -1, 1.01, math.nan, None]),
        ("seed", [-1, SEED_MAX + 1, 0.5, True]),
        ("stop", ["END", ("",), ("a",) * 17, ("x" * 257,), (b"end",), None]),
    ],
)
def test_what_means_nothing_is_refused_by_its_field(field, values):
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            check(Sampling(**{field: value}))
        assert caught.value.field == f"sampling.{field}", value
