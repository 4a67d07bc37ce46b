"""``LocalObjects``: the opaque objects of a node on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.client.buffers import Rows
from kvstore.client.device_link import BOUNCE_BYTES
from kvstore.client.local.cache import ORDERED, LocalCache
from kvstore.client.local.grants import BATCH_BYTES, OVER_QUOTA
from kvstore.client.local.hints import accepts_hints, name_objects
from kvstore.client.local.index_lookup import Member, check_counts, complete_groups, lost_members
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.object_batches import (
    HeadPut,
    ObjectsPut,
    PiecesPut,
    ProvenHead,
    find_head,
    find_heads,
    plan_object,
    read_objects,
    stored_head,
    stored_heads,
)
from kvstore.client.local.peer_reads import LOCAL_WAIT_S
from kvstore.client.local.stamps import new_nonces, new_stamp
from kvstore.client.objects import ObjectVerbs, as_scattered, listed, names_of, root_of_salt, sources_of, target_of
from kvstore.client.value_buffers import Scattered
from kvstore.device.host_memory import empty
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, OutOfSpace, QuotaExceeded, Unavailable
from kvstore.model.objects import (
    NO_GROUP,
    ObjectGroup,
    class_for,
    encode_name,
    encode_names,
    encode_prefix,
    groups_for,
    key_hash,
    object_layout,
    object_root,
    pieces_of,
    read_row,
    stamp_of,
)
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, FrameClass, Status
from kvstore.model.tombstones import TOMBSTONE_S, Tombstone
from kvstore.wire.control import BATCH_MAX, Op, statuses_bytes
from kvstore.wire.object_messages import VALUE_BYTES_MAX, ObjectFacts
from kvstore.wire.tombstones import pack_tombstones

BUSY_PAUSE_S = 0.005  # pause before a call that the node could not complete is repeated
LOOK_PAGES = 8192  # pages of the node that one step of a call about all objects examines
LOOKS_MAX = 4  # passes over all objects in one ``clear``
CACHES_MAX = 256  # caches that are kept, one for each salt and class


class _ObjectCache(LocalCache):
    """The pages of one class and salt that contain objects."""

    def __init__(self, node: LocalNode, page_bytes: int, width: int, salt: str, verify: bool) -> None:
        super().__init__(node, object_layout(page_bytes, width), salt, "", verify)
        self.root = object_root(salt)

    def _name(self, mapped: MappedNode, as_hint: bool = False, timeout_s: float | None = None) -> None:
        name_objects(mapped, self.root, self.salt, as_hint, timeout_s)


class LocalObjects(ObjectVerbs):
    """The objects of a node on this machine. They are found and read in shared memory; only puts and deletes need the
    daemon."""

    _node: LocalNode

    def __init__(self) -> None:
        super().__init__()
        self._object_caches: dict[tuple[str, FrameClass, bool], LocalCache] = {}

    def put_many(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        salt: str = "",
        replace: bool = False,
        *,
        group: str | Sequence[str | None] | None = None,
        count: int = 0,
        wait: bool = True,
    ) -> list[bool]:
        """Store objects. Return, for each, whether this call has stored it. Raises as ``ObjectVerbs.put_many``."""
        names, sources = sources_of(keys, values)
        root = root_of_salt(salt)
        groups = groups_for(root, group, count, len(names))
        mapped = self._node.writable()
        if max([source.nbytes for source in sources], default=0) > mapped.header.extent_bytes // 2:
            for name, source in zip(names, sources, strict=True):
                _check_size(mapped, name, source.nbytes)
        check_counts(mapped, [each for each in groups if each.members])
        name_objects(mapped, root, salt)
        in_pool = replace and self._is_in_pool
        stamp = new_stamp(mapped, self._latest_stamp(mapped, root, names, salt) if in_pool else 0)
        nonces, stamps = new_nonces(stamp, len(names)), [stamp] * len(names)
        stored = ObjectsPut(mapped, root, names, sources, replace, wait, groups, nonces, in_pool=in_pool).result()
        failure: Unavailable | None = None
        for number in [number for number, is_stored in enumerate(stored) if is_stored is None]:
            try:
                its = names[number], sources[number], replace, groups[number]
                put = _ObjectPut(self, mapped, root, *its, stamp, in_pool)
                stored[number] = put.result()
                stamps[number] = put.stamp
            except Unavailable as error:
                failure = failure or error
        if in_pool:
            replaced = [number for number, is_stored in enumerate(stored) if is_stored]
            chosen_stamps = [stamps[number] for number in replaced]
            self._forget_elsewhere([names[number] for number in replaced], chosen_stamps, salt)
        if failure is not None:
            raise failure
        return [bool(is_stored) for is_stored in stored]

    def get(self, key: str, out: Any = None, salt: str = "", *, local: bool = False) -> Any:
        """Read an object. Return its bytes, or with ``out`` its size; None if there is none. Raises as
        ``ObjectVerbs.get``."""
        name, root = encode_name(key), root_of_salt(salt)
        out_target = Scattered.of(out, "out", writable=True) if out is not None else None
        size_or_value = None
        if out_target is not None and out_target.on_device:
            size_or_value = self._read_in_place(root, [name], [out_target])[0][0]
        if size_or_value is None:
            size_or_value, _ = self._get_here(name, root, out_target, salt)
        elif size_or_value < 0:
            size_or_value = None
        if size_or_value is None and not local and self._node.pool_objects is not None:
            sizes, values = self._read_pool([name], [out_target], salt)
            return values[0] if out_target is None else sizes[0]
        return size_or_value

    def _get_here(self, name: bytes, root: bytes, out_target: Scattered | None, salt: str) -> tuple[Any, Member | None]:
        """Read an object of this node, as ``get`` does. Also return its membership of a group."""
        for _ in (0, 1):  # try twice if the object is replaced or moved during the read
            mapped = self._node.mapped()
            head = find_head(mapped, root, name) if mapped is not None else None
            if mapped is None or head is None:
                continue
            size = head.about.value_bytes
            if not head.about.is_whole(head.frame_class.page_bytes):
                break  # the record is damaged: no value of this class has that length
            if out_target is not None and out_target.nbytes < size:
                raise InvalidRequest("out", f"must have at least {size} bytes for the value (got {out_target.nbytes})")
            target = out_target if out_target is not None else Scattered([empty(size)])
            if self._read(mapped, salt, head, target):
                return size if out_target is not None else target.parts[0], head.member
        return None, None

    def _read_in_place(
        self, root: bytes, names: Sequence[bytes], targets: Sequence[Rows | Scattered]
    ) -> tuple[Sequence[int | None], dict[int, Member]]:
        """Copy objects directly from DRAM. Return what ``read_objects`` does."""
        mapped = self._node.mapped()
        if mapped is None or not ORDERED or mapped.header.verify_reads:
            return [None] * len(names), {}
        return read_objects(mapped, root, names, targets)

    def get_many(self, keys: Sequence[str], outs: Sequence[Any], salt: str = "", *, local: bool = False) -> list[int]:
        """Read objects into ``outs``, and return the size of each; -1 if there is none. Raises as
        ``ObjectVerbs.get_many``."""
        names, root = names_of(keys, outs, "outs"), root_of_salt(salt)
        targets = [target_of(out) for out in outs]
        in_place, members = self._read_in_place(root, names, targets)
        sizes = list(in_place)
        for number, size in enumerate(sizes):
            if size is None:
                at, target = number, as_scattered(targets[number])
                sizes[at], member = self._get_here(names[at], root, target, salt)
                if member is not None:
                    members[at] = member
        missing = [number for number, size in enumerate(sizes) if size in (None, -1)]
        mapped = self._node.mapped() if missing and members else None
        if mapped is not None:
            lost = lost_members(mapped, members)  # a group left during the call: none of its members is returned
            missing = sorted({*missing, *lost})
        found = dict.fromkeys(missing)
        if missing and not local and self._node.pool_objects is not None:
            wanted = [as_scattered(targets[number]) for number in missing]
            pool_sizes, _ = self._read_pool([names[number] for number in missing], wanted, salt)
            found = dict(zip(missing, pool_sizes, strict=True))
        sizes = [found.get(number, size) for number, size in enumerate(sizes)]
        return [-1 if size is None else size for size in sizes]

    def size(self, key: str, salt: str = "", *, local: bool = False) -> int | None:
        """Return the size of an object in bytes; None if there is none."""
        found = self.find(key, salt, local=local)
        return found[0] if found is not None else None

    def find(self, key: str, salt: str = "", *, local: bool = False) -> tuple[int, ObjectGroup] | None:
        """Return the size and the group of an object; None if there is none. Raises as ``get``."""
        name = encode_name(key)
        head = self.find_head(salt, name)
        if head is not None:
            return head.about.value_bytes, head.about.group
        facts = self._find_in_pool([name], salt, local)[0]
        return (facts.value_bytes, facts.group) if facts is not None else None

    def contains(self, keys: str | Sequence[str], salt: str = "", *, local: bool = False) -> Any:
        """Return whether there is an object under a key. For several keys, return a list of these booleans."""
        names, root, mapped = encode_names(listed(keys)), root_of_salt(salt), self._node.mapped()
        raws = find_heads(mapped, root, names) if mapped is not None else [None] * len(names)
        stored = [raw is not None for raw in raws]
        missing = [number for number, is_stored in enumerate(stored) if not is_stored]
        facts = self._find_in_pool([names[number] for number in missing], salt, local) if missing else []
        for number, its in zip(missing, facts, strict=True):
            stored[number] = its is not None
        return stored[0] if isinstance(keys, str) else stored

    def delete(self, keys: str | Sequence[str], salt: str = "", *, local: bool = False) -> int:
        """Delete objects, and return how many there were. Raises as ``ObjectVerbs.delete``."""
        names, root = list(dict.fromkeys(encode_names(listed(keys)))), root_of_salt(salt)
        if local or not self._is_in_pool:
            return self._delete(names, root)
        return self._delete_in_pool(names, root, salt)

    @property
    def _is_in_pool(self) -> bool:
        pool = self._node.pool_objects
        return pool is not None and pool.is_in_pool

    def _delete_in_pool(self, names: list[bytes], root: bytes, salt: str) -> int:
        """Delete objects of all nodes, and return how many there were. Every value that a node had when the call began
        is void afterwards, also on nodes that do not answer now."""
        mapped, deleted = self._node.writable(), 0
        for start in range(0, len(names), BATCH_MAX):
            part = names[start : start + BATCH_MAX]
            stamp = new_stamp(mapped, self._latest_stamp(mapped, root, part, salt))
            here = self._bury(part, root, stamp)
            there = self._forget_elsewhere(part, [stamp] * len(part), salt)
            deleted += sum(one or other for one, other in zip(here, there, strict=True))
        return deleted

    def _latest_stamp(self, mapped: MappedNode, root: bytes, names: Sequence[bytes], salt: str) -> int:
        """Return the largest stamp of the values that any node has of these objects."""
        pool = self._node.pool_objects
        heads = (find_head(mapped, root, name) for name in names)
        stamps = [stamp_of(head.about.nonce) for head in heads if head is not None]
        if pool is not None:
            stamps += [stamp for _, stamp in pool.forget(salt, names, [0] * len(names))]
        return max(stamps, default=0)

    def _forget_elsewhere(self, names: Sequence[bytes], stamps: Sequence[int], salt: str) -> list[bool]:
        """Delete older values on other nodes. Return, for each object, whether a node has deleted one."""
        pool = self._node.pool_objects
        assert pool is not None, "the caller has checked it"
        return [deleted for deleted, _ in pool.forget(salt, names, stamps)]

    def _bury(self, names: Sequence[bytes], root: bytes, stamp: int) -> list[bool]:
        """Delete older values of this node, and let it keep tombstones. Return, for each object, whether there was one.
        While a value is being moved between tiers, the request is repeated until the deadline."""
        until_ns, deadline_s = time.monotonic_ns() + TOMBSTONE_S * 10**9, time.monotonic() + self._node.timeout_s
        tombstones = [Tombstone(key_hash(root, name), root, stamp, until_ns) for name in names]
        deleted, positions = [False] * len(names), list(range(len(names)))
        while positions:
            statuses = bury(self._node, [tombstones[at] for at in positions])
            for at, status in zip(positions, statuses, strict=True):
                deleted[at] = deleted[at] or status in (Status.OK, Status.BUSY)
            positions = [at for at, status in zip(positions, statuses, strict=True) if status == Status.BUSY]
            if positions and time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"{len(positions)} objects are being moved between tiers")
            time.sleep(BUSY_PAUSE_S if positions else 0)
        return deleted

    def _delete(self, names: list[bytes], root: bytes) -> int:
        """Delete objects, and return how many there were. An object that is being moved between tiers cannot be
        deleted, so the deletion is repeated until the deadline."""
        deadline, deleted = time.monotonic() + self._node.timeout_s, 0
        while names:
            mapped = self._node.mapped()
            raws = stored_heads(mapped, root, names)[0] if mapped is not None else [None] * len(names)
            heads = [(name, raw) for name, raw in zip(names, raws, strict=True) if raw is not None]
            remaining: list[bytes] = []
            for start in range(0, len(heads), BATCH_MAX):
                part = heads[start : start + BATCH_MAX]
                statuses = self._delete_pages([address for _, address in part])
                deleted += statuses.count(int(Status.OK))
                remaining += [name for (name, _), status in zip(part, statuses, strict=True) if status != Status.OK]
            names = remaining
            if names and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{len(names)} objects are being moved between tiers")
            time.sleep(BUSY_PAUSE_S if names else 0)
        return deleted

    def clear(self, prefix: str, salt: str = "", *, local: bool = False) -> int:
        """Delete the objects whose keys begin with ``prefix``, and return how many there were. Raises as
        ``ObjectVerbs.clear``."""
        return sum(self.clear_in_steps(prefix, salt, local))

    def clear_in_steps(self, prefix: str, salt: str = "", local: bool = False) -> Iterator[int]:
        """Delete the objects whose keys begin with ``prefix``, in steps of bounded work. Yield how many objects each
        step has deleted.

        A pass over all objects may miss an object that moves between frames. So passes are repeated until one deletes
        nothing, but at most ``LOOKS_MAX`` times, since other clients may keep putting new objects.

        Raises:
            NodeUnavailable: as ``ObjectVerbs.clear``. The objects of the nodes that answered are deleted.
        """
        start, root = encode_prefix(prefix), root_of_salt(salt)
        self._node.writable()
        in_pool = not local and self._is_in_pool
        for _ in range(LOOKS_MAX):
            pass_deleted = 0
            for names in self.names_in_steps(salt, start, groups_last=True):
                deleted = self._delete_in_pool(names, root, salt) if in_pool else self._delete(names, root)
                pass_deleted += deleted
                yield deleted
            if not pass_deleted:
                break
        if in_pool:
            yield from self._clear_elsewhere(start, root, salt)

    def _clear_elsewhere(self, start: bytes, root: bytes, salt: str) -> Iterator[int]:
        """Delete the objects of other nodes, as ``clear_in_steps`` does."""
        pool, silent = self._node.pool_objects, list[str]()
        for node in pool.nodes if pool is not None else ():
            is_complete, looks = False, 0
            while pool is not None and not is_complete and looks < LOOKS_MAX:
                try:
                    names, is_complete = pool.keys(node, salt, start)
                except Unavailable:
                    silent.append(node)
                    break
                deleted = 0
                for first in range(0, len(names), BATCH_MAX):
                    step = self._delete_in_pool(names[first : first + BATCH_MAX], root, salt)
                    deleted += step
                    yield step
                looks = 0 if deleted else looks + 1
        if silent:
            raise NodeUnavailable(f"{', '.join(silent)}: did not answer, so objects may remain there")

    def object_keys(self, salt: str = "") -> list[str]:
        """Return the keys of all objects of a tenant, sorted."""
        names = {name for part in self.names_in_steps(salt, b"", only_complete=True) for name in part}
        return [name.decode(errors="replace") for name in sorted(names)]

    def object_pages(self, key: str, salt: str = "") -> Keys | None:
        """Return the keys of the pages of an object of this node; None if there is none."""
        head = self.find_head(salt, encode_name(key))
        return head.about.page_keys(root_of_salt(salt), head.frame_class.page_tokens) if head is not None else None

    def _check_open(self) -> None:
        self._node.check_open()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def names_in_steps(
        self, salt: str, start: bytes, only_complete: bool = False, groups_last: bool = False
    ) -> Iterator[list[bytes]]:
        """Yield the names of this node's objects that begin with ``start``, in a list for every ``LOOK_PAGES`` pages of
        the node. An object may be listed twice if it is in two tiers, or if it is moved in the meantime.

        Args:
            only_complete: leave out members of groups that are not complete.
            groups_last: yield members of groups in lists of their own, of ``BATCH_MAX`` or more names except for the
                last one. If members are deleted by one request, all of them count.
        """
        mapped, root = self._node.mapped(), root_of_salt(salt)
        if mapped is None:
            return
        mapped.published.take_in(mapped.channel)
        names, members = dict[bytes, ObjectGroup](), list[bytes]()
        for count, row in enumerate(mapped.object_rows(), 1):
            head = read_row(row) if row is not None else None  # the root and the description of the object
            if head is not None and head[0] == root and head[1].name.startswith(start):
                if groups_last and head[1].group != NO_GROUP:
                    members.append(head[1].name)
                else:
                    names[head[1].name] = head[1].group
            if count % LOOK_PAGES == 0:
                yield _complete(mapped, names) if only_complete else list(names)
                names.clear()
                if len(members) >= BATCH_MAX:
                    yield members
                    members = []
        yield _complete(mapped, names) if only_complete else list(names)
        if members:
            yield members

    def find_head(self, salt: str, name: bytes) -> ProvenHead | None:
        """Return the head of an object of this node; None if there is none."""
        root, mapped = root_of_salt(salt), self._node.mapped()
        return find_head(mapped, root, name) if mapped is not None else None

    def page_reader(self, mapped: MappedNode, salt: str, head: ProvenHead) -> Callable[[int, Rows], bool]:
        """Return a function that copies pages of an object of this node into rows ``[pages, page_bytes]``, starting at
        a page. The function returns False if one of the pages is missing or not proven. The last page is the head."""
        about, frame_class = head.about, head.frame_class
        cache = self._object_cache(salt, frame_class, bool(mapped.header.verify_reads))
        pieces = about.piece_keys(cache.root, frame_class.page_tokens) if about.pieces else None
        head_keys = about.head_keys(cache.root, frame_class.page_tokens)

        def read(first: int, rows: Rows) -> bool:
            count = min(len(rows), about.pieces - first)
            if (
                pieces is not None
                and count
                and cache.get(pieces[first : first + count], out=rows[:count]).pages < count
            ):
                return False
            return count == len(rows) or bool(cache.get(head_keys, out=rows[count:]).pages)

        return read

    def _find_in_pool(self, names: Sequence[bytes], salt: str, local: bool) -> list[ObjectFacts | None]:
        """Return the facts about objects of other nodes; None for each if the call is ``local``."""
        pool = self._node.pool_objects
        return pool.find(salt, names) if pool is not None and not local else [None] * len(names)

    def _read_pool(
        self, names: Sequence[bytes], targets: Sequence[Scattered | None], salt: str
    ) -> tuple[list[int | None], list[Rows | None]]:
        """Read objects of other nodes into ``targets``. Values for device memory are received in host memory first.

        Returns:
            The size of each object, None if no other node has it; and its value as a new array, where ``targets`` has
            None or device memory.

        Raises:
            InvalidRequest: a target is too small.
            DeviceLost, DeadlineExceeded: see ``Scattered.write``.
        """
        pool = self._node.pool_objects
        assert pool is not None, "the caller has checked it"

        values: list[Rows | None] = [None] * len(names)

        def target_of(position: int, facts: ObjectFacts) -> Scattered:
            target = targets[position]
            if target is not None and not target.on_device:
                return target
            value = values[position] = empty(facts.value_bytes)
            return Scattered([value])

        limits = [target.nbytes if target is not None else VALUE_BYTES_MAX for target in targets]
        found = pool.read(salt, names, limits, target_of)
        sizes = [facts.value_bytes if facts is not None else None for facts in found]
        for size, target in zip(sizes, targets, strict=True):
            if size is not None and target is not None and target.nbytes < size:
                raise InvalidRequest("out", f"must have at least {size} bytes for the value (got {target.nbytes})")
        on_host: list[Scattered | None] = []
        for size, target, value in zip(sizes, targets, values, strict=True):
            if size is not None and target is not None and value is not None:
                target.write(0, value)
            on_host.append(target if value is None else Scattered([value]))
        self._cache_twice_read(names, found, on_host, salt)
        return sizes, [value if size is not None else None for size, value in zip(sizes, values, strict=True)]

    def _cache_twice_read(
        self,
        names: Sequence[bytes],
        found: Sequence[ObjectFacts | None],
        targets: Sequence[Scattered | None],
        salt: str,
    ) -> None:
        """Store values of other nodes on this node, if this machine has read them before, and if they fit into a
        request. Nothing is stored if the node does not answer at once, or has no space."""
        pool, mapped = self._node.pool_objects, self._node.mapped()
        if pool is None or mapped is None or not accepts_hints(mapped):
            return
        root = object_root(salt)
        again = pool.read_before([key_hash(root, name) for name in names])
        copies = [
            (name, Scattered([*target.views(0, facts.value_bytes)]), facts.group, facts.nonce)
            for name, facts, target, is_again in zip(names, found, targets, again, strict=True)
            if is_again and facts is not None and target is not None and facts.value_bytes <= BATCH_BYTES
        ]
        if copies:
            with contextlib.suppress(Unavailable, InvalidRequest):
                name_objects(mapped, root, salt, timeout_s=LOCAL_WAIT_S)
                copied, sources, groups, nonces = zip(*copies, strict=True)
                ObjectsPut(mapped, root, copied, sources, False, False, groups, nonces, LOCAL_WAIT_S).result()

    def _object_cache(self, salt: str, frame_class: FrameClass, verify: bool) -> LocalCache:
        """Return the cache through which pages of this class are read, created at its first use."""
        cache_key = salt, frame_class, verify
        cache = self._object_caches.get(cache_key)
        if cache is None:
            if len(self._object_caches) >= CACHES_MAX:
                self._object_caches.clear()
            cache = _ObjectCache(self._node, frame_class.page_bytes, frame_class.page_tokens, salt, verify)
            self._object_caches[cache_key] = cache
        return cache

    def _read(self, mapped: MappedNode, salt: str, head: ProvenHead, target: Scattered) -> bool:
        """Copy the value of an object into ``target``. Return False if one of its pages is missing or not proven.

        A head in DRAM is copied directly, and all other pages are read as pages of a cache. The head contains the end
        of the value.
        """
        about, frame_class = head.about, head.frame_class
        page_bytes, width = frame_class.page_bytes, frame_class.page_tokens
        head_start, verify = about.pieces * page_bytes, bool(mapped.header.verify_reads)
        is_in_place = head.extent is not None and not verify
        if is_in_place and not head.copy_to(target, head_start):
            return False
        if is_in_place and not about.pieces:
            return True
        cache = self._object_cache(salt, frame_class, verify)
        root = cache.root
        if not is_in_place:
            page = empty((1, page_bytes))
            if not cache.get(about.head_keys(root, width), out=page).pages:
                return False
            target.write(head_start, page[0, : about.value_bytes - head_start])
        if not about.pieces:
            return True
        keys, piece = about.piece_keys(root, width), 0
        # For pieces that are not in one part of the target, or whose part is device memory.
        staging = empty((max(1, BOUNCE_BYTES // page_bytes) if target.on_device else 1, page_bytes))
        while piece < about.pieces:
            rows = target.rows(piece * page_bytes, about.pieces - piece, page_bytes)
            is_staged = rows is None
            if rows is None:
                rows = staging[: about.pieces - piece]
            if cache.get(keys[piece : piece + len(rows)], out=rows).pages != len(rows):
                return False
            if is_staged:
                target.write(piece * page_bytes, rows.reshape(-1))
            piece += len(rows)
        return True

    def _delete_pages(self, addresses: list[bytes]) -> bytes:
        """Delete the objects with heads at these addresses, or pieces. Return the status of each."""
        mapped = self._node.writable()
        reply = mapped.exchange(Op.DELETE, count=len(addresses), body=(b"".join(addresses),))
        assert len(reply.body) >= statuses_bytes(len(addresses))
        return bytes(reply.body[: len(addresses)])


def bury(node: LocalNode, tombstones: Sequence[Tombstone], timeout_s: float | None = None) -> bytes:
    """Let a node of this machine keep tombstones, and return a status for each, see ``Op.BURY``. Each request may take
    ``timeout_s``; None for the node's. Raises as ``MappedNode.exchange``."""
    statuses = b""
    for start in range(0, len(tombstones), BATCH_MAX):
        part = tombstones[start : start + BATCH_MAX]
        body = pack_tombstones(part, time.monotonic_ns())
        reply = node.writable().exchange(Op.BURY, count=len(part), body=(body,), timeout_s=timeout_s)
        statuses += bytes(reply.body[: len(part)])
    return statuses


