"""A store that is closed while another thread copies: its frames are nobody else's until that copy has ended."""

from __future__ import annotations

import json
import sys
import threading

import pytest

import kvstore
from kvstore.client.local import put as client_put
from kvstore.errors import KVStoreError, NodeBusy
from tests.helpers.nursery import of_nodes
from tests.helpers.processes import Machine, Worker, check_laws, check_right, put, wait_settled, wait_until
from tests.helpers.turnover import everything_right, held, turn_over

WORKER = (sys.executable, "-m", "tests.helpers.workers.closing")


@pytest.mark.parametrize("end", ["close", "exit"])
@pytest.mark.parametrize("way", ["put", "layer", "object"])
def test_closed_and_stopped_while_copying(way: str, end: str, machine: Machine) -> None:
    """Stopped, the pool turned over, the daemon killed between: what it writes then harms nobody."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    arguments = json.dumps({"node": "n", "way": way, "end": end})
    writer = machine.start(Worker, "closing", [*WORKER, arguments], of_nodes())
    writer.wait_for("copying")
    writer.wait_for("closed")
    wait_until("it stops itself", lambda: writer.state() == "T")
    prompts = turn_over(machine, 100, 2)
    daemon.kill()
    machine.serve("n")
    prompts |= turn_over(machine, 1000, 2)
    everything_right(store, prompts)
    writer.resume()
    writer.wait_for("copied")
    everything_right(store, prompts)  # or its frames were somebody else's
    # Its lock was given back behind the copy, or by the end of the process: nothing is kept from the node for long.
    wait_until("its frames return", lambda: held(store) == 0)
    if end == "close":
        assert writer.alive and writer.events("refused"), "the put of a store that was closed said it was done"
    wait_settled(store)
    check_laws(store)


def test_an_embedded_store_closed_while_copying(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of its pool is taken until the copy has ended: another node would give the frames to others."""
    copying, go = threading.Event(), threading.Event()
    fill, errors = client_put.fill, []

    def slow_fill(target: object, rows: object) -> None:
        if threading.current_thread() is thread:
            copying.set()
            assert go.wait(60.0)
        fill(target, rows)  # type: ignore[arg-type]

    def put_slowly() -> None:
        try:
            put(store, 1, 16)
        except KVStoreError as error:
            errors.append(error)

    monkeypatch.setattr(client_put, "fill", slow_fill)
    store = kvstore.open("e", dram="4MiB", shm_dir=str(machine.shm_dir))
    thread = threading.Thread(target=put_slowly)
    thread.start()
    assert copying.wait(60.0)
    store.close()
    prompts = dict.fromkeys(range(100, 120), 16)
    with pytest.raises(NodeBusy), kvstore.open("e", dram="4MiB", shm_dir=str(machine.shm_dir)) as other:
        for seed in prompts:  # only where it is not refused: what the copy does then is to be seen
            put(other, seed, 16)
        go.set()
        thread.join()
        check_right(other, prompts)
    go.set()
    thread.join()
    assert len(errors) == 1, "the put of a store that was closed said it was done"
    with kvstore.open("e", dram="4MiB", shm_dir=str(machine.shm_dir)) as again:
        assert sum(put(again, seed, 16) for seed in prompts) == 320
        check_right(again, prompts)
        check_laws(again)
