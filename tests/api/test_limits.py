"""Limits: two owners at full load have equal parts of everything, a third finds some, and strangers give way."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

import pytest

from kvstore.errors import TooManyCalls
from kvstore.limits import (
    DATA_PART,
    DESCRIPTORS_KEPT,
    LEAVING_MAX,
    Connections,
    Guest,
    Shares,
    ThreadShares,
    connections_max,
    network_of,
)
from tests.helpers.processes import wait_until


@dataclass(frozen=True)
class Caller:
    name: str
    operator: bool = False


A, B, C = Caller("a"), Caller("b"), Caller("c")
OPERATOR = Caller("op", operator=True)
TOTALS = (4, 8, 16, 256, 1000)


def assert_fair(counts: Counter[str]) -> None:
    """Two tenants at full load have from 40 % to 60 % each."""
    assert 0.4 <= counts["a"] / (counts["a"] + counts["b"]) <= 0.6, counts


@pytest.mark.parametrize("total", TOTALS)
def test_two_owners_that_keep_what_they_get_have_equal_parts(total: int) -> None:
    shares, counts = Shares("places", "places", total), Counter[str]()
    for owner in (A, B):  # one after the other: the first could have everything
        while shares.take_now(1, owner):
            counts[owner.name] += 1
    assert_fair(counts)
    assert counts.total() >= 0.75 * total


@pytest.mark.parametrize("total", [each for each in TOTALS if each >= 8])
def test_a_third_owner_finds_some_and_has_its_part_once_others_end(total: int) -> None:
    shares, counts = Shares("places", "places", total), Counter[str]()
    for owner in (A, B, C):
        while shares.take_now(1, owner):
            counts[owner.name] += 1
    assert counts["c"] >= 1
    for _ in range(total):  # a and b go on, c wants more: what ends is given to whoever has less
        for owner in (A, B):
            shares.give(1, owner)
            counts[owner.name] -= 1
            for next_one in (owner, C):
                counts[next_one.name] += shares.take_now(1, next_one)
    assert max(counts.values()) - min(counts.values()) <= max(2, total // 16), counts


def test_an_operator_that_is_alone_has_everything() -> None:
    shares = Shares("places", "places", 256)
    assert sum(shares.take_now(1, OPERATOR) for _ in range(300)) == 256
    shares.give(1, OPERATOR)
    assert shares.take_now(1, A) and not shares.take_now(1, OPERATOR)


def test_turns_go_by_the_time_that_they_take() -> None:
    """Tenant b's turns take five times as long as those of a."""

    async def test() -> None:
        shares, used = Shares("threads", "threads", 1), Counter[str]()

        async def work(owner: Caller, cost: int) -> None:
            while used.total() < 1000:
                await shares.take(1, 60.0, owner)
                await asyncio.sleep(0)
                used[owner.name] += cost
                shares.give(1, owner, cost)

        async with asyncio.timeout(60):
            await asyncio.gather(*(work(owner, cost) for owner, cost in [(A, 1)] * 3 + [(B, 5)] * 20))
        assert_fair(used)

    asyncio.run(test())


def test_an_owner_that_was_idle_has_no_credit() -> None:
    async def test() -> None:
        shares, order = Shares("threads", "threads", 1), list[str]()
        for _ in range(100):  # a was alone for a while
            await shares.take(1, 1.0, A)
            shares.give(1, A, 1.0)
        await shares.take(1, 1.0, OPERATOR)

        async def step(owner: Caller) -> None:
            await shares.take(1, 60.0, owner)
            order.append(owner.name)
            shares.give(1, owner, 1.0)

        steps = [asyncio.create_task(step(owner)) for owner in [A, B] * 10]
        await asyncio.sleep(0)
        shares.give(1, OPERATOR, 0.0)
        await asyncio.gather(*steps)
        assert_fair(Counter(order[:10]))

    asyncio.run(test())


def test_a_request_that_holds_some_is_before_one_that_needs_all() -> None:
    """Else each of them would wait for the other, and both would be refused."""

    async def test() -> None:
        shares = Shares("buffers", "buffers", 16)
        assert [await shares.take(1, 0.0, OPERATOR) for _ in range(2)] == [1, 1]
        whole = asyncio.create_task(shares.take(16, 60.0, OPERATOR))
        await asyncio.sleep(0)
        assert await shares.take(16, 0.0, OPERATOR, mine=1) == 13  # what fits is had at once
        second = asyncio.create_task(shares.take(16, 60.0, OPERATOR, mine=1))
        await asyncio.sleep(0)
        shares.give(14, OPERATOR)
        assert await second == 13 and not whole.done()
        shares.give(14, OPERATOR)
        assert await whole == 16

    asyncio.run(test())


