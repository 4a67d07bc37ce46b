"""Retention: what a hint says, in seven bits, and which pages a range of tokens means."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.replica import hint_in, position_of, standing, standing_of, turns_of
from kvstore.model.retention import HINTS, Retention, hints_of, priority_of, ranges_of, ttl_s_of


@pytest.mark.parametrize("priority", range(-3, 4))
def test_a_hint_says_what_went_in(priority: int) -> None:
    assert priority_of(Retention(priority).hint) == priority and ttl_s_of(Retention(priority).hint) is None
    if priority:
        for ttl_s, rounded in ((0.1, 4), (4, 4), (4.5, 8), (300, 512), (512, 512), (65536, 65536)):
            hint = Retention(priority, ttl_s).hint
            assert 0 < hint < HINTS and (priority_of(hint), ttl_s_of(hint)) == (priority, rounded)


def test_a_record_keeps_it_beside_what_it_kept_before() -> None:
    for hint in range(HINTS):
        info = 1 | 1 << 48 | standing(65535, 255, hint)  # bytes of the page, and the flag of its checksums
        assert (hint_in(info), position_of(info), turns_of(info), info >> 48 & 1) == (hint, 65535, 255, 1)
        assert standing_of(info) == standing(65535, 255, hint)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ((4,), "priority"),
        ((-4,), "priority"),
        ((1.0,), "priority"),
        ((True,), "priority"),
        ((1, 0), "ttl_s"),
        ((1, -1), "ttl_s"),
        ((1, 65537), "ttl_s"),
        ((1, float("nan")), "ttl_s"),
        ((1, "4"), "ttl_s"),
        ((0, 4), "ttl_s"),
        ((1, None, -1), "start"),
        ((1, None, 5, 5), "stop"),
        ((1, None, 0, 2.0), "stop"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(given: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Retention(*given)
    assert refused.value.field == field


def test_a_page_takes_the_range_of_its_last_token() -> None:
    high, low = Retention(3, stop=1000), Retention(-3, start=1000)
    hints = hints_of([high, low], 20, 64)
    assert hints == bytes([high.hint]) * 15 + bytes([low.hint]) * 5
    assert hints_of([low, high], 20, 64) == hints and hints_of(Retention(0), 20, 64) == b"" == hints_of([], 20, 64)
    assert hints_of([high, Retention(1, start=0, stop=64)], 2, 64) == bytes([Retention(1).hint, high.hint])
    for start in range(130):
        for stop in range(start + 1, 131):
            last = [start <= page * 64 + 63 < stop for page in range(3)]
            assert list(hints_of(Retention(1, start=start, stop=stop), 3, 64)) == (last if any(last) else [])


def test_ranges_of_whole_pages_say_the_same() -> None:
    said = [Retention(2, 60, stop=128), Retention(-1, start=192), Retention(3, start=256, stop=320)]
    hints = hints_of(said, 9, 64)
    assert hints_of(ranges_of(hints, 64), 9, 64) == hints and ranges_of(b"", 64) == []
