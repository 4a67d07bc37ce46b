"""Groups: which members of groups of objects are stored, and which groups are complete. Part of ``NodeState``.

A group is complete once as many of its members are stored, in any tier, as its count says. The index lists exactly the
complete groups, and a reader finds a member only while its group is listed. The order of the instructions makes this
true at every moment, and after a kill: a group is listed after all its members, and it leaves the list before the first
of them leaves. When a group has lost a member, its other members are *broken*: they can no longer be used, and are
removed next. Worked example, a group of three::

    put a, b      a, b            not listed: neither is found
    put c         a, b, c         WriteSealed(c), ListGroups: all three are found
    evict b       a, c (broken)   UnlistGroups, WriteState(b): none is found
    next event    -               a and c are removed; or if b is put again before that, the group is complete again
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from kvstore.model.objects import MEMBERS_MAX, ObjectGroup, groups_in
from kvstore.model.replica import Address, FrameClass, Status, Tier
from kvstore.state import instructions as do
from kvstore.state.space import Space

ClassOf = Callable[[Address], FrameClass | None]


class StoredGroup:
    """The stored members of one group.

    Attributes:
        keys: the keys of the members' heads.
        broken: the members to be removed next, because the group has lost another one.
        is_listed: the index lists the group.
    """

    __slots__ = ("group", "keys", "broken", "is_listed")

    def __init__(self, group: ObjectGroup) -> None:
        self.group = group
        self.keys: dict[bytes, None] = {}  # in the order in which they were stored
        self.broken: dict[bytes, None] = {}
        self.is_listed = False

    @property
    def is_complete(self) -> bool:
        """True if all members are stored."""
        return len(self.keys) == self.group.members


class Groups:
    """The groups of which the node has a member. ``spaces`` are its tiers."""

    def __init__(self, spaces: Iterable[Space], class_of: ClassOf) -> None:
        self._spaces = tuple(spaces)
        self._class_of = class_of
        self._groups: dict[bytes, StoredGroup] = {}  # by the group's hash
        self._group_of: dict[bytes, StoredGroup] = {}  # by a member's key
        self._broken: OrderedDict[StoredGroup, None] = OrderedDict()  # groups with broken members
        self._joined: dict[bytes, None] = {}  # members that the current event has sealed
        self._lost: dict[StoredGroup, set[bytes]] = {}  # members that the current event has removed from all tiers

    # --- questions --------------------------------------------------------------------------------------------------

    def refusal(self, group: ObjectGroup, keys: list[bytes]) -> do.Reply | None:
        """Return the reply that refuses to seal these members of a group; None if they may be sealed."""
        stored = self._groups.get(group.hash)
        if group.members > MEMBERS_MAX:
            return _invalid("count", f"must be at most {MEMBERS_MAX} (got {group.members})")
        if stored is None or len(stored.broken) == len(stored.keys):
            return None
        if stored.group.members != group.members:
            known = stored.group.members
            return _invalid("count", f"must be {known}, as for other members of the group (got {group.members})")
        if len({**stored.keys, **dict.fromkeys(keys)}) > group.members:
            return _invalid("group", f"must have room for the new members (got all of its {group.members} members)")
        return None

    def leaving_with(self, key: bytes) -> list[bytes]:
        """Return the keys of the objects that are deleted with this one: all members of its group."""
        stored = self._group_of.get(key)
        return list(stored.keys) if stored is not None else [key]

    def replaced_with(self, key: bytes) -> list[bytes]:
        """Return the keys of the objects that leave when this one is replaced. These are the members of its group if it
        is complete, so that no reader finds old and new values in one group."""
        stored = self._group_of.get(key)
        return list(stored.keys) if stored is not None and stored.is_complete else [key]

    def broken_members(self, most: int) -> list[bytes]:
        """Return up to ``most`` members that are to be removed next."""
        found: list[bytes] = []
        for stored in list(self._broken):
            found += list(stored.broken)[: most - len(found)]
            self._broken.move_to_end(stored)  # members that cannot be removed now must not block others
            if len(found) == most:
                break
        return found

    def spare(self, key: bytes) -> None:
        """Let a broken member stay until it is evicted, or until its group is complete again."""
        stored = self._group_of[key]
        stored.broken.pop(key, None)
        self._tidy(stored)

    def listed(self) -> Iterator[ObjectGroup]:
        """Yield the groups that the index lists."""
        return (stored.group for stored in self._groups.values() if stored.is_listed)

    # --- changes ----------------------------------------------------------------------------------------------------

    def restore(self, key: bytes, group: ObjectGroup) -> None:
        """At startup, take in a stored member. Call ``settle`` after the last one."""
        self._join(key, group)
        self._joined.clear()

    def settle(self) -> None:
        """At startup, after all members are taken in: complete groups count as listed."""
        for stored in self._groups.values():
            stored.is_listed = stored.is_complete

    def follow(self, out: list[do.Instruction], now_ns: int) -> list[do.Instruction]:
        """Take in which members a decision has sealed and removed. Return its instructions with those that change the
        list of groups."""
        for instruction in out:
            if type(instruction) is do.WriteSealed:
                self._follow_sealed(instruction)
            elif type(instruction) is do.Unindex and self._group_of:
                for key in instruction.keys:
                    self._leave(key, instruction.tier)
        if not self._joined and not self._lost:
            return out
        touched = dict.fromkeys([*self._lost, *(self._group_of[key] for key in self._joined if key in self._group_of)])
        unlisted = [stored for stored in self._lost if stored.is_listed]
        for stored in unlisted:
            stored.is_listed = False
        for stored, lost in self._lost.items():
            if lost:
                stored.broken |= dict.fromkeys(key for key in stored.keys if key not in self._joined)
            self._tidy(stored)
        listed = [stored for stored in touched if stored.is_complete and not stored.is_listed]
        for stored in listed:
            stored.is_listed = True
            stored.broken.clear()
            self._tidy(stored)
        self._joined.clear()
        self._lost.clear()
        if unlisted:
            out = [do.UnlistGroups([stored.group.hash for stored in unlisted]), *out]
        if listed:
            has_reply = type(out[-1]) is do.Reply
            out.insert(len(out) - has_reply, do.ListGroups([stored.group for stored in listed], now_ns))
        return out

    def _follow_sealed(self, instruction: do.WriteSealed) -> None:
        frame_class = self._class_of(instruction.addresses[0])
        if instruction.rows is None or frame_class is None or not frame_class.holds_objects:
            return
        for row, group in groups_in(instruction.rows).items():
            if instruction.keys[row] not in self._group_of:  # else a copy of a member that another tier has
                self._join(instruction.keys[row], group)

    def _join(self, key: bytes, group: ObjectGroup) -> None:
        """Take in a member. If it contradicts its group, it is broken; only the scan and a start find such members."""
        if key in self._group_of:
            return
        stored = self._groups.get(group.hash)
        if stored is None or (stored.group != group and len(stored.broken) == len(stored.keys)):
            stored = self._groups[group.hash] = StoredGroup(group)
        is_valid = stored.group == group and not stored.is_complete and group.members <= MEMBERS_MAX
        if not is_valid:
            stored = StoredGroup(group)
            stored.broken[key] = None
            self._broken[stored] = None
        stored.keys[key] = None
        self._group_of[key] = stored
        self._joined[key] = None
        self._lost.get(stored, set()).discard(key)

    def _leave(self, key: bytes, tier: Tier) -> None:
        """Take in that a page has left a tier. A member is lost once no tier has it."""
        stored = self._group_of.get(key)
        if stored is None or any(space.pages.find(key) is not None for space in self._spaces if space.tier != tier):
            return
        lost = self._lost.setdefault(stored, set())
        if key not in stored.broken:  # else the others were broken before, and new members may have come since
            lost.add(key)
        del self._group_of[key]
        for keys in (stored.keys, stored.broken, self._joined):
            keys.pop(key, None)

    def _tidy(self, stored: StoredGroup) -> None:
        """List a group as broken if it has broken members, and forget it if it has no members."""
        if stored.broken:
            self._broken[stored] = None
        else:
            self._broken.pop(stored, None)
        if not stored.keys and self._groups.get(stored.group.hash) is stored:
            del self._groups[stored.group.hash]

    # --- laws -------------------------------------------------------------------------------------------------------

    def findings(self, entries: Iterable[bytes]) -> list[str]:
        """Check that exactly the stored members are known, and that the index lists exactly the complete groups.

        ``entries`` are the hashes that the index lists.
        """
        wrong: list[str] = []
        recorded = {key: group for space in self._spaces for key, group in space.pages.records.memberships()}
        known = {key: stored.group for key, stored in self._group_of.items()}
        if recorded != known:
            wrong.append(f"{len(recorded)} members are recorded, {len(known)} are known, and they are not the same")
        for key, stored in self._group_of.items():
            if key not in stored.keys:
                wrong.append(f"member {key.hex()}: its group does not have it")
        for stored in self._groups.values():
            if stored.is_listed != stored.is_complete:
                count = f"{len(stored.keys)} of {stored.group.members} members"
                wrong.append(f"group {stored.group.hash.hex()}: has {count}, listed: {stored.is_listed}")
            if (
                any(self._group_of.get(key) is not stored for key in stored.keys)
                or not stored.keys.keys() >= stored.broken.keys()
            ):
                wrong.append(f"group {stored.group.hash.hex()}: its members do not know it")
        listed = {group.hash for group in self.listed()}
        if set(entries) != listed:
            wrong.append(f"the index lists {len(set(entries))} groups, {len(listed)} are complete")
        return wrong


def _invalid(field: str, reason: str) -> do.Reply:
    return do.Reply(Status.INVALID, detail={"field": field, "reason": reason})
