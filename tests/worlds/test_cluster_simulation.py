"""A pool of nodes that come, go, stand still and are cut off, over a network that loses messages: a seed, a history.

Thousands of them: ``python -m tests.helpers.worlds.cluster_world 0 5000``; one again, with its schedule: the same with
its number alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvstore.state.announcing import Announcing
from kvstore.state.directory import GONE, TIERS, Directory
from tests.helpers.worlds.cluster_node import SimNode
from tests.helpers.worlds.cluster_world import play

SEEDS = 50
BATCHES = 6


@pytest.mark.parametrize("batch", range(BATCHES))
def test_after_any_faults_all_that_is_there_is_found(batch: int) -> None:
    """And whatever is found before that is right: an entry of the directory is a hint."""
    seen: Counter[str] = Counter()
    for seed in range(batch, SEEDS, BATCHES):
        seen += play(seed).counts
    assert min(seen[each] for each in ("again", "misled", "die", "join", "daemon", "server", "stall", "cut")) > 5, seen
    assert seen["dumps"] > 100 and seen["lost events"] > 0


def takes_in_what_comes_late(self: Directory, batch: Any, told: Callable[..., int] = Directory.told) -> int:
    stream = next((each for each in self._streams.get(batch.node, []) if each.number == batch.stream), None)
    if stream is not None and batch.number < stream.next:
        self._change(stream, batch)
    return told(self, batch)


def never_ends_an_entry(self: Directory, batch: Any, told: Callable[..., int] = Directory.told) -> int:
    return told(
        self,
        replace(
            batch, fingerprints=batch.fingerprints[batch.marks & GONE == 0], marks=batch.marks[batch.marks & GONE == 0]
        ),
    )


def goes_on_where_it_is_not_known(
    self: Announcing, name: str, sent: Any, wanted: int, answered: Any = Announcing.answered
) -> None:
    answered(self, name, sent, sent.number + 1 if wanted == -1 else wanted)


def tells_all_again(self: Announcing, pages: Any, dumped: Any = Announcing.dumped) -> None:
    self.lost()
    dumped(self, pages)


def serves_by_the_entry(self: SimNode, keys: list[bytes]) -> list[bytes]:
    """As if what the directory knows of a page named it."""
    named = {key[2:8]: key for key, _ in self.has}
    served: list[bytes] = []
    for key in keys:
        if key[2:8] not in named:
            break
        served.append(key if any((key, tier) in self.has for tier in TIERS) else named[key[2:8]])
    return served


@pytest.mark.parametrize(
    ("kind", "method", "broken"),
    [
        (Directory, "told", takes_in_what_comes_late),
        (Directory, "told", never_ends_an_entry),
        (Announcing, "answered", goes_on_where_it_is_not_known),
        (Announcing, "dumped", tells_all_again),
        (SimNode, "read", serves_by_the_entry),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_checks_can_fail(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, broken: Any) -> None:
    """Each of these mistakes is seen by one of the first seeds."""
    monkeypatch.setattr(kind, method, broken)
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(60):
            play(seed)