def test_threads_of_two_tenants_share_the_time_of_a_lock() -> None:
    turns, used, stop = ThreadShares("turns", "turns", 1), Counter[str](), threading.Event()
    had = Counter[str]()  # turns
    before: list[int] = []  # turns of b between a's call and its turn

    def work(owner: Caller, seconds: float) -> None:
        while not stop.is_set():
            asked = had["b"]
            try:
                with turns.turn(owner, 60.0):
                    began_s = time.monotonic()
                    if owner is A:
                        before.append(had["b"] - asked)
                    time.sleep(seconds)
                    used[owner.name] += int(1e6 * (time.monotonic() - began_s))
                    had[owner.name] += 1
            except TooManyCalls:
                return

    threads = [threading.Thread(target=work, args=each) for each in [(A, 0.002)] + [(B, 0.01)] * 30]
    threads += [threading.Thread(target=work, args=(A, 0.002)) for _ in range(7)]  # so that one always waits
    for thread in threads:
        thread.start()
    wait_until("there is enough to judge by", lambda: had.total() >= 400)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert_fair(used)
    assert sorted(before)[len(before) // 2] < 15, "b's 30 threads are before a"


def test_a_slow_holder_is_cut_for_one_that_waits() -> None:
    turns, cut, holds = ThreadShares("turns", "turns", 1), threading.Event(), threading.Event()

    class Slow:
        def late(self) -> bool:
            return True

        def cut(self) -> None:
            cut.set()

    def hold() -> None:
        with turns.turn(A, 1.0, Slow()):
            holds.set()
            assert cut.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(60)
    time.sleep(0.1)
    assert not cut.is_set(), "as long as nobody waits"
    with turns.turn(B, 60.0):
        pass
    thread.join(60)
    with turns.turn(A, 60.0), pytest.raises(TooManyCalls), turns.turn(B, 0.05):
        pass


# --- connections ------------------------------------------------------------------------------------------------------


class Open:
    """Connections that are there until they are dropped."""

    def __init__(self, total: int) -> None:
        self.connections = Connections(total)
        self.dropped: list[int] = []
        self.guests: list[Guest | None] = []

    def accept(self, address: str) -> Guest | None:
        number = len(self.guests)
        guest = self.connections.accept(address, lambda: self.drop(number))
        self.guests.append(guest)
        return guest

    def drop(self, number: int) -> None:
        self.dropped.append(number)
        guest = self.guests[number]
        assert guest is not None
        self.connections.remove(guest)


def test_the_oldest_stranger_of_the_largest_network_gives_way() -> None:
    made = Open(6)
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.3"):
        assert made.accept(address)
    made.accept("10.0.0.4")
    made.accept("10.0.0.5")
    assert made.dropped in ([1, 0], [1, 2]), made.dropped
    assert len(made.connections) == 6


def test_known_callers_are_never_dropped_and_leave_room_for_others() -> None:
    made = Open(12)
    known = 0
    for _ in range(12):
        guest = made.accept("10.0.0.1")
        assert guest is not None
        try:
            made.connections.identify(guest, OPERATOR)
            known += 1
        except TooManyCalls:
            pass
    assert known == 8 and not made.dropped
    for _ in range(100):
        assert made.accept("10.0.0.1")
    assert not any(
        guest is not None and guest.owner is not None for guest in map(made.guests.__getitem__, made.dropped)
    )
    assert len(made.connections) == 12


def test_two_tenants_have_equal_parts_of_the_connections() -> None:
    made, counts = Open(384), Counter[str]()
    for owner in (A, B):
        for _ in range(384):
            guest = made.accept("10.0.0.1")
            assert guest is not None
            try:
                made.connections.identify(guest, owner)
                counts[owner.name] += 1
            except TooManyCalls:
                made.connections.remove(guest)
    assert_fair(counts)
    guest = made.accept("10.0.0.1")
    assert guest is not None
    made.connections.identify(guest, C)


def test_connections_that_do_not_end_when_dropped_are_bounded() -> None:
    connections = Connections(16)
    taken = sum(connections.accept("10.0.0.1", lambda: None) is not None for _ in range(1000))
    assert taken <= 16 + LEAVING_MAX + 1


def test_one_machine_is_one_network() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("") == ""


# --- descriptors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [1024, 4096])
def test_a_process_raises_its_descriptors_and_derives_connections(hard: int) -> None:
    code = (
        "from kvstore import limits; print(limits.raise_descriptors(), limits.connections_max(limits.DATA_PART, 9999))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stdout.split() == [str(hard), str(int(DATA_PART * (hard - DESCRIPTORS_KEPT)))]


def test_few_connections_are_wanted_few_there_are() -> None:
    assert connections_max(DATA_PART, 5) == 5
