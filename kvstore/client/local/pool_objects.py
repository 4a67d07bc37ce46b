"""``PoolObjects``: the opaque objects of other nodes, for the clients of one node in one process.

The owners of the directory know which nodes have an object, as they do for pages. A node that has some of the objects
gets one request for all of them. Values are received in the caller's buffers. A value counts only if its checksums are
right, and if its source says afterwards that the value did not change. A node that fails is left out, and another node
that has the object is asked. A fault of another node is only a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from kvstore.client.buffers import Rows
from kvstore.client.local.peer_reads import PeerReader, TimeBudget
from kvstore.client.value_buffers import Scattered
from kvstore.cluster.data_connection import SILENCE_S, DataConnection
from kvstore.cluster.transport import RATE_MIN
from kvstore.errors import KVStoreError
from kvstore.model.objects import key_hash
from kvstore.wire.data import BODY_MAX, OBJECTS_FINGERPRINT, FrameKind, Namespace, WireError
from kvstore.wire.object_messages import (
    NAMES_MAX,
    PARTS_HEAD_BYTES,
    NamesState,
    ObjectFacts,
    ObjectPart,
    ObjectsReply,
    ObjectsRequest,
    objects_per_request,
    pack_keys,
    page_sum,
    parts_bytes,
    unpack_forgotten,
    unpack_heads,
    unpack_names,
    unpack_parts,
)

DELETE_S: Final = 10.0  # for one deletion on all nodes
DELETE_SILENCE_S: Final = 3.0  # for a node to delete its values
KEYS_S: Final = 60.0  # for one list of keys
KEYS_SILENCE_S: Final = 2.0  # for each step of such a list
TargetOf = Callable[[int, ObjectFacts], Scattered]
"""Returns the target of a value, in host memory. Called with the object's position when the value's size is known."""

log = logging.getLogger("kvstore.cluster")


class PoolObjects:
    """Finds and reads objects of other nodes. Thread-safe."""

    def __init__(self, peers: PeerReader) -> None:
        self._peers = peers

    def close(self) -> None:
        """Close the connections to other nodes."""
        self._peers.close()

    def find(self, salt: str, names: Sequence[bytes]) -> list[ObjectFacts | None]:
        """Return the facts about objects of other nodes, from a node that has them; None for an object that no other
        node has."""
        return self.read(salt, names, [0] * len(names), lambda position, facts: Scattered([]))

    def read(
        self, salt: str, names: Sequence[bytes], limits: Sequence[int], target_of: TargetOf
    ) -> list[ObjectFacts | None]:
        """Read objects from other nodes into their targets, and return the facts about those that were found.

        A value that is larger than its limit is not read. The target of an object that was not found may hold anything.
        """
        found: list[ObjectFacts | None] = [None] * len(names)
        if not names or not self._peers.has_peers:
            return found
        namespace = Namespace(OBJECTS_FINGERPRINT, salt, "")
        keys = [key_hash(namespace.root, name) for name in names]
        missing, failed, budget = list(range(len(names))), set[str](), TimeBudget()
        while missing and not budget.is_over:
            holders = self._peers.find_objects(namespace, [keys[at] for at in missing], failed, budget)
            by_node = _by_node(missing, holders)
            if not by_node:
                break
            for node, positions in by_node.items():
                self._read_from(node, salt, names, limits, positions, target_of, budget, found)
                if any(found[at] is None for at in positions):
                    failed.add(node)
            missing = [at for at in missing if found[at] is None]
        return found

    @property
    def is_in_pool(self) -> bool:
        """True if the node is in a pool, even if it has no other nodes now."""
        return self._peers.nodes is not None

    def forget(self, salt: str, names: Sequence[bytes], stamps: Sequence[int]) -> list[tuple[bool, int]]:
        """Delete values with smaller stamps on the other nodes that have them, and give the tombstones to the owners of
        the directory. With stamps of 0, only ask for the stamps of the stored values.

        A node that does not answer gets the tombstones from an owner later.

        Returns:
            For each object, whether a node has deleted a value, and the largest stamp of the values that remain.
        """
        result = [(False, 0)] * len(names)
        if not names or not self._peers.nodes:
            return result
        deletes = any(stamps)
        budget, silence_s = (TimeBudget(DELETE_S), DELETE_SILENCE_S) if deletes else (TimeBudget(), SILENCE_S)
        namespace = Namespace(OBJECTS_FINGERPRINT, salt, "")
        keys = [key_hash(namespace.root, name) for name in names]
        holders = self._peers.find_objects(namespace, keys, (), TimeBudget(), fresh=True)
        owners = self._peers.owners(keys)
        by_node: dict[str, list[int]] = {}
        for at, stamp in enumerate(stamps):
            for node in {*holders[at], *(owners[at] if stamp else ())}:
                by_node.setdefault(node, []).append(at)
        for node, positions in by_node.items():
            while positions and not budget.is_over:
                part = positions[: objects_per_request([names[at] for at in positions])]
                positions = positions[len(part) :]
                request = ObjectsRequest(salt, [names[at] for at in part], [stamps[at] for at in part])
                for at, (deleted, stamp) in zip(part, self._forget_on(node, request, budget, silence_s), strict=True):
                    result[at] = result[at][0] or deleted, max(result[at][1], stamp)
        return result

    @property
    def nodes(self) -> list[str]:
        """The other nodes of the pool."""
        return self._peers.nodes or []

    def keys(self, node: str, salt: str, prefix: bytes) -> tuple[list[bytes], bool]:
        """Return the keys of another node that begin with ``prefix``, and whether these are all.

        Raises:
            Unavailable: the node does not answer.
        """
        body, deadline_s = pack_keys(salt, prefix), time.monotonic() + KEYS_S

        def ask(link: DataConnection) -> tuple[list[bytes], bool]:
            names = list[bytes]()
            number = link.send(FrameKind.KEYS, body, deadline_s=deadline_s)
            while True:
                head = link.receive_head(number, FrameKind.NAMES, deadline_s=deadline_s)
                part, state = unpack_names(link.receive(head.body_bytes, deadline_s=deadline_s))
                names += part
                if len(names) > NAMES_MAX:
                    raise WireError(f"names: must be at most {NAMES_MAX} keys")
                if state is not NamesState.CONTINUES:
                    return names, state is NamesState.COMPLETE

        return self._peers.call(node, deadline_s, KEYS_SILENCE_S, ask)

    def _forget_on(
        self, node: str, request: ObjectsRequest, budget: TimeBudget, silence_s: float
    ) -> list[tuple[bool, int]]:
        """Send FORGET to one node. Returns what ``forget`` does."""
        count, body = len(request.names), request.pack()

        def ask(link: DataConnection) -> list[tuple[bool, int]]:
            reply = link.call(FrameKind.FORGET, body, reply=FrameKind.FORGOTTEN, deadline_s=deadline_s)
            return unpack_forgotten(reply, count)

        try:
            deadline_s = min(budget.deadline_s, time.monotonic() + silence_s)
            return self._peers.call(node, deadline_s, silence_s, ask)
        except KVStoreError as error:
            log.debug("%s: %s", node, error)
            return [(False, 0)] * count

    def read_before(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which of these objects this machine has read from other nodes before, and note this read."""
        history = self._peers.history
        before = [history.leading([key]) == 1 for key in keys]
        history.add(list(keys))
        return before

    def _read_from(
        self,
        node: str,
        salt: str,
        names: Sequence[bytes],
        limits: Sequence[int],
        positions: list[int],
        target_of: TargetOf,
        budget: TimeBudget,
        found: list[ObjectFacts | None],
    ) -> None:
        """Read the objects at ``positions`` from one node, and note in ``found`` those that arrived."""
        start = 0
        while start < len(positions) and not budget.is_over:
            part = positions[start:]
            part = part[: objects_per_request([names[at] for at in part])]
            request = ObjectsRequest(salt, [names[at] for at in part], [limits[at] for at in part])
            receive = partial(receive_objects, request=request, targets=ObjectTargets(part, target_of), budget=budget)
            try:
                with budget.transfer() as silence_s:
                    facts = self._peers.call(node, budget.transfer_deadline_s(0), silence_s, receive)
            except KVStoreError as error:
                log.debug("%s: %s", node, error)
                return
            for position, its in zip(part, facts, strict=True):
                found[position] = its
            start += len(part)


