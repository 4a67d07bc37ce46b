"""Who may do what over gRPC: every call with the right identity and with each kind of wrong one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.pb import store_pb2 as pb
from tests.helpers import api
from tests.helpers.api import Certificates, Client, pages_message
from tests.helpers.content import chain, contents
from tests.helpers.processes import Daemon, Machine, wait_until

Code = grpc.StatusCode

KEYS = chain(1, 4, salt="a")
MINE = pages_message(KEYS, salt="a")
UNSTORED = pages_message(chain(2, 2, salt="a"), salt="a")
EVICT = pb.EvictRequest(pages=1, dry_run=True)

# name -> a request of tenant a, or of an operator.
OF_A: dict[str, Callable[[], Any]] = {
    "Lookup": lambda: pb.LookupRequest(pages=MINE),
    "Read": lambda: pb.ReadRequest(pages=MINE),
    "Prefetch": lambda: pb.LookupRequest(pages=MINE),
    "Write": lambda: api.write_messages(MINE, contents(KEYS)),
    "Reserve": lambda: pb.ReserveRequest(pages=UNSTORED, ttl_ms=500),
    "Lease": lambda: pb.LeaseRequest(pages=MINE, ttl_ms=500),
    "PutObject": lambda: api.put_messages("k", b"value", "a", replace=True),
    "GetObject": lambda: pb.GetObjectRequest(key="k", salt="a"),
    "ContainsObjects": lambda: pb.ObjectKeys(keys=["k"], salt="a"),
    "DeleteObjects": lambda: pb.ObjectKeys(keys=["none"], salt="a"),
    "ClearObjects": lambda: pb.ClearObjectsRequest(prefix="no", salt="a"),
    "Pin": lambda: pb.PinRequest(prompt=MINE, ttl_s=1.0),
    "Unpin": lambda: pb.UnpinRequest(prompt=MINE),
}
OF_OPERATORS: dict[str, Callable[[], Any]] = {
    "Stats": pb.Empty,
    "Pages": lambda: pb.PagesRequest(limit=10),
    "Evict": lambda: EVICT,
    "Pins": pb.Empty,
    "Verify": pb.Empty,
    "Watch": lambda: pb.WatchRequest(after=0),
    "WatchPages": pb.Empty,
    "Admin": lambda: api.struct(call="stats"),
}
BY_NUMBER = ("Seal", "Revoke", "Renew", "Release")  # of what was reserved or leased
FOR_ALL: dict[str, Callable[[], Any]] = {"About": pb.AboutRequest}
KEEPS_ON = ("Watch", "WatchPages")


@dataclass
class Callers:
    """A daemon, and who calls it, by the names of their identities; ``unknown``: how strangers' calls end."""

    daemon: Daemon
    known: dict[str, Client]
    unknown: dict[str, Code]

    def __getitem__(self, name: str) -> Client:
        return self.known[name]

    def close(self) -> None:
        for client in self.known.values():
            client.close()


def talkative(folder: Path) -> str:
    """A configuration that logs all there is."""
    path = folder / "node.toml"
    path.write_text('[node]\nlog_level = "debug"\n')
    return str(path)


def by_token(machine: Machine, folder: Path) -> Callers:
    """Everybody shows a token."""
    identities = api.identities_file(folder)
    daemon, address = api.serve_api(machine, identities=identities, config=talkative(folder))
    made = {name: Client(address, f"{name}-token") for name in ("a", "b", "op", "late", "wrong")}
    made |= {"nobody": Client(address), "empty": Client(address, "")}
    return Callers(daemon, made, dict.fromkeys(("nobody", "empty", "wrong", "late"), Code.UNAUTHENTICATED))


def by_certificate(machine: Machine, folder: Path) -> Callers:
    """Everybody shows a certificate."""
    shown = Certificates(folder, ("a", "b", "op", "late", "wrong"))
    identities = api.identities_file(folder, api.TENANTS_BY_CERTIFICATE)
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    flags = {flag: shown.path(name) for flag, name in files.items()}
    daemon, address = api.serve_api(machine, identities=identities, config=talkative(folder), **flags)
    made = {name: Client(address, None, shown.credentials(name)) for name in shown.names}
    made |= {
        "nobody": Client(address, None, shown.credentials()),
        "token": Client(address, "a", shown.credentials("a")),
    }
    unknown = dict.fromkeys(("wrong", "late", "token"), Code.UNAUTHENTICATED)
    return Callers(daemon, made, {**unknown, "nobody": Code.UNAVAILABLE})


