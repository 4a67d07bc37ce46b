"""Whatever is sent to a node, nothing breaks, nothing hangs, and what is refused changes nothing.

Every method is found in the descriptor, so a new one is tested from its first day. ``KVSTORE_TEST_FUZZ_S`` sets for how
long each of the tests goes on (4), ``KVSTORE_TEST_SEED`` what is drawn; both are printed.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from kvstore import Store
from kvstore.errors import KVStoreError
from kvstore.pb import store_pb2 as pb
from kvstore.wire import control
from kvstore.wire.control import Op
from tests.helpers import api
from tests.helpers.api import Client, pages_message
from tests.helpers.content import chain, contents
from tests.helpers.fuzzing import Inputs
from tests.helpers.inside import admin, node_of
from tests.helpers.processes import Daemon, Machine, check_laws, check_right

FUZZ_S = float(os.environ.get("KVSTORE_TEST_FUZZ_S", "4"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
CALL_S, SLACK_S = 30.0, 20.0  # longer than any call takes on a busy machine: what is still there then hangs
WATCH_S = 0.6  # a watch goes on until shortly before its deadline
SETTLE_S = 0.05  # a cancelled call's last step
REPLIES_MAX = 200
THREADS = 6

Code = grpc.StatusCode
METHODS: tuple[MethodDescriptor, ...] = tuple(pb.DESCRIPTOR.services_by_name["Store"].methods)
BROKEN = (Code.UNKNOWN, Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS)
REFUSED = (Code.INVALID_ARGUMENT, Code.ABORTED, Code.UNIMPLEMENTED, Code.FAILED_PRECONDITION, Code.PERMISSION_DENIED)
KEEPS = ("Write", "PutObject")  # streams: what was whole before the mistake stays
KEYS = chain(1, 6)
PAGES = pages_message(KEYS)
OTHER = pages_message(chain(2, 3))


def enough(codes: Counter[str]) -> bool:
    """So many calls were served, and refused, that it says something."""
    return codes["INVALID_ARGUMENT"] > 20 and codes["OK"] > 20


class Fuzzer:
    """A daemon's API under one seed."""

    def __init__(self, address: str, store: Store, seed: int) -> None:
        self.rng = random.Random(seed)
        self.inputs = Inputs(self.rng)
        self.client = Client(address)
        self.store = store
        self.codes: Counter[str] = Counter()
        self.reservation = self.lease = bytes(16)
        for key in KEYS.hashes:
            self.inputs.learn(key)

    def good(self, name: str) -> list[Any] | None:
        """The messages of a call that makes sense; None for a method that this test does not know."""
        reservation = pb.ReservationRequest(reservation=self.reservation)
        made: dict[str, list[Any]] = {
            "Lookup": [pb.LookupRequest(pages=PAGES)],
            "Read": [pb.ReadRequest(pages=PAGES)],
            "Prefetch": [pb.LookupRequest(pages=PAGES)],
            "Write": self.rng.choice((api.write_messages(OTHER, contents(chain(2, 3))), self._write_reserved())),
            "Reserve": [pb.ReserveRequest(pages=pages_message(chain(3, 2)), ttl_ms=500, ranks=1)],
            "Seal": [reservation],
            "Revoke": [reservation],
            "Lease": [pb.LeaseRequest(pages=PAGES, ttl_ms=500)],
            "Renew": [pb.RenewRequest(lease=self.lease, ttl_ms=500)],
            "Release": [pb.ReleaseRequest(lease=self.lease)],
            "PutObject": api.put_messages("k", bytes(70_000), replace=True),
            "GetObject": [pb.GetObjectRequest(key="k")],
            "ContainsObjects": [pb.ObjectKeys(keys=["k", "a"])],
            "DeleteObjects": [pb.ObjectKeys(keys=["k"])],
            "ClearObjects": [pb.ClearObjectsRequest(prefix="no")],
            "Pages": [pb.PagesRequest(limit=3, prompt=PAGES)],
            "Evict": [pb.EvictRequest(pages=1, prompt=PAGES, dry_run=True)],
            "Pin": [pb.PinRequest(prompt=PAGES, ttl_s=0.5)],
            "Unpin": [pb.UnpinRequest(prompt=PAGES)],
            "Watch": [pb.WatchRequest(after=1)],
            "Admin": [api.struct(call="pages", limit=3)],
        }
        return made.get(name)

    def _write_reserved(self) -> list[Any]:
        return api.reserved_messages(self.reservation, contents(chain(3, 2)))

    def once(self, method: MethodDescriptor) -> tuple[Code, str]:
        """One call with something wrong in it, most likely. How it ended, and what was sent, for a message."""
        good = self.good(method.name)
        sent = self.inputs.requests(method, (lambda: good) if good is not None else None)
        cancelled = self.rng.random() < 0.1
        shown = f"{method.name} {[message[:200].hex() for message in sent[:4]]} {'cancelled' if cancelled else ''}"
        timeout_s = WATCH_S if method.name.startswith("Watch") else CALL_S
        began = time.monotonic()
        code = self._end(method, sent, timeout_s, cancelled)
        took_s = time.monotonic() - began
        assert took_s < timeout_s + SLACK_S, f"took {took_s:.2f} s: {shown}"
        assert code not in BROKEN, f"{code}: {shown}"
        late = code is Code.DEADLINE_EXCEEDED and not method.name.startswith("Watch")
        assert not late, f"did not end by itself: {shown}"
        self.codes[code.name] += 1
        return code, shown

    def _end(self, method: MethodDescriptor, sent: list[bytes], timeout_s: float, cancelled: bool) -> Code:
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        call = getattr(self.client.channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
        pause = threading.Event()

        def messages() -> Iterator[bytes]:
            yield from sent
            if cancelled:
                pause.wait(timeout_s)

        given: Any = messages() if method.client_streaming else sent[0]
        try:
            if not method.server_streaming:
                if not cancelled:
                    self._learn(method, call(given, timeout=timeout_s))
                    return Code.OK
                future = call.future(given, timeout=timeout_s)
                time.sleep(self.rng.random() * 0.003)
                future.cancel()
                return Code.CANCELLED
            replies = call(given, timeout=timeout_s)
            for count, _ in enumerate(replies):
                if cancelled or count == REPLIES_MAX:
                    replies.cancel()
                    return Code.CANCELLED
            return Code.OK
        except grpc.RpcError as error:
            return error.code()
        finally:
            pause.set()

    def _learn(self, method: MethodDescriptor, reply: bytes) -> None:
        if method.name == "Reserve":
            self.reservation = pb.ReserveReply.FromString(reply).reservation
            self.inputs.learn(self.reservation)
        elif method.name == "Lease":
            self.lease = pb.LeaseReply.FromString(reply).lease or self.lease
            self.inputs.learn(self.lease)

    def restore(self) -> None:
        """What the good requests are about is there (again)."""
        for name in ("Write", "PutObject", "Lease", "Reserve"):
            good = api.write_messages(PAGES, contents(KEYS)) if name == "Write" else self.good(name)
            assert good is not None
            reply = self.client.call(name, good if name in KEEPS else good[0])
            self._learn_message(name, reply)

    def _learn_message(self, name: str, reply: Any) -> None:
        method = next(method for method in METHODS if method.name == name)
        self._learn(method, reply.SerializeToString())


def stored(store: Store) -> dict[str, Any]:
    """What no refused call may change at all."""
    stats = store.stats()
    tenants = {
        (salt, tier): (has[tier]["pages"], has[tier]["bytes"])
        for salt, has in stats["tenants"].items()
        for tier in stats["tiers"]
        if has.get(tier, {}).get("pages")
    }
    pages = {tier: has["pages"] for tier, has in stats["tiers"].items()}
    sealed = stats["tiers"]["dram"]["frames"].get("sealed", 0)
    return {"pages": pages, "sealed": sealed, "tenants": tenants, "objects": store.object_keys()}


def held(store: Store) -> dict[str, int]:
    """What ends by itself, and so may become less at any time, but not more by a refused call."""
    stats = store.stats()
    frames = stats["tiers"]["dram"]["frames"]
    busy = frames.get("reserved", 0) + frames.get("quarantined", 0)  # a reservation that runs out goes over the latter
    pins = len(admin(store, "pins")["pins"])
    return {"leases": stats["leases"], "reservations": stats["reservations"], "pins": pins, "frames": busy}


@pytest.fixture
def served(machine: Machine) -> tuple[Daemon, str, Store]:
    daemon, address = api.serve_api(machine, dram="64MiB")
    return daemon, address, machine.connect("api")


def check_well(daemon: Daemon, client: Client, store: Store) -> None:
    """It answers, what it has is right, its books are in order, and it ends when it is told to."""
    assert daemon.alive, daemon.trace()
    assert client.code("About", pb.AboutRequest()) is Code.OK
    store.cache(api.SMALL).put(KEYS, contents(KEYS))
    check_right(store, {1: 6, 2: 3, 3: 2})
    assert list(dict(client.call("Verify", pb.Empty()))["findings"]) == []
    check_laws(store)
    assert "Traceback" not in daemon.trace(), daemon.trace()
    client.close()
    assert daemon.terminate() == 0


def test_nothing_breaks_and_a_refusal_changes_nothing(served: tuple[Daemon, str, Store]) -> None:
    daemon, address, store = served
    fuzzer = Fuzzer(address, store, SEED)
    deadline = time.monotonic() + FUZZ_S
    calls = 0
    left = list(METHODS)
    fuzzer.restore()
    had, held_then = stored(store), held(store)
    while left or time.monotonic() < deadline or not enough(fuzzer.codes):
        if calls % 100 == 99:
            fuzzer.restore()
            had, held_then = stored(store), held(store)
        method = left.pop() if left else fuzzer.rng.choice(METHODS)
        code, shown = fuzzer.once(method)
        calls += 1
        if code is Code.CANCELLED:
            time.sleep(SETTLE_S)
        has, held_now = stored(store), held(store)
        if code in REFUSED:
            if method.name in KEEPS:
                held_then["frames"] = held_now["frames"]  # frames granted ahead: given back soon
            else:
                assert has == had, f"{code}: {shown}"
            more = {name: count for name, count in held_now.items() if count > held_then[name]}
            assert not more, f"{more} were {held_then} before {code}: {shown}"
        had, held_then = has, held_now
    print(f"\n{calls} calls, seed {SEED}: {dict(fuzzer.codes)}")
    check_well(daemon, fuzzer.client, store)


def test_many_at_once(machine: Machine, tmp_path: Path) -> None:
    """The same from several connections, with a tier below: what they do to each other breaks nothing either."""
    config = tmp_path / "node.toml"
    config.write_text(f'[node]\nnvme = ["{tmp_path}/nvme:64MiB"]\ndemote_at = 0\nrpc_buffers = "32MiB"\n')
    daemon, address = api.serve_api(machine, dram="32MiB", config=str(config))
    store = machine.connect("api")
    fuzzers = [Fuzzer(address, store, SEED * 1000 + i) for i in range(THREADS)]
    fuzzers[0].restore()
    deadline = time.monotonic() + FUZZ_S
    failures: list[BaseException] = []

    def run(fuzzer: Fuzzer) -> None:
        try:
            while time.monotonic() < deadline and not failures:
                fuzzer.once(fuzzer.rng.choice(METHODS))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(fuzzer,)) for fuzzer in fuzzers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FUZZ_S + 60)
    assert not failures, failures[0]
    codes = sum((fuzzer.codes for fuzzer in fuzzers), Counter[str]())
    print(f"\n{codes.total()} calls, seed {SEED}: {dict(codes)}")
    for fuzzer in fuzzers[1:]:
        fuzzer.client.close()
    check_well(daemon, fuzzers[0].client, store)


