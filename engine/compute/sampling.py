"""The choice of a token from logits.

Token ``index`` of an answer depends only on the seed, the index and the logits. So a sampler has no state, and none has
to be moved when another engine continues an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.model.request import Sampling
from kvstore.errors import InvalidRequest

SEED_MAX = 2**63 - 1
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 256
# `_nucleus` first sorts this many of the heaviest tokens, then 8 times as many, and so on: sorting 100 k takes 20 ms.
NUCLEUS_TOKENS = 1024


def check(sampling: Sampling) -> None:
    """Check that all settings are valid.

    Raises:
        InvalidRequest: a setting is invalid. The error has a field such as "sampling.top_p".
    """
    count, temperature, top_p = sampling.max_tokens, sampling.temperature, sampling.top_p
    seed, stop = sampling.seed, sampling.stop
    _require(_is_integer(count) and count >= 1, "max_tokens", f"must be an integer, 1 or more (got {count!r})")
    _require(
        _is_finite(temperature) and temperature >= 0,
        "temperature",
        f"must be a finite number, 0 or more (got {temperature!r})",
    )
    _require(_is_finite(top_p) and 0 < top_p <= 1, "top_p", f"must be above 0 and at most 1 (got {top_p!r})")
    _require(_is_integer(seed) and 0 <= seed <= SEED_MAX, "seed", f"must be an integer in 0..{SEED_MAX} (got {seed!r})")
    _require(isinstance(stop, tuple | list), "stop", f"must be a sequence of strings (got {type(stop).__name__})")
    _require(len(stop) <= STOP_STRINGS_MAX, "stop", f"must have at most {STOP_STRINGS_MAX} strings (got {len(stop)})")
    for text in stop:
        _require(isinstance(text, str) and text != "", "stop", "each must be a string of at least one character")
        _require(
            len(text) <= STOP_CHARS_MAX, "stop", f"each must have at most {STOP_CHARS_MAX} characters (got {len(text)})"
        )


def choose(logits: torch.Tensor, sampling: Sampling, index: int) -> int:
    """Choose token ``index`` of an answer from ``logits [vocab]``. The first token has index 0."""
    return choose_many(logits.unsqueeze(0), (sampling,), (index,))[0]


def choose_many(logits: torch.Tensor, samplings: Sequence[Sampling], indexes: Sequence[int]) -> list[int]:
    """Choose one token for each row of ``logits [n, vocab]``. Rows do not affect each other.

    At temperature 0 the token with the highest logit is chosen; among equal logits, the one with the lowest id.
    """
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()
    random_rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if random_rows:
        selection = logits if len(random_rows) == len(tokens) else logits[random_rows]
        on_host = selection.detach().to(device="cpu", dtype=torch.float32).numpy()
        for row, values in zip(random_rows, on_host, strict=True):
            tokens[row] = _draw(values, samplings[row], indexes[row])
    return tokens


def _draw(logits: npt.NDArray[np.float32], sampling: Sampling, index: int) -> int:
    # Subtract the maximum before dividing: at temperatures near 0 the other quotients overflow to -inf, and the largest
    # stays 0.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    ids = _nucleus(weights, sampling.top_p) if sampling.top_p < 1 else np.arange(len(weights))
    cumulative = np.cumsum(weights[ids])
    place = int(np.searchsorted(cumulative, _uniform(sampling.seed, index) * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Return the smallest set of token ids that has the share ``top_p`` of the total weight.

    The ids are sorted by weight, the heaviest first, and by id if weights are equal. See Holtzman et al., "The Curious
    Case of Neural Text Degeneration", 2020, section 3.1.
    """
    weight_min = top_p * weights.sum()
    ids = np.arange(len(weights))
    count = NUCLEUS_TOKENS
    while count < len(weights):
        heavy = np.flatnonzero(weights >= np.partition(weights, -count)[-count])
        if weights[heavy].sum() >= weight_min:
            ids = heavy
            break
        count *= 8
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    return ids[: int(np.searchsorted(np.cumsum(weights[ids]), weight_min, side="left")) + 1]


def _uniform(seed: int, index: int) -> float:
    """Return number ``index`` in [0, 1) of the sequence that ``seed`` defines.

    It is made from block ``index`` of Philox with key ``seed``. NumPy guarantees these bits for all its versions.
    """
    raw = np.random.Philox(key=seed, counter=index).random_raw()
    return float(int(raw) >> 11) * 2.0**-53


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, field: str, reason: str) -> None:
    if not condition:
        raise InvalidRequest(f"sampling.{field}", reason)
