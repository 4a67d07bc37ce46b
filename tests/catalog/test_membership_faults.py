"""Members of a pool while etcd is rotated, restarted, compacted and filled: they say what is wrong, and come back."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.cluster.catalog.base import boot_s
from kvstore.cluster.catalog.etcd_channel import EtcdChannel
from kvstore.cluster.catalog.schema import NodeEntry, new_process
from kvstore.cluster.membership import Membership
from tests.helpers.etcd_faults import FAULTS, FaultyEtcd
from tests.helpers.processes import wait_until

TTL_S = 2.0
WELL_S = 60.0
CALLS_PER_PAIR = 60  # of whoever breaks it, and of a member that joins and leaves
CALLS_PER_S_MAX = 40.0  # of two members, with their tasks, on average; one that spins makes thousands


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyEtcd]:
    made = FaultyEtcd(tmp_path_factory.mktemp("faulty"))
    try:
        yield made
    finally:
        made.close()


class Pool:
    """Two members that stay, and others that join later."""

    def __init__(self, faulty: FaultyEtcd) -> None:
        self._faulty = faulty
        self._names = itertools.count()
        self.members = [self.join(), self.join()]
        self.members[0].lead("first")

    def join(self) -> Membership:
        member = Membership(self._faulty.config(TTL_S))
        member.start(NodeEntry(name=f"n{next(self._names)}", process=new_process(), incarnation="00" * 8))
        return member

    def check_well(self) -> None:
        """A node that joins now is seen by both, tells them a change, and leaves; sessions live, the leader leads."""
        late = self.join()
        try:
            name = late.nodes()[-1].name
            self.wait(f"{name} is seen", lambda: all(self._lists(each, late) for each in self.members))
        finally:
            late.stop()
        self.wait("all are published", lambda: all(each.published for each in (*self.members, late)[:2]))
        self.wait("the leader leads", lambda: self.members[0].leading is not None)
        self.wait("all tasks work", lambda: not any(failing(each) for each in self.members))
        self.wait("who left is gone", lambda: not any(self._lists(each, late) for each in self.members))

    @staticmethod
    def _lists(member: Membership, other: Membership) -> bool:
        mine = {each.process for each in other.nodes()} - {each.process for each in member.nodes()}
        return not mine

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        try:
            wait_until(what, holds, WELL_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {[each.status() for each in self.members]}") from None

    def close(self) -> None:
        for each in self.members:
            each.stop()


def said(member: Membership, task: str, words: str) -> bool:
    """Whether that task is a fault, and these words are why."""
    return any(f"{task} has failed for" in each and words in each for each in member.fault().split("; membership"))


def failing(member: Membership) -> dict[str, str]:
    return {name: task["error"] for name, task in member.status().items() if name != "fault" and task["error"]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls and streams of all catalogs of this process."""
    counts: Counter[str] = Counter()
    for name in ("call", "stream"):
        monkeypatch.setattr(EtcdChannel, name, counting(getattr(EtcdChannel, name), counts, name))
    return counts


def counting(method: Callable[..., object], counts: Counter[str], name: str) -> Callable[..., object]:
    def counted(*args: object, **more: object) -> object:
        counts[name] += 1
        return method(*args, **more)

    return counted


@contextmanager
def none_spins(calls: Counter[str], asked: int = 0) -> Iterator[None]:
    """``asked``: calls that are made however fast it goes."""
    began_s, before = boot_s(), calls.total()
    yield
    made, took_s = calls.total() - before, boot_s() - began_s
    assert made < asked + CALLS_PER_S_MAX * took_s, f"{made} calls in {took_s:.0f} s: {calls}"


@pytest.mark.slow
def test_members_outlive_every_pair_of_faults_of_etcd(faulty: FaultyEtcd, calls: Counter[str]) -> None:
    """Both at the same time, in both orders: the second begins before the first is mended."""
    pool = Pool(faulty)
    try:
        pool.check_well()
        pairs = list(itertools.permutations(FAULTS, 2))
        with none_spins(calls, CALLS_PER_PAIR * len(pairs)):
            for first, second in pairs:
                for fault in (first, second):
                    faulty.break_(fault)
                for fault in (first, second):
                    faulty.mend(fault)
                pool.check_well()
    finally:
        pool.close()


@pytest.mark.slow
def test_members_say_what_is_wrong_for_as_long_as_it_lasts(
    faulty: FaultyEtcd, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In ``status``, and as a fault once it has lasted for ``catalog_ttl_s``; with one line in the log per task."""
    caplog.set_level(logging.INFO, "kvstore.cluster")
    pool = Pool(faulty)
    try:
        pool.check_well()
        for fault, task, words in (
            ("password", "watch", "refuses user 'kvstore'"),
            ("certificate", "watch", "CERTIFICATE_VERIFY_FAILED"),
            ("quota", "session", "quota is used up"),
        ):
            caplog.clear()
            faulty.break_(fault)
            # A restart forgets tokens. Sessions that ended meanwhile cannot be opened without space.
            faulty.outage(1.5 * TTL_S if fault == "quota" else 0.0)
            with none_spins(calls):
                for each in pool.members:
                    pool.wait(fault, lambda: said(each, task, words))  # noqa: B023
                    about = each.status()[task]
                    assert about["failing_s"] > TTL_S and about["succeeded_ago_s"] > TTL_S and about["failures"]
                    assert each.published or fault != "password", "etcd asks nobody who renews a session"
            for each in pool.members[1:]:
                each.update(replace(each.nodes()[1], version=fault))  # told when it is mended
            faulty.mend(fault)
            pool.check_well()
            assert not any(each.fault() for each in pool.members)
            pool.wait("the change", lambda: pool.members[0].nodes()[1].version == fault)  # noqa: B023
            lines = Counter(each.getMessage().partition(":")[0] for each in caplog.records if "tried again" in each.msg)
            assert max(lines.values()) <= 2 * len(pool.members) + 1, f"{lines}: not a line per try"
            assert any("works again" in each.msg for each in caplog.records)
    finally:
        pool.close()


def test_members_outlive_users_that_are_switched_off_and_on(faulty: FaultyEtcd) -> None:
    """Each before a restart and after it: with tokens that etcd knows, does not know, and does not ask for."""
    pool = Pool(faulty)
    try:
        for asked in (False, True):
            faulty.ask_for_users(asked)
            pool.check_well()
            faulty.break_("restart")
            pool.check_well()
    finally:
        pool.close()
