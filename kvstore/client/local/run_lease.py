"""RunLease: a lease of proven frames, as their node knows it; taken, renewed and given back."""

from __future__ import annotations

import contextlib
import secrets
from typing import Final

from kvstore.client.local.node import Mapped
from kvstore.client.local.proof import Run, address_parts
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.replica import ADDRESS_BYTES, Status
from kvstore.rpc.control import NO_REPLY, Op, encode
from kvstore.tier.header import DaemonState

RELEASE_S: Final = 0.2  # a release that cannot be sent is no loss: the deadline passes by itself
_OK = int(Status.OK)


class RunLease:
    """Keeps the frames of some runs from being granted to others. Of one thread at a time.

    Life: made -> ``take`` -> ``renew``, any number of times -> ``release``, or its deadline, or this process's end.

    Args:
        number: of a lease that was taken before; 0: a new one.
    """

    def __init__(self, mapped: Mapped, ttl_ms: int, number: int = 0) -> None:
        self.number = number or secrets.randbits(63) | 1
        self._mapped = mapped
        self._ttl_ms = ttl_ms
        self._answered = bool(number)  # no request for it is on its way: what is published would overtake that

    def take(self, runs: list[Run]) -> int:
        """Returns for how many leading pages it was given: those of them that are unchanged now are leased. Raises as
        ``Mapped.exchange``."""
        return self._publish(runs) or self._ask(runs)

    def renew(self, runs: list[Run]) -> bool:
        """Move its deadline. False: the node did not know it any more (a restarted one does not), and it was taken
        anew: runs may have changed. Raises as ``Mapped.exchange``."""
        if self._mapped.exchange(Op.RENEW, a=self.number, b=self._ttl_ms).op == Status.OK:
            return True
        self._ask(runs)
        return False

    def release(self) -> None:
        """End it."""
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed first
            self._release()

    def _release(self) -> None:
        """Published where that can be: the node hears of it before it decides anything, and nobody has to wake it."""
        mapped, publisher = self._mapped, self._mapped.channel.publisher
        if self._answered and publisher is not None:
            request = encode(Op.RELEASE, 0, a=self.number, flags=NO_REPLY)
            if publisher.publish(request, [], mapped.header):
                return
        mapped.channel.request(Op.RELEASE, a=self.number, flags=NO_REPLY, timeout_s=RELEASE_S)

    def _publish(self, runs: list[Run]) -> int:
        """Take the lease without a message; for how many pages it is, if they are unchanged now. 0: ask. See
        ``service.node.deciding``."""
        mapped, publisher, parts = self._mapped, self._mapped.channel.publisher, address_parts(runs)
        if publisher is None or len(parts) > 1:
            return 0
        if mapped.header.state != DaemonState.READY:
            return 0
        count = len(parts[0]) // ADDRESS_BYTES
        request = encode(Op.LEASE, 0, count=count, a=self.number, b=self._ttl_ms, flags=NO_REPLY, body=parts)
        if not publisher.publish(request, [], mapped.header) or publisher.deciding:
            return 0  # a lease that is published and asked for as well is one lease
        self._answered = True
        return count

    def _ask(self, runs: list[Run]) -> int:
        held, self._answered = 0, False
        for part in address_parts(runs):
            count = len(part) // ADDRESS_BYTES
            message = self._mapped.exchange(Op.LEASE, count=count, a=self.number, b=self._ttl_ms, body=(part,))
            statuses = bytes(message.body[:count])
            if statuses.count(_OK) != count:
                held += next(i for i, status in enumerate(statuses) if status != _OK)
                break
            held += count
        self._answered = True
        return held
