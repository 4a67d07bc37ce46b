"""What a large pool costs each of its nodes, without its machines.

::

    python -m bench.scale membership    one node's cost of a change of members, with its pages and its number of peers
    python -m bench.scale pool          members in one process: at rest, in a rolling restart, and in a storm

The code that decides is the real code: announcers, owners of the directory, placements, entries of the catalog. Pages
and links are not real, and time is a number. ``docs/scale.md`` has the results.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from kvstore.cluster import ask_peers
from kvstore.cluster.announce_plan import AnnouncePlan, pause_s
from kvstore.cluster.catalog import schema, task_health
from kvstore.cluster.catalog.memory import Ledger
from kvstore.cluster.catalog.schema import DataEntry, NodeEntry
from kvstore.cluster.data_listener import Server, ServerLimits
from kvstore.cluster.membership import Membership
from kvstore.cluster.peer_links import PeerLinks, PoolNode, PoolView
from kvstore.errors import NodeUnavailable
from kvstore.limits import ALONE
from kvstore.model.replica import KEY_BYTES, FrameState, Tier
from kvstore.node.cluster import announcer, directory_shell
from kvstore.node.cluster.data_server import node_of, server_by_node
from kvstore.node.event_log import EventLog
from kvstore.node.page_feed import PageFeed
from kvstore.wire.data import HEAD, FrameKind

SPAN_PAGES: Final = 32
POOL: Final = "scale"
SECRET: Final = b"s" * 16
TTL_S: Final = 10.0
RENEWALS_PER_S: Final = 2 * 4 / TTL_S  # a daemon and a data server, four times per time to live
DIRECTORY_BYTES: Final = 64 << 20


class FakeNode:
    """Pages as a node has them: frames of one extent, all sealed, and a log of events."""

    def __init__(self, pages: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        spans = draw.integers(0, 1 << 64, -(-pages // SPAN_PAGES), np.uint64).repeat(SPAN_PAGES)[:pages]
        rows = draw.integers(0, 256, (pages, KEY_BYTES), np.uint8)
        self.events = EventLog()
        self.incarnation = seed + 1
        extent = SimpleNamespace(
            number=0,
            frames=pages,
            generation=np.arange(1, pages + 1, dtype=np.uint64),
            state=np.full(pages, int(FrameState.SEALED), np.uint8),
            owner=_Owners(pages),
            span=spans,
        )
        holdings = SimpleNamespace(roots=[SimpleNamespace(root=bytes(16))])
        space = SimpleNamespace(segment=SimpleNamespace(extents={0: extent}), pages=SimpleNamespace(holdings=holdings))
        table = SimpleNamespace(rows=rows, fmt=SimpleNamespace(key=slice(0, KEY_BYTES)))
        objects = SimpleNamespace(tombstones=SimpleNamespace(last=0, since=lambda start: []))
        mounts = SimpleNamespace(listed=list)
        self.state = self._state = SimpleNamespace(spaces={Tier.DRAM: space}, mounts=mounts, objects=objects)
        self._performer = SimpleNamespace(events=self.events, tables={0: table})

    def look(self, at: Callable[[Any, Any], Any]) -> Any:
        """As ``Node.look``."""
        return at(self._performer, self._state)


class _Owners(bytearray):
    """The owner of each frame, one byte each, as an array of the standard library names its type."""

    typecode = "B"


# --- one node, and a change of its peers ------------------------------------------------------------------------------


def peak_of(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds and the growth of the process' memory, in MiB, while ``work`` runs."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, began_s = _status("VmRSS"), time.process_time()
    work()
    return time.process_time() - began_s, max(0.0, _status("VmHWM") - before)


def _status(field: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def measure_changes(pages: int, nodes: int) -> list[str]:
    """Measure, for a node of this many pages and peers, its first announcement and changes of the members."""
    names = [name_of(number) for number in range(nodes)]
    numbers = itertools.count(1)
    plan = AnnouncePlan(names[0], lambda: next(numbers))
    feed = PageFeed(FakeNode(pages, 1), plan, Counter())  # type: ignore[arg-type]
    steps = {
        "all join": names,
        "one leaves": names[:-1],
        "one joins": names,
        "a tenth leaves": names[: nodes - nodes // 10],
        "a tenth joins": names,
    }
    cells = [f"{pages:,}", f"{nodes:,}"]
    for members in steps.values():
        plan.members(members)
        cpu_s, peak_mib = peak_of(feed.follow)
        entries = plan.queued
        for owner in plan.owners:
            while (batch := plan.batch(owner)) is not None:
                plan.take_answer(owner, batch, batch.number + 1)
        cells.append(f"{cpu_s:.3f} s, {peak_mib:.0f} MiB, {entries:,}")
    return cells


def membership(sizes: list[tuple[int, int]]) -> None:
    """Print the cost of changes, each size in a process of its own."""
    titles = ["pages", "nodes", "all join", "one leaves", "one joins", "a tenth leaves", "a tenth joins"]
    print("CPU seconds, growth of memory, entries to announce\n")
    print_row(titles)
    print_row(["---"] * len(titles))
    for pages, nodes in sizes:
        with ProcessPoolExecutor(1) as process:
            print_row(process.submit(measure_changes, pages, nodes).result())


def print_row(cells: list[str]) -> None:
    """Print one row of a Markdown table."""
    print("| " + " | ".join(cells) + " |", flush=True)


# --- a pool in one process --------------------------------------------------------------------------------------------


class SimMembership(Membership):
    """A member's copy of the catalog, without the thread that follows it."""

    def __init__(self) -> None:
        self._config: Any = SimpleNamespace(pool=POOL)
        self._members = {}
        self._values = {}
        self._secret = SECRET

    def see(self, members: dict[str, Any]) -> None:
        """Take over the entries of the catalog."""
        self._members = members

    @property
    def heard_s(self) -> float:
        """See ``Membership``."""
        return 0.0