class ObjectTargets:
    """The targets of the objects of one request, by their position in it. Each is made once."""

    def __init__(self, positions: Sequence[int], target_of: TargetOf) -> None:
        self._positions = positions
        self._target_of = target_of
        self._made: dict[int, tuple[ObjectFacts, Scattered]] = {}

    def of(self, position: int, facts: ObjectFacts) -> Scattered:
        """Return the target of the object at this position of the request."""
        made = self._made.get(position)
        if made is None or made[0].value_bytes != facts.value_bytes:
            made = facts, self._target_of(self._positions[position], facts)
            self._made[position] = made
        return made[1]


def _by_node(positions: Sequence[int], holders: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Divide objects between few nodes: repeatedly choose the node that has most of the remaining ones."""
    chosen: dict[str, list[int]] = {}
    remaining = {at: names for at, names in zip(positions, holders, strict=True) if names}
    while remaining:
        counts: dict[str, int] = {}
        for names in remaining.values():
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        node = max(counts, key=lambda name: counts[name])
        chosen[node] = [at for at, names in remaining.items() if node in names]
        for at in chosen[node]:
            del remaining[at]
    return chosen


def receive_objects(
    link: DataConnection, request: ObjectsRequest, targets: ObjectTargets, budget: TimeBudget
) -> list[ObjectFacts | None]:
    """Send a request, receive its reply, and return the facts about objects that arrived completely, or that are larger
    than their limits.

    Raises:
        KVStoreError: as ``DataConnection.receive_head``.
    """
    deadline_s = budget.transfer_deadline_s(0)
    number = link.send(FrameKind.OBJECTS, request.pack(), deadline_s=deadline_s)
    head = link.receive_head(number, FrameKind.HEADS, deadline_s=deadline_s)
    facts = unpack_heads(link.receive(head.body_bytes, deadline_s=deadline_s), len(request.names))
    wanted = [its is not None and its.value_bytes <= limit for its, limit in zip(facts, request.limits, strict=True)]
    nbytes = sum(its.value_bytes for its, is_wanted in zip(facts, wanted, strict=True) if its is not None and is_wanted)
    deadline_s, link.rate_min = budget.transfer_deadline_s(nbytes), RATE_MIN
    reply, damaged = ObjectsReply(request, facts), set[int]()
    while True:
        head = link.receive_head(number, FrameKind.PARTS, FrameKind.VALID, deadline_s=deadline_s)
        if head.kind is FrameKind.VALID:
            break
        _receive_parts(link, head.body_bytes, reply, targets, damaged, deadline_s)
    valid = link.receive(min(head.body_bytes, BODY_MAX[FrameKind.VALID]), deadline_s=deadline_s)
    budget.extend_for(nbytes)
    whole = reply.whole(valid)
    return [
        its if is_whole and at not in damaged else None
        for at, (its, is_whole) in enumerate(zip(facts, whole, strict=True))
    ]


def _receive_parts(
    link: DataConnection,
    body_bytes: int,
    reply: ObjectsReply,
    targets: ObjectTargets,
    damaged: set[int],
    deadline_s: float,
) -> None:
    """Receive one PARTS. Add objects with a wrong checksum to ``damaged``."""
    size = parts_bytes(link.receive(PARTS_HEAD_BYTES, deadline_s=deadline_s))
    if size > body_bytes:
        raise WireError(f"parts: must have at least {size} bytes (got {body_bytes})")
    parts = unpack_parts(link.receive(size, deadline_s=deadline_s))
    pages = reply.take(parts, body_bytes - PARTS_HEAD_BYTES - size)
    sums = iter(memoryview(link.receive(4 * pages, deadline_s=deadline_s)).cast("I"))
    for part in parts:
        facts = reply.facts[part.position]
        assert facts is not None, "the reply has checked the part"
        target = targets.of(part.position, facts)
        for buffers in _page_buffers(part, facts, target):
            for buffer in buffers:
                link.receive_into(buffer.data, deadline_s=deadline_s)
            if page_sum(*buffers) != next(sums):
                damaged.add(part.position)


def _page_buffers(part: ObjectPart, facts: ObjectFacts, target: Scattered) -> Iterator[list[Rows]]:
    """For each page of a part, yield its places in the target."""
    for page in range(part.first, part.first + part.pages):
        start, stop = facts.page_range(page, 1)
        yield target.views(start, stop - start)
