"""Tables are damaged while no daemon runs, and a writer lives: nobody else gets what it may still write to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.model.replica import FrameClass, FrameState
from kvstore.shm.records import RECORDS_HEAD_BYTES
from tests.helpers.content import SMALL, chain
from tests.helpers.processes import (
    Machine,
    Worker,
    check_laws,
    check_right,
    evict_all,
    frames,
    put,
    wait_settled,
    wait_until,
)
from tests.helpers.turnover import PAGES, POOL_PAGES, everything_right, restart, turn_over, went_on

ROW = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers).record
COPY_AT = 2048  # of a table's head
POSITION = 32  # in the head


def flip(path: Path, offset: int, mask: int = 0x55) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def tables_of(folder: Path, granted: list[list[int]]) -> list[int]:
    return sorted({extent for extent, _, _ in granted})


def both_heads(folder: Path, granted: list[list[int]]) -> None:
    for extent in tables_of(folder, granted):
        flip(folder / f"records-{extent}", 41)
        flip(folder / f"records-{extent}", COPY_AT + 58)


def heads_and_places(folder: Path, granted: list[list[int]]) -> None:
    for extent in tables_of(folder, granted):
        flip(folder / f"records-{extent}", POSITION)
        flip(folder / f"records-{extent}", COPY_AT + 58)


GIVEN_UP: list[Callable[[Path, list[list[int]]], None]] = [both_heads, heads_and_places]


def stopped_writer(machine: Machine) -> tuple[Store, Worker, list[list[int]]]:
    """A pool that is carved whole, and a writer that is stopped with its frames granted and nothing copied."""
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    turn_over(machine, 10_000, 2)
    writer = machine.worker("stopped_put", "n", seed=1, pages=PAGES)
    granted = writer.wait_for("granted")["frames"]
    wait_until("it stops itself", lambda: writer.state() == "T")
    return store, writer, granted


def quarantined(store: Store) -> int:
    return int(store.stats()["tiers"]["dram"]["extents_quarantined"])


@pytest.mark.parametrize(("damage", "end"), [*((damage, "goes on") for damage in GIVEN_UP), (both_heads, "is killed")])
def test_a_position_is_nobodys_while_its_writer_lives(
    damage: Callable[[Path, list[list[int]]], None], end: str, machine: Machine
) -> None:
    """Its tables cannot be believed, the daemon is killed again and again, the pool is turned over: when the writer
    goes on, it stores into frames that are nobody's."""
    store, writer, granted = stopped_writer(machine)
    daemon = machine.processes[0]
    daemon.kill()
    damage(machine.folder("n"), granted)
    lost = len(tables_of(machine.folder("n"), granted))
    daemon = machine.serve("n")
    assert quarantined(store) == lost
    prompts = turn_over(machine, 100)
    daemon = restart(machine, daemon)
    prompts |= turn_over(machine, 1000)
    everything_right(store, prompts)
    assert quarantined(store) == lost, "another start gave its position away"
    if end == "goes on":
        writer.resume()
        writer.wait_for("copied")
        went_on(writer, store, prompts)
        everything_right(store, prompts)
    writer.kill()
    store.close()  # was there at the start as well
    store = machine.connect("n")
    wait_until("they are back", lambda: quarantined(store) == 0)
    assert not (machine.folder("n") / "quarantine").exists()
    prompts |= turn_over(machine, 2000)
    everything_right(store, prompts)
    wait_settled(store)
    check_laws(store)
    evict_all(store)


def test_one_damaged_head_costs_nothing(machine: Machine) -> None:
    """A table has its head twice: pages stay, and a stopped writer's frames are still its own."""
    store, writer, _ = stopped_writer(machine)
    put(store, 7, 2)
    machine.processes[0].kill()
    folder = machine.folder("n")
    for number, path in enumerate(sorted(folder.glob("records-*"))):
        flip(path, (COPY_AT if number % 2 else 0) + 8 * (number % 11))
    daemon = machine.serve("n")
    assert quarantined(store) == 0
    check_right(store, {7: 2})
    assert store.cache(SMALL).get(chain(7, 2)).pages == 2
    prompts = turn_over(machine, 100)
    restart(machine, daemon)  # both copies are one again
    for path in folder.glob("records-*"):
        flip(path, COPY_AT + 3)
    writer.resume()
    writer.wait_for("copied")
    assert writer.wait_for("sealed")["pages"] == PAGES
    everything_right(store, {1: PAGES, **prompts})
    check_laws(store)


def test_a_frame_is_its_writers_whatever_its_record_says(machine: Machine) -> None:
    """The word says free, or sealed; or the session is misspelt: the frame is held while its writer lives."""
    store, writer, granted = stopped_writer(machine)
    daemon = machine.processes[0]
    daemon.kill()
    damages = [
        (0, FrameState.RESERVED ^ FrameState.FREE),
        (0, FrameState.RESERVED ^ FrameState.SEALED),
        (0, FrameState.RESERVED ^ FrameState.RETIRING),
        (2, 4),  # the generation
        (ROW.writers + 3, 0xFF),
    ]
    for number, (extent, frame, _) in enumerate(granted):
        offset, mask = damages[number % len(damages)]
        flip(machine.folder("n") / f"records-{extent}", RECORDS_HEAD_BYTES + frame * ROW.row_bytes + offset, mask)
    daemon = machine.serve("n")
    states = frames(store)
    assert states["reserved"] + states["quarantined"] >= len(granted)
    prompts = turn_over(machine, 100)
    daemon = restart(machine, daemon)
    prompts |= turn_over(machine, 1000)
    writer.resume()
    writer.wait_for("copied")
    went_on(writer, store, prompts)
    everything_right(store, prompts)
    writer.kill()
    wait_settled(store)
    check_laws(store)
    assert sum(frames(store).values()) == POOL_PAGES
    evict_all(store)