class SimConnection:
    """A connection whose other end answers at once."""

    broken = False
    fresh = True

    def __init__(self, pool: SimPool, target: SimMember) -> None:
        self._pool, self._target = pool, target
        self.caller, self.connections = ALONE, 1
        self._reply = b""

    def send(self, kind: FrameKind, body: bytes, deadline_s: float) -> int:
        """As ``DataConnection.send``."""
        pool, began_s = self._pool, time.process_time()
        self._target.shell.handlers[kind](self, memoryview(body))  # type: ignore[arg-type]
        pool.owner_cpu_s += time.process_time() - began_s
        pool.counts["exchanges"] += 1
        pool.counts["bytes"] += 2 * HEAD.size + len(body) + len(self._reply)
        return 1

    def reply(self, kind: FrameKind, *body: bytes) -> None:
        """As ``Exchange.reply``."""
        self._reply = b"".join(body)

    def receive_head(self, number: int, *kinds: FrameKind, deadline_s: float) -> SimpleNamespace:
        """As ``DataConnection.receive_head``."""
        return SimpleNamespace(body_bytes=len(self._reply))

    def receive(self, size: int, *, deadline_s: float) -> bytearray:
        """As ``DataConnection.receive``."""
        return bytearray(self._reply)


class SimLinks:
    """Links of one member: what ``ask_peers`` needs of ``PeerLinks``."""

    def __init__(self, pool: SimPool) -> None:
        self._pool = pool
        self.dead = set[str]()

    @contextlib.contextmanager
    def to(self, peer: PoolNode, deadline_s: float) -> Iterator[SimConnection]:
        """As ``PeerLinks.to``."""
        member = self._pool.members.get(peer.name)
        if member is None or member.process != peer.process:
            self.dead.add(peer.process)
            raise NodeUnavailable(f"{peer.name}: did not answer")
        yield SimConnection(self._pool, member)

    def stale(self, *_: object) -> bool:
        """As ``PeerLinks.stale``."""
        return False

    def mark_dead(self, peer: PoolNode) -> None:
        """As ``PeerLinks.mark_dead``."""
        self.dead.add(peer.process)


def name_of(number: int) -> str:
    """Return the name of a member."""
    return f"node-{number:05}"


