"""Leases: deadlines until which named pages keep their frames. Only the node grants them; lookups never take one."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.model.replica import Address

LeaseName = tuple[int, int]  # (session, lease id chosen by the client)


@dataclass(slots=True)
class GrantedLease:
    """A lease, from take until release, deadline, or the end of its session."""

    addresses: list[Address]
    until_ns: int


class LeaseTable:
    """All leases, and the frames that they hold."""

    def __init__(self) -> None:
        self.leases: dict[LeaseName, GrantedLease] = {}
        self._frames: dict[tuple[int, int], set[LeaseName]] = {}

    def __len__(self) -> int:
        return len(self.leases)

    def holds(self, extent: int, frame: int) -> bool:
        """Return True if a lease holds this frame."""
        return (extent, frame) in self._frames

    def extents(self) -> set[int]:
        """Return the extents with a leased frame."""
        return {extent for extent, _ in self._frames}

    def frames(self) -> set[tuple[int, int]]:
        """Return (extent, frame) of every leased frame."""
        return set(self._frames)

    def add(self, name: LeaseName, addresses: list[Address], until_ns: int) -> list[int]:
        """Take a lease, or add pages to one. Return, for each frame, the latest deadline of all its leases."""
        lease = self.leases.get(name)
        if lease is None:
            self.leases[name] = GrantedLease(list(addresses), until_ns)
        else:
            lease.addresses += addresses
            lease.until_ns = max(lease.until_ns, until_ns)
        frames, untils = self._frames, []
        for extent, frame, _ in addresses:
            names = frames.get((extent, frame))
            if names is None:
                frames[extent, frame] = {name}
                untils.append(until_ns)
            else:
                names.add(name)
                untils.append(self.until_ns(extent, frame))
        return untils

    def until_ns(self, extent: int, frame: int) -> int:
        """Return the latest deadline over the frame's leases; 0 if it has none."""
        return max((self.leases[name].until_ns for name in self._frames.get((extent, frame), ())), default=0)

    def end(self, name: LeaseName) -> list[Address]:
        """End a lease, and return the addresses that no longer have a lease. Unknown names are ignored."""
        lease = self.leases.pop(name, None)
        if lease is None:
            return []
        unleased = []
        for address in lease.addresses:
            frame = address[:2]
            names = self._frames.get(frame)
            if names is None:
                continue
            names.discard(name)
            if not names:
                del self._frames[frame]
                unleased.append(address)
        return unleased

    def expired(self, now_ns: int) -> list[LeaseName]:
        """Return the leases past their deadline."""
        return [name for name, lease in self.leases.items() if lease.until_ns <= now_ns]

    def of_session(self, session: int) -> list[LeaseName]:
        """Return the leases of a session."""
        return [name for name in self.leases if name[0] == session]
