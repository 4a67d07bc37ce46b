"""The methods of store.proto, and the code that serves them."""

from __future__ import annotations

from typing import Final

import grpc

from kvstore.service.api.admin import AdminCalls
from kvstore.service.api.objects import ObjectCalls
from kvstore.service.api.page_watch import PageWatch
from kvstore.service.api.pages import PageCalls
from kvstore.service.api.reservations import Leases, Reservations
from kvstore.serving.gate import Gate
from kvstore.serving.methods import Sending, Taking, Unary, serving
from kvstore.serving.weighing import weighed

SERVICE: Final = "kvstore.v1.Store"


def handlers(
    gate: Gate,
    pages: PageCalls,
    reservations: Reservations,
    leases: Leases,
    objects: ObjectCalls,
    admin: AdminCalls,
    watch: PageWatch,
) -> grpc.GenericRpcHandler:
    """The whole service, every call through the gate."""
    unary: dict[str, Unary] = {
        "About": pages.about,
        "Lookup": pages.lookup,
        "Prefetch": pages.prefetch,
        "Reserve": reservations.reserve,
        "Seal": reservations.seal,
        "Revoke": reservations.revoke,
        "Lease": leases.lease,
        "Renew": leases.renew,
        "Release": leases.release,
        "ContainsObjects": objects.contains,
        "DeleteObjects": objects.delete,
        "ClearObjects": objects.clear,
        "Stats": admin.stats,
        "Pages": admin.pages,
        "Evict": admin.evict,
        "Pin": admin.pin,
        "Unpin": admin.unpin,
        "Pins": admin.pins,
        "Verify": admin.verify,
        "Admin": admin.admin,
    }
    sending: dict[str, Sending] = {
        "Read": pages.read,
        "GetObject": objects.get,
        "Watch": admin.watch,
        "WatchPages": watch.pages,
    }
    taking: dict[str, Taking] = {"Write": pages.write, "PutObject": objects.put}
    return serving(gate, SERVICE, weighed(SERVICE, unary), weighed(SERVICE, sending), taking)
