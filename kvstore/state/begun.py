"""Begun: granted frames that a client is writing layer by layer, and whose pages readers may follow already.

A writer that is alone with its pages asks for nothing: it writes into frames that were granted ahead, says so, and
seals them like a put. What it says may come late, or never. Then its readers wait for the seal; nothing else depends
on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.model.replica import ROOT, Address, keys_of
from kvstore.state import events as ev
from kvstore.state.client_session import ClientSession
from kvstore.state.pending import GROUP, Pending
from kvstore.state.writing import Writing, named_twice


class BegunPages:
    """The begun pages of a node. Part of ``NodeState``.

    Life of a frame here: granted -> begun, a reservation of its session -> granted again, when its page is about to
    be sealed, is given up, or was not sealed by its deadline. A session that ends takes both with it.
    """

    def __init__(self, writing: Writing, sessions: Mapping[int, ClientSession]) -> None:
        self.writing = writing
        self.space = writing.space
        self.sessions = sessions

    def begin(self, event: ev.Begin) -> list[ev.Instruction]:
        """See ``events.Begin``."""
        keys, root = keys_of(event.rows), event.rows[0, ROOT].tobytes()
        if len(set(keys)) != len(keys) or len(set(event.addresses)) != len(keys):
            return [named_twice()]
        session = self.sessions.get(event.session)
        if session is None or not (event.parent == root or self.space.find_in(root, event.parent) is not None):
            return [ev.Reply()]
        new = [i for i, address in enumerate(event.addresses) if address in session.granted]
        new = [i for i in new if self.space.find(keys[i]) is None]
        number = self.writing.tenants.number(root)
        new = [i for i in new if self._may_expect(number, event.addresses[i])]
        if not new:
            return [ev.Reply()]
        parents = [event.parent, *keys[:-1]]
        addresses = [event.addresses[i] for i in new]
        self.space.expect(addresses, number)
        group, until_ns = GROUP | min(address.generation for address in addresses), event.now_ns + event.ttl_ns
        for i, address in zip(new, addresses, strict=True):
            session.granted.discard(address)
            self.space.segment.extents[address.extent].pool.granted_ahead -= 1
            writing = {0: event.session}
            page = Pending(keys[i], parents[i], parents[i] == root, address, group, 1, until_ns, writing)
            page.root, page.begun = root, True
            self.writing.hold_parent(page)
            self.writing.pending.add(page)
        parents = [parents[i] for i in new]
        reserved = ev.WriteReserved(addresses, event.rows[new], parents, event.session, group, 0, 1, until_ns)
        return [reserved, ev.Reply()]

    def _may_expect(self, number: int, address: Address) -> bool:
        """The frame may count for that root: its tenant has no quota, or was charged with the frame already. A page in
        any other is not begun: whether there is room for it its seal will tell."""
        roots = self.space.holdings.roots
        share, owner = roots[number].share, self.space.segment.extents[address.extent].owner[address.frame]
        return share.quota is None or (owner > 0 and roots[owner].share is share)

    def withdraw(self, session: int, addresses: list[Address], out: list[ev.Instruction]) -> None:
        """Frames that the session has begun to write are merely granted again."""
        for address in addresses if self.writing.pending else ():
            page = self.writing.pending.by_address.get(address)
            if page is not None and page.begun and not page.doomed and page.writing.get(0) == session:
                self._withdraw(page, out)

    def expire(self, now_ns: int, out: list[ev.Instruction]) -> None:
        """Pages that were not sealed in time are shown to readers no longer."""
        for page in list(self.writing.pending.by_address.values()):
            if page.begun and not page.doomed and page.until_ns <= now_ns:
                self._withdraw(page, out)

    def _withdraw(self, page: Pending, out: list[ev.Instruction]) -> None:
        self.writing.unbegin(page, out)
        self.sessions[page.writing[0]].granted.add(page.address)
        self.space.segment.extents[page.address.extent].pool.granted_ahead += 1
