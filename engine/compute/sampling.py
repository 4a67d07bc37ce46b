"""How a token is chosen from logits. Token ``index`` depends only on the seed, the index and the logits: there is no
state to move when a decode continues elsewhere.
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
# The nucleus is searched among this many tokens first, then among 8 times as many: sorting 100 k takes 20 ms.
NUCLEUS_TOKENS = 1024


def check(sampling: Sampling) -> None:
    """Refuse invalid settings.

    Raises:
        InvalidRequest: names the field, as "sampling.top_p".
    """
    _require(_whole(sampling.max_tokens) and sampling.max_tokens >= 1, "max_tokens", "must be an integer, 1 or more")
    _require(
        _real(sampling.temperature) and sampling.temperature >= 0, "temperature", "must be a finite number, 0 or more"
    )
    _require(_real(sampling.top_p) and 0 < sampling.top_p <= 1, "top_p", "must be above 0 and at most 1")
    _require(_whole(sampling.seed) and 0 <= sampling.seed <= SEED_MAX, "seed", f"must be an integer in 0..{SEED_MAX}")
    stop = sampling.stop
    _require(isinstance(stop, tuple | list), "stop", "must be a sequence of strings, not one string")
    _require(len(stop) <= STOP_STRINGS_MAX, "stop", f"{len(stop)} strings; at most {STOP_STRINGS_MAX}")
    for text in stop:
        _require(isinstance(text, str) and text != "", "stop", "each must be a string of one character or more")
        _require(len(text) <= STOP_CHARS_MAX, "stop", f"one has {len(text)} characters; at most {STOP_CHARS_MAX}")


def choose(logits: torch.Tensor, sampling: Sampling, index: int) -> int:
    """The token that follows, from ``logits [vocab]``; ``index`` 0 is the first token of the answer."""
    return choose_many(logits.unsqueeze(0), (sampling,), (index,))[0]


def choose_many(logits: torch.Tensor, samplings: Sequence[Sampling], indexes: Sequence[int]) -> list[int]:
    """A token for each row of ``logits [n, vocab]``; among equal ones the lowest id wins. No row affects another."""
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        chosen = logits if len(drawn) == len(tokens) else logits[drawn]
        on_host = chosen.detach().to(device="cpu", dtype=torch.float32).numpy()
        for row, values in zip(drawn, on_host, strict=True):
            tokens[row] = _draw(values, samplings[row], indexes[row])
    return tokens


def _draw(logits: npt.NDArray[np.float32], sampling: Sampling, index: int) -> int:
    # The difference first: with a temperature of almost 0 the quotients overflow to -inf, the largest stays 0.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    ids = _nucleus(weights, sampling.top_p) if sampling.top_p < 1 else np.arange(len(weights))
    cumulative = np.cumsum(weights[ids])
    place = int(np.searchsorted(cumulative, _uniform(sampling.seed, index) * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """The smallest set of token ids with ``top_p`` of the weight, heaviest first, equal ones by id (Holtzman et al.,
    "The Curious Case of Neural Text Degeneration", 2020, section 3.1).
    """
    enough = top_p * weights.sum()
    ids = np.arange(len(weights))
    count = NUCLEUS_TOKENS
    while count < len(weights):
        heavy = np.flatnonzero(weights >= np.partition(weights, -count)[-count])
        if weights[heavy].sum() >= enough:
            ids = heavy
            break
        count *= 8
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    return ids[: int(np.searchsorted(np.cumsum(weights[ids]), enough, side="left")) + 1]


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1): the ``index``-th block of Philox keyed by ``seed``, whose bits NumPy keeps the same over
    versions.
    """
    raw = np.random.Philox(key=seed, counter=index).random_raw()
    return float(int(raw) >> 11) * 2.0**-53


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, field: str, reason: str) -> None:
    if not condition:
        raise InvalidRequest(f"sampling.{field}", reason)
