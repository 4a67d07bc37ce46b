"""What the trace generators share: bounds of their arguments, lengths drawn from distributions, blocks of a prompt."""

from __future__ import annotations

from math import exp

import numpy as np

from engine.simulator.trace import BLOCK_TOKENS
from kvstore.errors import InvalidRequest

RATE_MIN, RATE_MAX = 1e-6, 1e6


def check(name: str, value: float, least: float, most: float = 2**53) -> None:
    """Refuse a number out of range.

    Raises:
        InvalidRequest: it is, and the field is ``name``.
    """
    if not least <= value <= most:  # written so that NaN is refused
        raise InvalidRequest(name, f"must be between {least:g} and {most:g}, is {value}")


def check_arguments(requests: int, rate: float, seed: int) -> None:
    """Refuse what no generator can make a trace of."""
    check("requests", requests, 0)
    check("rate", rate, RATE_MIN, RATE_MAX)
    check("seed", seed, 0)


def lognormal(random: np.random.Generator, mean: float, sigma: float) -> int:
    """At least 1; ``mean`` is that of the distribution, not of its logarithm."""
    return 1 + int(mean * exp(-sigma * sigma / 2) * random.lognormal(0, sigma))


def gamma(random: np.random.Generator, mean: float, shape: float) -> int:
    """At least 1."""
    return 1 + int(random.gamma(shape, mean / shape))


def blocks_of(tokens: int) -> int:
    """Blocks that hold this many tokens; the last may be partial."""
    return -(-tokens // BLOCK_TOKENS)