class SimMember:
    """A daemon with its announcer, and a data server with its part of the directory."""

    def __init__(self, pool: SimPool, number: int, process: int) -> None:
        self.name, self.process = name_of(number), f"{process:016x}"
        self.node = pool.nodes[number]
        self.membership = SimMembership()
        self._view: PoolView | None = None
        self._seen: tuple[object, object] = None, None
        peers: Any = self
        self.shell = directory_shell.DirectoryShell(DIRECTORY_BYTES, peers)
        self.shell.members = self.membership
        links: Any = SimLinks(pool)
        node: Any = self.node
        self.announcer = announcer.Announcer(node, self.name, self.process, self.membership, peers, links)
        self.session = pool.ledger.open_session(TTL_S, pool.now_s)
        incarnation = f"{self.node.incarnation:016x}"
        for entry in (
            NodeEntry(name=self.name, process=self.process, incarnation=incarnation, host=self.name, version="1"),
            DataEntry(
                name=f"{self.name}.{self.process[-12:]}",
                process=self.process,
                node=self.name,
                incarnation=incarnation,
                addresses=(f"10.0.{number >> 8}.{number & 255}:7071",),
                host=self.name,
                version="1",
            ),
        ):
            pool.ledger.publish(schema.key_of(POOL, entry), schema.encode(entry), self.session, None)

    def look(self) -> PoolView | None:
        """As ``PeersFile.look``."""
        return self._view

    def refresh(self) -> None:
        """As ``ViewKeeper.refresh``, without a file."""
        nodes, servers = self.membership.nodes(), self.membership.data_servers()
        if self._seen[0] is not nodes or self._seen[1] is not servers:
            self._seen = nodes, servers
            peers = {name: node_of(name, each) for name, each in server_by_node(nodes, servers).items()}
            self._view = PoolView(POOL, self.name, 0.0, peers)


