"""What a real daemon says on stderr: text for people, JSON lines for machines, little of it, and no secrets."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import QuotaExceeded
from kvstore.pb import store_pb2 as pb
from tests.helpers.api import Client, identities_file, pages_message, serve_api
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.processes import Daemon, Machine, put, wait_until

ALWAYS = {"time", "level", "logger", "message", "node"}


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    """Everything on stderr; each line is one JSON object with the fields that all have."""
    found = []
    for line in daemon.errors.read_text().splitlines():
        said = json.loads(line)
        assert said.keys() >= ALWAYS and said["node"] == "m", line
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"])
        assert said["level"] in ("debug", "info", "warning", "error")
        found.append(said)
    return found


def named(daemon: Daemon, message: str) -> list[dict[str, Any]]:
    """Those of this message."""
    return [line for line in lines(daemon) if line["message"] == message]


def refuse_puts(store: kvstore.Store, salt: str, times: int) -> None:
    """Puts of more than a quota of two pages allows, whose pages are leased."""
    cache, keys = store.cache(SMALL, salt=salt), chain(1, 2, SMALL, salt)
    cache.put(keys, contents(keys))
    with cache.lease(keys):
        for seed in range(times):
            other = chain(50 + seed, 1, SMALL, salt)
            with pytest.raises(QuotaExceeded):
                cache.put(other, contents(other))


def test_json_lines_tell_of_a_daemon_s_life(machine: Machine, tmp_path: Path) -> None:
    quota = f"tenant dram={2 * SMALL.page_bytes}"
    identities = identities_file(tmp_path)
    flags = {"http": "127.0.0.1:0", "log_format": "json", "quota": quota, "identities": identities}
    daemon, api = serve_api(machine, "m", log_level="debug", **flags)
    store = machine.connect("m")
    put(store, 1, 200)
    for _ in range(50):
        assert store.cache(SMALL).get(chain(1, 200)).pages == 200
    store.evict(pages=50)
    refuse_puts(store, "tenant", 20)
    secret = "a-very-secret-token"
    stranger, tenant = Client(api, secret), Client(api, "a-token")
    for _ in range(30):
        assert stranger.code("Lookup", pb.LookupRequest()).name == "UNAUTHENTICATED"
    assert (
        tenant.code("Lookup", pb.LookupRequest(pages=pages_message(chain(1, 2), salt="b"))).name == "PERMISSION_DENIED"
    )
    for client in (stranger, tenant):
        client.close()
    host, port = api.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as one:
        one.sendall(b"\x16\x03\x01 this is no HTTP/2")  # gRPC's own code writes nothing between our lines
    damage(machine, store)
    wait_until("the refusals are told", lambda: len(named(daemon, "gRPC calls refused")) >= 2)
    wait_until("the damage is told", lambda: named(daemon, "damage found, the pages were dropped"))
    assert daemon.terminate() == 0
    (start,), (ready,), (stop,) = (named(daemon, message) for message in ("start", "ready", "stop"))
    assert (start["pid"], start["version"]) == (daemon.pid, "0.1.0")
    assert ready["pages"] == 0 and 0 < ready["took_s"] < 60 and stop["uptime_s"] >= ready["took_s"]
    refused = named(daemon, "gRPC calls refused")
    calls = Counter({line["code"]: 0 for line in refused})
    for line in refused:
        calls[line["code"]] += line["calls"]
    assert calls == {"UNAUTHENTICATED": 30, "PERMISSION_DENIED": 1} and len(refused) <= 3
    assert {line["last_from"] for line in refused} == {"ipv4:127.0.0.1"}
    quotas = named(daemon, "quota refused")
    assert {(line["tenant"], line["tier"], line["level"]) for line in quotas} == {("tenant", "dram", "warning")}
    assert sum(line["pages"] for line in quotas) == 20 and len(quotas) <= 2
    (damaged,) = named(daemon, "damage found, the pages were dropped")
    assert (damaged["reason"], damaged["pages"], damaged["level"]) == ("data", 1, "error")
    text = daemon.errors.read_text()
    assert text.count("\n") <= 20, f"nothing is said per page or per call: {text}"
    assert secret not in text and "a-token" not in text and "Bearer" not in text


def damage(machine: Machine, store: kvstore.Store) -> None:
    """Flip a bit of a page at rest, and have it found."""
    keys = chain(9, 1)
    data = contents(keys)
    store.cache(SMALL).put(keys, data, checksum=True)
    with open(machine.folder("m") / "segment", "r+b") as segment:
        where = segment.read().index(data[0].tobytes())
        segment.seek(where)
        segment.write(bytes([data[0, 0] ^ 1]))
    assert store.cache(SMALL).get(keys, verify=True).pages == 0, "found by this, or by the scrubber before it"