class _ObjectPut:
    """A put of one object, whose pieces and head are sealed by separate requests. The constructor copies the value and
    sends the requests, and ``result`` waits for them."""

    def __init__(
        self,
        store: LocalObjects,
        mapped: MappedNode,
        root: bytes,
        name: bytes,
        source: Scattered,
        replace: bool,
        group: ObjectGroup,
        stamp: int,
        in_pool: bool,
    ) -> None:
        self.stamp, self._in_pool = stamp, in_pool
        self._store, self._mapped, self._root, self._name = store, mapped, root, name
        self._source, self._replace, self._group = source, replace, group
        self._may_replace = replace
        self._deadline = time.monotonic() + mapped.timeout_s
        self._pieces: PiecesPut | None = None
        self._head: HeadPut | None = None
        self._replaced = b""
        self._start()

    def _start(self) -> None:
        """Copy the value, and send its pieces and its head. If the object exists and is not to be replaced, do
        nothing."""
        old_head = stored_head(self._mapped, self._root, self._name)
        group = old_head.about.group if old_head is not None else self._group
        is_hidden = group != self._group and group.members and group not in complete_groups(self._mapped, [group])
        self._may_replace = self._replace or bool(is_hidden)  # no reader finds a member of an incomplete group
        if old_head is not None and not self._may_replace:
            self._head = None
            return
        self._replaced = old_head.address if old_head is not None else bytes(ADDRESS_BYTES)
        frame_class, about = plan_object(self._mapped, self._name, self._source.nbytes, self._group, self.stamp)
        keys = about.piece_keys(self._root, frame_class.page_tokens) if about.pieces else None
        if keys is not None:
            self._pieces = PiecesPut(self._mapped, keys, frame_class)
            self._pieces.send_from(self._source, about.pieces)
        head_keys = about.head_keys(self._root, frame_class.page_tokens)
        head_keys.parent = keys.hashes[-1] if keys is not None else self._root
        self._head = HeadPut(self._mapped, head_keys, frame_class, self._replaced, self._in_pool)
        self._head.send_from(self._source, about.pieces * frame_class.page_bytes)

    def result(self) -> bool:
        """Wait for the put, and return whether it has stored the object.

        Raises:
            QuotaExceeded, OutOfSpace: there is no space for the object.
            DeadlineExceeded: the stored object could not be replaced in time.
        """
        while self._head is not None:
            pieces, head = self._pieces, self._head
            has_pieces = pieces is None or pieces.stored_pages() == pieces.pieces
            try:
                if head.stored_pages() and has_pieces:
                    return True
            except InvalidRequest:  # the node refuses the group
                self._delete_pieces()
                raise
            self._delete_pieces()
            if not (head.is_busy or (self._may_replace and head.is_present)):
                if head.is_present:
                    return False
                if head.is_over_quota or (pieces is not None and pieces.is_over_quota):
                    raise QuotaExceeded(OVER_QUOTA)
                raise OutOfSpace("the object does not fit now: the store is full of pages that cannot be evicted")
            if time.monotonic() >= self._deadline:
                raise DeadlineExceeded("the stored object is being moved between tiers, or NVMe is being scanned")
            time.sleep(BUSY_PAUSE_S)
            self._pieces = None
            self.stamp = new_stamp(self._mapped, self.stamp)
            self._start()
        return False

    def _delete_pieces(self) -> None:
        """Delete the pieces that are stored, by the last one of them."""
        last = self._pieces.last_address() if self._pieces is not None else None
        if last is not None:
            self._store._delete_pages([last])


def _complete(mapped: MappedNode, groups: dict[bytes, ObjectGroup]) -> list[bytes]:
    """Return the names among ``groups`` that have no group, or a complete one."""
    complete = complete_groups(mapped, [group for group in groups.values() if group.members])
    return [name for name, group in groups.items() if not group.members or group in complete]


def _check_size(mapped: MappedNode, name: bytes, size: int) -> None:
    """Raise InvalidRequest if a value does not even fit into empty DRAM."""
    extent_bytes, positions = int(mapped.header.extent_bytes), int(mapped.header.positions)
    frame_class = class_for(name, size, extent_bytes)
    frames = positions * (extent_bytes // frame_class.frame_bytes)
    if pieces_of(size, frame_class.page_bytes) >= frames:
        raise InvalidRequest("data", f"must fit the node's DRAM while it is put (got {size} bytes)")