def test_admin_documents_over_the_local_socket(machine: Machine) -> None:
    daemon = machine.serve("local", dram="32MiB")
    store, rng = machine.connect("local"), random.Random(SEED)
    inputs = Inputs(rng)
    store.cache(api.SMALL).put(KEYS, contents(KEYS))
    node = node_of(store).writable()
    try:
        admin(store, "no such call")
    except KVStoreError as error:
        calls = str(error).partition("one of ")[2].split(", ")
    ended: Counter[str] = Counter()
    deadline, had, held_then = time.monotonic() + FUZZ_S / 2, stored(store), held(store)
    for key in KEYS.hashes:
        inputs.learn(key)
    while time.monotonic() < deadline or min(ended["InvalidRequest"], ended["served"]) <= 20:
        if rng.random() < 0.1:
            body = inputs.noise()
        else:
            call = rng.choice([*calls, inputs.json(1)])
            body = control.pack_json({"call": call, **inputs.arguments()})
            body = inputs.mutated(body) if rng.random() < 0.1 else body
        try:
            node.exchange(Op.ADMIN, body=(body,), timeout_s=60.0)
            ended["served"] += 1
        except KVStoreError as error:
            ended[type(error).__name__] += 1
            assert type(error).__name__ == "InvalidRequest", f"{error}: {body!r}"
            assert stored(store) == had, f"{error}: {body!r}"
            assert all(count <= held_then[name] for name, count in held(store).items()), f"{error}: {body!r}"
        had, held_then = stored(store), held(store)
    print(f"\n{ended.total()} documents, seed {SEED}: {dict(ended)}")
    check_right(store, {1: 6})
    check_laws(store)
    assert "Traceback" not in daemon.trace(), daemon.trace()
    assert daemon.terminate() == 0
