"""A writer that is stopped (SIGSTOP) must find its frames its own when it goes on, whatever happened meanwhile."""

from __future__ import annotations

import pytest

from tests.helpers.content import SMALL
from tests.helpers.processes import (
    Machine,
    check_laws,
    evict_all,
    frames,
    wait_settled,
    wait_until,
)
from tests.helpers.turnover import PAGES, everything_right, held, restart, turn_over, went_on


@pytest.mark.parametrize("ranks", [1, 2])
def test_stopped_in_a_layer_wise_write(ranks: int, machine: Machine) -> None:
    """Its deadline passes, the daemon is killed and restarted, the pool is turned over: its frames are not touched."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    writer = machine.worker(
        "layers", "n", seed=1, pages=PAGES, ttl_s=1.0, step=True, ranks=ranks, rank=ranks - 1, group="g"
    )
    writer.wait_for("reserved")
    writer.tell()
    writer.wait_for("layer")
    writer.stop()
    daemon = restart(machine, daemon)
    prompts = turn_over(machine, 100, 2)
    wait_until("the deadline passes", lambda: frames(store)["quarantined"] == PAGES)
    prompts |= turn_over(machine, 1000)
    daemon = restart(machine, daemon)
    assert frames(store)["quarantined"] == PAGES, "after another restart its frames are somebody else's"
    prompts |= turn_over(machine, 2000)
    everything_right(store, prompts)

    writer.resume()  # it stores three more layers into its old frames
    for layer in range(1, SMALL.layers):
        writer.tell()
        writer.wait_for("layer", layer + 1)
    everything_right(store, prompts)
    wait_until("others have given back theirs", lambda: held(store) == PAGES)
    writer.tell()
    sealed = writer.wait_for("sealed")
    assert sealed["pages"] == sealed["seen"] == 0, sealed  # it was late
    wait_until("its frames return: it has spoken", lambda: held(store) == 0)
    prompts |= turn_over(machine, 3000)
    everything_right(store, prompts)
    check_laws(store)
    writer.kill()
    wait_settled(store)
    evict_all(store)


@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_stopped_in_a_put(end: str, machine: Machine) -> None:
    """Granted frames have no deadline: they are the writer's as long as it lives."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    writer = machine.worker("stopped_put", "n", seed=1, pages=PAGES)
    granted = len(writer.wait_for("granted")["frames"])
    wait_until("it stops itself", lambda: writer.state() == "T")
    daemon = restart(machine, daemon)
    prompts = turn_over(machine, 100)
    daemon = restart(machine, daemon)
    prompts |= turn_over(machine, 1000)
    assert held(store) >= granted
    everything_right(store, prompts)
    if end == "is killed":
        writer.kill()
        wait_settled(store)
        prompts |= turn_over(machine, 2000)
        everything_right(store, prompts)
        check_laws(store)
        return
    writer.resume()
    writer.wait_for("copied")
    went_on(writer, store, prompts)
    everything_right(store, prompts)
    check_laws(store)
    writer.kill()
    wait_settled(store)
    evict_all(store)
