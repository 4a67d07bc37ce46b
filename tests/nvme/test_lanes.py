"""Lanes: work in order, idle tasks last, and which devices count as late."""

from __future__ import annotations

import threading

import pytest

from kvstore.node import tier_mover
from kvstore.node.tier_mover import Countdown, DeviceLane
from tests.helpers.processes import wait_until


def test_tasks_run_in_order_and_idle_tasks_once_and_last() -> None:
    lane, done = DeviceLane("test"), list[str]()
    lane.add_idle_task("tidy", lambda: done.append("an earlier tidy"))
    lane.add(lambda: done.append("first"))
    lane.add_idle_task("tidy", lambda: done.append("tidy"))
    lane.add(lambda: done.append("second"))
    assert lane.is_busy
    while lane.step():
        pass
    assert done == ["first", "second", "tidy"] and not lane.is_busy


def test_the_last_part_reports() -> None:
    reports: list[int] = []
    countdown = Countdown(3, lambda: reports.append(1))
    for expected in (0, 0, 1):
        countdown.part_done()
        assert len(reports) == expected


class Devices:
    """Lanes that perform one task each, or none."""

    def __init__(self, count: int) -> None:
        self.lanes = [DeviceLane(str(number)) for number in range(count)]
        self._gates: dict[int, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def hang(self, device: int) -> None:
        """It does not answer from here on."""
        gate = self._gates[device] = threading.Event()
        lane = self.lanes[device]
        lane.add(lambda: self._wait(gate))
        self._threads.append(threading.Thread(target=lane.step))
        self._threads[-1].start()
        wait_until("it is late", lambda: lane.is_late(0.0))

    @staticmethod
    def _wait(gate: threading.Event) -> None:
        gate.wait(60.0)

    def end(self) -> None:
        """All answer."""
        for gate in self._gates.values():
            gate.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize(
    ("hanging", "known", "usable", "late"),
    [
        ([], [], [0, 1, 2], []),
        ([1], [], [0, 1, 2], [1]),
        ([0, 1], [0], [0, 1, 2], [0, 1]),
        ([0, 1, 2], [0, 1], [0, 1, 2], [0, 1]),  # the one that became late last is waited for
        ([0, 1, 2], [], [0, 1, 2], []),
        ([0, 1], [], [0, 1], []),
        ([1], [1], [1, 2], [1]),
        ([1], [1], [1], []),  # all others have failed: it is waited for
        ([0, 1], [1], [1], [0]),  # what hangs on the failed one is not
        ([0], [], [], [0]),
    ],
)
def test_some_device_is_always_waited_for(
    hanging: list[int], known: list[int], usable: list[int], late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_mover, "LATE_S", 0.0)
    devices = Devices(3)
    for device in hanging:
        devices.hang(device)
    assert tier_mover.late_devices(devices.lanes, set(known), set(usable)) == set(late)
    devices.end()
    assert not any(lane.is_busy for lane in devices.lanes)