@pytest.fixture(params=[by_token, by_certificate], ids=lambda made: made.__name__)
def everybody(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> Iterator[Callers]:
    made = request.param(machine, tmp_path)
    yield made
    made.close()


@pytest.fixture
def clients(machine: Machine, tmp_path: Path) -> Iterator[Callers]:
    made = by_token(machine, tmp_path)
    yield made
    made.close()


def number_requests(a: Client) -> dict[str, Any]:
    """Requests that name what tenant a holds."""
    reservation = a.call("Reserve", pb.ReserveRequest(pages=UNSTORED)).reservation
    lease = a.call("Lease", pb.LeaseRequest(pages=MINE)).lease
    assert len(reservation) == len(lease) == 16
    return {
        "Seal": pb.ReservationRequest(reservation=reservation),
        "Write": [pb.WriteRequest(begin=pb.WriteBegin(reservation=reservation))],
        "Revoke": pb.ReservationRequest(reservation=reservation),
        "Renew": pb.RenewRequest(lease=lease),
        "Release": pb.ReleaseRequest(lease=lease),
    }


def state_of(op: Client) -> tuple[Any, ...]:
    """What refused calls must not change."""
    stats = dict(op.call("Stats", pb.Empty()))
    tier = dict(dict(stats["tiers"])["dram"])
    clients = dict(stats["clients"])
    return tier["pages"], dict(tier["frames"]), stats["leases"], stats["reservations"], clients, dict(stats["counters"])


def test_the_test_knows_every_call() -> None:
    methods = pb.DESCRIPTOR.services_by_name["Store"].methods_by_name
    assert {*OF_A, *OF_OPERATORS, *BY_NUMBER, *FOR_ALL} == set(methods)


def test_right_and_wrong_callers(everybody: Callers) -> None:
    a, b, op = everybody["a"], everybody["b"], everybody["op"]
    assert a.call("Write", OF_A["Write"]()).new_pages == 4
    assert a.call("PutObject", OF_A["PutObject"]()).stored
    numbered = number_requests(a)
    everything = {**OF_A, **OF_OPERATORS, **FOR_ALL, **{name: lambda n=name: numbered[n] for name in BY_NUMBER}}
    op.call("Verify", pb.Empty())  # nothing is left to be stamped
    before = state_of(op)

    for stranger, refusal in everybody.unknown.items():
        for name, request in everything.items():
            assert everybody[stranger].code(name, request()) is refusal, (stranger, name)
    for name, request in OF_A.items():
        assert b.code(name, request()) is Code.PERMISSION_DENIED, name
    for name, request in OF_OPERATORS.items():
        for tenant in (a, b):
            assert tenant.code(name, request()) is Code.PERMISSION_DENIED, name
    for name, request in numbered.items():
        assert b.code(name, request) is Code.ABORTED, name
        assert op.code(name, request) is Code.ABORTED, name
    assert state_of(op) == before

    for client in (a, op):
        for name, request in OF_A.items():
            assert client.code(name, request()) is Code.OK, name
    for name, request in OF_OPERATORS.items():
        timeout_s = 1.0 if name in KEEPS_ON else api.CALL_S
        assert op.code(name, request(), timeout_s) in (Code.OK, Code.DEADLINE_EXCEEDED), name
    for client, operator in ((a, False), (op, True)):
        about = client.call("About", pb.AboutRequest())
        assert (about.operator, list(about.salts)) == (operator, ["*"] if operator else ["a"])
    assert a.code("Seal", numbered["Seal"]) is Code.INVALID_ARGUMENT  # nothing was written: all of it is revoked
    assert a.code("Revoke", numbered["Revoke"]) is Code.ABORTED
    assert a.call("Renew", numbered["Renew"]).pages == 4
    assert a.code("Release", numbered["Release"]) is Code.OK
    assert a.code("Renew", numbered["Renew"]) is Code.ABORTED
    assert a.read(MINE) == contents(KEYS).tobytes()
    said = everybody.daemon.trace() + everybody.daemon.output()
    for secret in ("-token", *(hashlib.sha256(f"{name}-token".encode()).hexdigest() for name in ("a", "op"))):
        assert secret not in said


def test_unknown_and_foreign_look_the_same(clients: Callers) -> None:
    """What b is told about a's pages does not depend on whether there are any."""
    a, b = clients["a"], clients["b"]
    a.call("Write", OF_A["Write"]())
    said = set()
    for pages in (MINE, UNSTORED):
        with pytest.raises(grpc.RpcError) as refused:
            b.call("Lookup", pb.LookupRequest(pages=pages))
        said.add((refused.value.code(), refused.value.details()))
    assert len(said) == 1
    held = number_requests(a)
    for request in (held["Seal"], pb.ReservationRequest(reservation=bytes(16)), pb.ReservationRequest()):
        with pytest.raises(grpc.RpcError) as refused:
            b.call("Seal", request)
        said.add((refused.value.code(), refused.value.details()))
    assert len(said) == 2


def test_a_parent_of_another_tenant_counts_as_absent(clients: Callers) -> None:
    a, b = clients["a"], clients["b"]
    a.call("Write", OF_A["Write"]())
    theirs = chain(9, 2, salt="b")
    forged = pages_message(theirs, salt="b", parent=KEYS.hashes[-1])
    reply = b.call("Write", api.write_messages(forged, contents(theirs)))
    assert (reply.new_pages, reply.pages) == (0, 0)
    assert b.call("Lookup", pb.LookupRequest(pages=forged)).pages == 0
    assert b.code("Reserve", pb.ReserveRequest(pages=forged)) is Code.INVALID_ARGUMENT
    rest = KEYS[2:]
    mine = pages_message(rest, salt="a", parent=rest.parent)
    assert a.call("Lookup", pb.LookupRequest(pages=mine)).pages == 2
    assert a.read(mine) == contents(rest).tobytes()


def test_objects_of_another_tenant_are_not_there(clients: Callers) -> None:
    """Under one's own salt the same keys name one's own objects only; the other's stay as they are."""
    a, b = clients["a"], clients["b"]
    assert a.call("PutObject", api.put_messages("k", b"of a", "a")).stored
    assert b.call("PutObject", api.put_messages("mine", b"of b", "b")).stored
    get = {name: pb.GetObjectRequest(key="k", salt=name) for name in "ab"}
    keys = {name: pb.ObjectKeys(keys=["k", "mine"], salt=name) for name in "ab"}
    assert not b.call("GetObject", get["b"])[0].found
    assert list(b.call("ContainsObjects", keys["b"]).found) == [False, True]
    assert list(a.call("ContainsObjects", keys["a"]).found) == [True, False]
    assert b.call("DeleteObjects", pb.ObjectKeys(keys=["k"], salt="b")).removed == 0
    assert b.call("PutObject", api.put_messages("k", b"b's own", "b")).stored
    assert b.call("ClearObjects", pb.ClearObjectsRequest(salt="b")).removed == 2
    assert b.code("GetObject", get["a"]) is Code.PERMISSION_DENIED
    assert b"".join(reply.data for reply in a.call("GetObject", get["a"])) == b"of a"
    assert clients["op"].call("ContainsObjects", keys["a"]).found[0]


def test_a_pin_is_its_tenants_or_an_operators(clients: Callers) -> None:
    a, b, op = clients["a"], clients["b"], clients["op"]
    a.call("Write", OF_A["Write"]())
    pin = dict(a.call("Pin", pb.PinRequest(prompt=MINE, ttl_s=60)))["pin"]
    by_id = pb.UnpinRequest(pin=f"{pin:.0f}")
    assert b.code("Unpin", by_id) is Code.PERMISSION_DENIED
    assert a.code("Unpin", by_id) is Code.PERMISSION_DENIED  # a number does not tell whose it is
    assert len(dict(op.call("Pins", pb.Empty()))["pins"]) == 1
    assert op.code("Unpin", by_id) is Code.OK
    assert a.code("Unpin", pb.UnpinRequest(prompt=MINE)) is Code.INVALID_ARGUMENT  # it is over


def test_health_and_reflection_are_for_callers_too(clients: Callers) -> None:
    for name, allowed in (("a", True), ("wrong", False), ("nobody", False)):
        client = clients[name]
        check = client.channel.unary_unary("/grpc.health.v1.Health/Check")
        listed = client.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        if allowed:
            assert check(b"", timeout=60, metadata=client.metadata) == b"\x08\x01"
            assert b"kvstore.v1.Store" in next(listed(iter([b"\x3a\x00"]), timeout=60, metadata=client.metadata))
            continue
        with pytest.raises(grpc.RpcError) as refused:
            check(b"", timeout=60, metadata=client.metadata)
        assert refused.value.code() is Code.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as refused:
            next(listed(iter([b"\x3a\x00"]), timeout=60, metadata=client.metadata))
        assert refused.value.code() is Code.UNAUTHENTICATED


def test_an_identity_that_is_taken_away_ends_running_streams(machine: Machine, tmp_path: Path) -> None:
    daemon, address = api.serve_api(machine, identities=api.identities_file(tmp_path))
    op, a = Client(address, "op-token"), Client(address, "a-token")
    a.call("Write", OF_A["Write"]())
    held = a.call("Lease", pb.LeaseRequest(pages=MINE, ttl_ms=600_000))
    stream = op.stub.Watch(pb.WatchRequest(), timeout=600, metadata=op.metadata)
    next(stream)
    assert held.pages == 4
    api.identities_file(tmp_path, api.identity("b", salts='["*"]', operator="true"))
    with pytest.raises(grpc.RpcError) as ended:
        list(stream)
    assert ended.value.code() is Code.UNAUTHENTICATED
    assert a.code("About", pb.AboutRequest()) is Code.UNAUTHENTICATED
    b = Client(address, "b-token")
    wait_until("the lease of the gone tenant ends", lambda: b.call("Stats", pb.Empty())["leases"] == 0)
    for client in (op, a, b):
        client.close()
    assert daemon.terminate() == 0