class SimPool:
    """Members in one process. ``monotonic`` is the clock of all of them."""

    def __init__(self, members: int, pages: int) -> None:
        self.now_s = 1000.0
        self.ledger = Ledger()
        self.nodes = [FakeNode(pages, number) for number in range(members)]
        self.members: dict[str, SimMember] = {}
        self.counts: Counter[str] = Counter()
        self.owner_cpu_s = self.turn_cpu_s = self.view_cpu_s = 0.0
        self._processes = itertools.count(1)
        self._turns: list[tuple[float, int, str, str]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Return the time."""
        return self.now_s

    def join(self, numbers: range) -> None:
        """Start these members."""
        for number in numbers:
            member = SimMember(self, number, next(self._processes))
            self.members[member.name] = member
            self._at(self.now_s + 0.001 * (number % 50), member)
        self._tell()

    def leave(self, numbers: range) -> None:
        """End these members; the catalog sees it at once."""
        for number in numbers:
            self.ledger.end(self.members.pop(name_of(number)).session)
        self._tell()

    def run(self, seconds: float) -> None:
        """Let time pass: announcers take their turns."""
        until_s = self.now_s + seconds
        while self._turns and self._turns[0][0] <= until_s:
            self.now_s, _, name, process = heapq.heappop(self._turns)
            member = self.members.get(name)
            if member is None or member.process != process:
                continue
            began_s, owners_s = time.process_time(), self.owner_cpu_s
            pause_s = self._turn(member)
            self.turn_cpu_s += time.process_time() - began_s - (self.owner_cpu_s - owners_s)
            self._at(self.now_s + pause_s, member)
        self.now_s = until_s

    def _turn(self, member: SimMember) -> float:
        """As ``Announcer._turn``; return the pause after it."""
        its, view = member.announcer, member.look()
        if view is None:
            return announcer.ANSWER_S
        its._follow(view)
        sent = its._send_batches(view)
        owners = len(its._plan.owners)
        return sent / announcer.PAGES_PER_S if its._plan.queued else pause_s(owners)

    def _at(self, at_s: float, member: SimMember) -> None:
        heapq.heappush(self._turns, (at_s, next(self._order), member.name, member.process))

    def _tell(self) -> None:
        """Every member receives the changes of the catalog, as both of its watches would."""
        began_s = time.process_time()
        entries = {each.key: each for each in self.ledger.listing(schema.prefix(POOL)).entries}
        for member in self.members.values():
            member.membership.see(dict(entries))
            member.refresh()
        self.counts["watch updates"] += 2 * len(self.members)
        self.view_cpu_s += time.process_time() - began_s

    def phase(self, name: str, seconds: float, play: Callable[[], None], link_us: float) -> list[str]:
        """Play a part of the history; return a row about it."""
        self.counts.clear()
        self.owner_cpu_s = self.turn_cpu_s = self.view_cpu_s = 0.0
        dumps = self._total("dumps")
        play()
        members = len(self.members)
        each = 1 / members / seconds
        exchanges = self.counts["exchanges"] * each
        cpu = [self.turn_cpu_s * each, self.owner_cpu_s * each, self.view_cpu_s * 2 * each]
        links = exchanges * link_us / 1e6
        return [
            name,
            f"{members:,}",
            f"{exchanges:.1f}",
            f"{self.counts['bytes'] * each / 1024:.1f}",
            *(f"{100 * part:.2f}" for part in cpu),
            f"{100 * links:.2f}",
            f"{100 * (sum(cpu) + links):.2f}",
            f"{(self._total('dumps') - dumps) / members:.1f}",
            f"{self.counts['watch updates'] * each:.2f}",
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / members:.1f}",
        ]

    def _total(self, name: str) -> int:
        return sum(member.announcer.counters[name] for member in self.members.values())


@contextlib.contextmanager
def patched(pool: SimPool) -> Iterator[None]:
    """Let the modules that decide read the pool's clock."""
    clock: Any = SimpleNamespace(monotonic=pool.monotonic)
    with contextlib.ExitStack() as patches:
        for module in (announcer, directory_shell, ask_peers):
            patches.enter_context(patch.object(module, "time", clock))
        for module in (announcer, directory_shell, task_health):
            patches.enter_context(patch.object(module, "boot_s", pool.monotonic))
        yield


def link_us(exchanges: int = 3000) -> float:
    """Return the CPU microseconds of one small request and its reply over loopback, both ends together."""
    admitted: Any = ALONE
    server = Server("n", {}, lambda hello, names: admitted, ServerLimits())
    address = server.start("127.0.0.1", 0)
    links, peer = PeerLinks(POOL, "bench"), PoolNode("n", server.process, "", (address,))
    request = [ask_peers.PeerRequest(peer, FrameKind.PING, bytes(60))]
    try:
        ask_peers.ask_peers(links, request, FrameKind.PONG, time.monotonic() + 5.0)
        began_s = time.process_time()
        for _ in range(exchanges):
            ask_peers.ask_peers(links, request, FrameKind.PONG, time.monotonic() + 5.0)
        return (time.process_time() - began_s) / exchanges * 1e6
    finally:
        links.close()
        server.stop()


def simulate(members: int, pages: int, restarts: int) -> None:
    """Print what a pool costs each member."""
    per_exchange_us = link_us()
    print(f"{members} members of {pages:,} pages; an exchange over loopback takes {per_exchange_us:.0f} us of CPU\n")
    titles = ["phase", "members", "exchanges/s", "KiB/s", "announcer %", "owner %", "members' list %", "links %"]
    titles += ["sum, % of a core", "dumps", "watch updates/s", "MiB"]
    print_row(titles)
    print_row(["---"] * len(titles))
    pool = SimPool(members, pages)
    lost = min(50, members // 4)

    def begin() -> None:
        pool.join(range(members))
        pool.run(6.0)

    def roll() -> None:
        for number in range(restarts):
            pool.leave(range(number, number + 1))
            pool.run(2.0)
            pool.join(range(number, number + 1))
            pool.run(3.0)

    def lose() -> None:
        pool.leave(range(lost))
        pool.run(10.0)

    def gain() -> None:
        pool.join(range(lost))
        pool.run(10.0)

    with patched(pool):
        for name, seconds, play in (
            ("all join", 6.0, begin),
            ("rest", 28.0, lambda: pool.run(28.0)),
            (f"rolling restart, {restarts} of them, one per 5 s", 5.0 * restarts, roll),
            (f"{lost} are lost at once", 10.0, lose),
            (f"{lost} join at once", 10.0, gain),
        ):
            print_row(pool.phase(name, seconds, play, per_exchange_us))
    print(f"\nrenewals at etcd: {members * RENEWALS_PER_S:.0f} per second; watches: {2 * members}")
    print(f"connections of each member for announcing: {members} out, {members} in")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    changes = commands.add_parser("membership")
    changes.add_argument("--pages", type=int, nargs="*", default=[100_000, 1_000_000])
    changes.add_argument("--nodes", type=int, nargs="*", default=[30, 100, 300, 1000])
    pool = commands.add_parser("pool")
    pool.add_argument("--members", type=int, default=300)
    pool.add_argument("--pages", type=int, default=2000, help="of each member")
    pool.add_argument("--restarts", type=int, default=3)
    options = parser.parse_args()
    if options.command == "membership":
        membership([(pages, nodes) for pages in options.pages for nodes in options.nodes])
    else:
        simulate(options.members, options.pages, options.restarts)


if __name__ == "__main__":
    main()
