"""The command line and all that can be wrong with it: one line that names the field, and a non-zero exit code."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.client.local.channel import SocketChannel
from kvstore.errors import InvalidRequest, NodeUnavailable, VersionMismatch
from kvstore.wire import control
from kvstore.wire.control import Op
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.processes import CLI, ROOT, Machine, check_laws, check_pages, put, wait_until


def one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """It failed, and says why in one line with these words."""
    assert result.returncode not in (0, -11, -6), (result.returncode, result.stderr)
    assert result.stdout == "", result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("kvstore: "), result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def get(url: str) -> tuple[int, str]:
    """Status and body of an HTTP GET."""
    try:
        with urllib.request.urlopen(url, timeout=60.0) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


SERVE_MISTAKES = [
    (["--drum", "64MiB"], ["--drum"]),
    (["--dram", "0"], ["dram", "0"]),
    (["--dram", "-1"], ["dram"]),
    (["--dram", "lots"], ["dram", "lots"]),
    (["--dram", "4MiB", "--extent", "5MiB"], ["extent"]),
    (["--name", "a/b"], ["name", "a/b"]),
    (["--http", "nowhere"], ["http", "nowhere"]),
    (["--http", "203.0.113.1:1"], ["http", "203.0.113.1:1"]),
    (["--nvme", "/nowhere/at/all"], ["nvme", "/nowhere/at/all"]),
    (["--nvme", "/nowhere/kv:lots"], ["nvme", "lots"]),
    (["--nvme", "/nowhere/kv:4096"], ["nvme", "1MiB"]),
    (["--nvme", "/nowhere/kv:1GiB", "--nvme", "/nowhere/kv:2GiB"], ["nvme", "twice", "/nowhere/kv"]),
    (["--format"], ["nvme_format", "nvme"]),
    (["--eviction", "No Such"], ["eviction", "No Such"]),
    (["--config", "/nowhere/at/all.toml"], ["config", "/nowhere/at/all.toml"]),
]


@pytest.mark.parametrize(("flags", "words"), SERVE_MISTAKES, ids=lambda value: " ".join(value))
def test_serve_refuses(flags: list[str], words: list[str], machine: Machine) -> None:
    """And nothing is left behind."""
    one_line(machine.run("serve", *([] if "--name" in flags else ["--name", "n"]), *flags), *words)
    assert not list(machine.shm_dir.iterdir())


def test_serve_refuses_unknown_settings(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[node]\nname = "n"\ndrma = "64MiB"\n')
    one_line(machine.run("serve", "--config", str(path)), "drma", str(path), "dram")
    path.write_text("[nodes]\n")
    one_line(machine.run("serve", "--config", str(path)), "nodes")
    one_line(machine.run("serve", "--name", "n", KVSTORE_DRMA="64MiB"), "KVSTORE_DRMA")
    one_line(machine.run("serve", "--name", "n", KVSTORE_DRAM="much"), "dram", "KVSTORE_DRAM")


def test_serve_refuses_a_place_it_cannot_write(machine: Machine) -> None:
    one_line(machine.run("serve", "--name", "n", KVSTORE_SHM_DIR="/nowhere/at/all"), "shm_dir", "/nowhere/at/all")
    one_line(machine.run("serve", "--name", "n", KVSTORE_SHM_DIR="relative"), "shm_dir", "relative")
    (machine.shm_dir / "file").write_text("")
    one_line(machine.run("serve", "--name", "n", KVSTORE_SHM_DIR=str(machine.shm_dir / "file")), "file")
    # Root writes everywhere but where nobody can.
    one_line(machine.run("serve", "--name", "n", KVSTORE_SHM_DIR="/proc/self"), "/proc/self")


def test_serve_refuses_extents_of_another_size_and_keeps_the_pages(machine: Machine) -> None:
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 8)
    assert daemon.terminate() == 0
    one_line(machine.run("serve", "--name", "n", "--dram", "4MiB", "--extent", "1MiB"), "extent", "4MiB", "purge n")
    machine.serve("n", dram="4MiB")
    check_pages(store, {1: 8})


@pytest.mark.parametrize("command", [["status"], ["verify"], ["status", "--json"], ["tiers"], ["tiers", "--json"]])
def test_no_daemon(command: list[str], machine: Machine) -> None:
    """Nobody there, a node of another name, or a node whose daemon is down."""
    one_line(machine.run(*command), "no node", "kvstore serve")
    one_line(machine.run(*command, "--node", "n"), "'n'", "kvstore serve --name n")
    one_line(machine.run(*command, "--node", "kv://host:7070"), "address")
    one_line(machine.run(*command, "--node", "a/b"), "address")
    daemon = machine.serve("n", dram="4MiB")
    assert machine.run(*command).returncode == 0
    daemon.kill()
    one_line(machine.run(*command), "no node")
    result = machine.run(*command, "--node", "n")  # what is known of it without its daemon
    assert result.returncode == 0 and ("killed" if command[0] == "verify" else "down") in result.stdout


def test_connect_says_what_is_missing(machine: Machine) -> None:
    with pytest.raises(NodeUnavailable, match="no node on this machine"):
        kvstore.connect()
    with pytest.raises(NodeUnavailable, match="kvstore serve --name n"):
        kvstore.connect("n")
    for name in ("a", "b"):
        machine.serve(name, dram="4MiB")
    with pytest.raises(InvalidRequest, match="address: several nodes live here.*a, b"):
        kvstore.connect()
    one_line(machine.run("status"), "address", "a, b")
    assert machine.run("status", KVSTORE_NODE="b").returncode == 0


def test_reads_need_no_daemon_and_writes_say_so(machine: Machine) -> None:
    """In words, within the deadline; the store works again with the next daemon."""
    daemon = machine.serve("n", dram="4MiB")
    with machine.connect("n") as store:
        put(store, 1, 8)
        assert store.stats()["tiers"]["dram"]["pages"] == 8  # taken in, not only published
    daemon.kill()
    late = machine.connect("n", timeout_s=0.3)
    cache, keys = late.cache(SMALL), chain(2, 4)
    check_pages(late, {1: 8})
    assert cache.lookup(keys).pages == cache.get(keys).pages == 0
    began = time.monotonic()
    with pytest.raises(NodeUnavailable):
        cache.put(keys, contents(keys))
    with pytest.raises(NodeUnavailable), cache.lease(chain(1, 8)):
        pass
    with pytest.raises(NodeUnavailable), cache.writer(keys):
        pass
    with pytest.raises(NodeUnavailable):
        late.verify()
    assert time.monotonic() - began < 30.0
    assert late.stats()["state"] == "down"
    machine.serve("n")
    assert cache.put(keys, contents(keys)) == 4
    check_pages(late, {1: 8, 2: 4})


def test_another_version_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of another protocol, in this process and on the command line; a node of another file format."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 8)
    monkeypatch.setattr(control, "PROTOCOL", 99)
    with machine.connect("n") as other, pytest.raises(VersionMismatch, match="99"):
        put(other, 2, 4)
    monkeypatch.undo()
    patched = "import kvstore.wire.control as c; c.PROTOCOL = 99; from kvstore.cli.main import main; main()"
    for command in (["status", "--node", "n"], ["verify", "--node", "n"]):
        result = subprocess.run(
            [sys.executable, "-c", patched, *command], env=machine.env(), cwd=ROOT, capture_output=True, text=True
        )
        one_line(result, "99")
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(machine.shm_dir))
    assert put(store, 3, 4) == 4  # nobody else noticed
    check_pages(store, {1: 8, 3: 4})
    daemon.kill()
    with open(machine.folder("n") / "header", "r+b") as header:
        header.seek(8)
        header.write((77).to_bytes(8, "little"))
    with pytest.raises(VersionMismatch, match="77"):
        kvstore.connect("n", 0.2)
    one_line(machine.run("serve", "--name", "n", "--dram", "4MiB"), "77", "purge")
    assert machine.run("purge", "n").returncode == 0
    machine.serve("n")


def test_health_and_readiness(machine: Machine) -> None:
    daemon = machine.spawn("n", dram="4MiB", http="127.0.0.1:0")
    line = daemon.wait_ready()
    assert line.count("\n") == 1 and "kvstore node n ready: 4MiB" in line, line
    url = f"http://{line.split('http on ')[1].strip()}"
    assert get(f"{url}/healthz") == (200, "ok\n")
    assert get(f"{url}/readyz") == (200, "ready\n")
    assert get(f"{url}/nothing")[0] == 404
    port = int(url.rpartition(":")[2])
    one_line(machine.run("serve", "--name", "m", "--dram", "4MiB", "--http", f"127.0.0.1:{port}"), "http", str(port))
    with socket.create_connection(("127.0.0.1", port)) as dawdler:
        dawdler.send(b"GET /heal")  # and no more: it must not keep others waiting
        assert get(f"{url}/healthz") == (200, "ok\n")
    assert daemon.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_well(number: signal.Signals, machine: Machine) -> None:
    """Exit code 0, also with clients at work; all pages are there after the next start; nothing was said on stderr."""
    daemon = machine.serve("n", dram="64MiB")
    store = machine.connect("n")
    writer = machine.worker("put", "n", first=0, count=1 << 20, pages=8, pause_s=0.003)
    writer.wait_for("put", 20)
    before = writer.acknowledged()
    daemon.signal(number)
    assert daemon.wait() == 0
    assert "Traceback" not in daemon.trace()
    check_pages(store, before)  # what is published while it ends waits for the next start
    machine.serve("n")
    writer.wait_for("put", len(writer.events("put")) + 5)
    writer.finish()
    check_pages(store, writer.acknowledged())
    check_laws(store)


def test_purge(machine: Machine) -> None:
    """Refuses a live node and an unknown one, removes a dead one; --all takes only the dead."""
    for name in ("a", "b", "c"):
        machine.serve(name, dram="4MiB")
    store = machine.connect("a")
    put(store, 1, 8)
    one_line(machine.run("purge", "a"), "'a'")
    check_pages(store, {1: 8})
    assert put(store, 2, 8) == 8
    one_line(machine.run("purge", "nobody"), "names", "nobody")
    one_line(machine.run("purge"), "names")
    one_line(machine.run("purge", "a", "--all"), "names")
    machine.processes[1].kill()
    machine.processes[2].kill()
    result = machine.run("purge", "--all", "--json")
    assert result.returncode == 0 and '"b"' in result.stdout and '"a"' not in result.stdout, result.stdout
    assert [path.name for path in machine.shm_dir.iterdir()] == ["kvstore-a"]
    machine.processes[0].kill()
    assert machine.run("purge", "a").returncode == 0
    assert store.cache(SMALL).get(chain(1, 8)).pages == 0
    with pytest.raises(NodeUnavailable):
        put(store, 3, 1)


def test_status_and_verify(machine: Machine) -> None:
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 8)
    text = machine.run("status", "--node", "n")
    assert text.returncode == 0 and "ready" in text.stdout and "4 MiB" in text.stdout, text.stdout
    verified = machine.run("verify", "--node", "n")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "pages verified, 0 damaged" in verified.stdout, verified.stdout
    assert machine.run("--help").returncode == 0
    for command in ("serve", "status", "tiers", "verify", "purge", "bench"):
        assert machine.run(command, "--help").returncode == 0


def test_tiers_tells_what_clients_did(machine: Machine) -> None:
    """Of clients that only read as well, which never speak to the daemon; across its death, and theirs."""

    def counted() -> dict[str, int]:
        result = machine.run("tiers", "--node", "n", "--json")
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout)["clients"])

    daemon = machine.serve("n", dram="4MiB")
    writer, reader = machine.connect("n"), machine.connect("n")
    put(writer, 1, 8)
    check_pages(reader, {1: 8})
    assert reader.cache(SMALL).get(chain(2, 4)).pages == 0
    wanted = {"gets": 2, "pages_asked": 12, "hit_dram": 8, "missed_absent": 4, "pages_put": 8}
    counts = counted()
    assert {name: counts[name] for name in wanted} == wanted
    assert counts["read_dram_bytes"] == counts["put_bytes"] == 8 * SMALL.page_bytes
    text = machine.run("tiers", "--node", "n")
    assert text.returncode == 0 and " 0.667 " in text.stdout and "4 absent" in text.stdout, text.stdout
    daemon.kill()
    check_pages(reader, {1: 8})
    reader.close()
    machine.serve("n", dram="4MiB")
    check_pages(writer, {1: 8})
    counts = counted()
    assert (counts["hit_dram"], counts["pages_asked"], counts["pages_put"]) == (24, 28, 8), counts
    files = machine.folder("n") / "sessions"
    wait_until("files of those that ended are removed", lambda: len(list(files.iterdir())) == 1)


def test_tiers_of_a_node_with_nvme(machine: Machine, tmp_path: Path) -> None:
    """More pages than DRAM holds: they are found in NVMe, and everything says so."""
    machine.serve("n", dram="4MiB", nvme=f"{tmp_path / 'kv'}:64MiB")
    store = machine.connect("n")
    pages = 32
    seeds = range(2 * store.stats()["tiers"]["dram"]["capacity_bytes"] // (pages * SMALL.page_bytes))
    for seed in seeds:
        put(store, seed, pages)
    check_pages(store, dict.fromkeys(seeds, pages))

    def told() -> dict[str, Any]:
        result = machine.run("tiers", "--node", "n", "--json")
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout))

    document = told()
    nvme, dram, clients = document["tiers"]["nvme"], document["tiers"]["dram"], document["clients"]
    assert clients["hit_nvme"] > 0 and clients["hit_dram"] + clients["hit_nvme"] == clients["pages_asked"]
    assert nvme["hit_ratio"] + dram["hit_ratio"] == pytest.approx(1.0)
    assert nvme["demoted_bytes"] == nvme["demoted_pages"] * SMALL.page_bytes == nvme["bytes_in"] > 0
    assert nvme["written_today_bytes"] >= nvme["demoted_bytes"]
    assert nvme["state"] == "ready" and nvme["eviction"] == "gittins" and dram["demoted"] > 0
    (device,) = nvme["devices"]
    assert device["path"] == str(tmp_path / "kv") and device["pages"] == nvme["pages"] > 0
    text = machine.run("tiers", "--node", "n").stdout
    assert str(tmp_path / "kv") in text and "saved to NVMe" in text, text
    assert "on NVMe" in machine.run("status", "--node", "n").stdout


def test_nonsense_on_the_socket_harms_nobody(machine: Machine) -> None:
    """Datagrams of every op with bodies of every length: refused, and the daemon and its pages are unharmed."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 8)
    path = str(machine.folder("n") / "control")
    hello = control.encode(Op.HELLO, 1, a=77, b=1, body=(control.pack_json({"protocol": control.PROTOCOL}),))
    bodies = [b"", b"\0", b"\xff" * 15, b"\xff" * 16, b"\x01" * 100, b"\xff" * 4096, b"[1]", b'{"call":1}', b"{}"]
    for op in [*range(1, 14), 200, 255]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(5.0)
            sock.connect(path)
            sock.send(hello)
            assert control.decode(memoryview(sock.recv(1 << 17))).op == 0
            for body in bodies:
                for count in (0, 1, 2, 512, 65535):
                    for a, b in ((0, 0), ((1 << 64) - 1, (1 << 64) - 1), (1 << 32 | 4096, 1)):
                        sock.send(control.encode(op, 2, count=count, a=a, b=b, body=(body,)))
                        control.decode(memoryview(sock.recv(1 << 17)))
    for first in (b"", b"\0", b"x" * 31, control.encode(Op.GRANT, 1, count=1), b"\xff" * 4096):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(5.0)
            sock.connect(path)
            if first:
                sock.send(first)
    wait_until("the sessions of nobody are gone", lambda: store.stats()["sessions"] <= 1)
    assert daemon.alive
    check_pages(store, {1: 8})
    assert put(store, 2, 8) == 8
    check_laws(store)


def test_a_client_that_reads_no_replies_is_cut_off(machine: Machine) -> None:
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 8)
    hello = control.encode(Op.HELLO, 1, a=77, b=1, body=(control.pack_json({"protocol": control.PROTOCOL}),))
    ask = control.encode(Op.ADMIN, 2, body=(control.pack_json({"call": "stats"}),))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5.0)
        sock.connect(str(machine.folder("n") / "control"))
        sock.send(hello)
        with pytest.raises(OSError):
            for _ in range(100_000):
                sock.send(ask)
    assert put(store, 2, 8) == 8
    check_pages(store, {1: 8, 2: 8})


def test_more_sessions_than_allowed_are_refused(machine: Machine) -> None:
    env = machine.env(KVSTORE_SESSIONS_MAX="3")
    daemon = subprocess.Popen(
        [*CLI, "serve", "--name", "n", "--dram", "4MiB"], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert daemon.stdout is not None and "ready" in daemon.stdout.readline()
        folder = machine.folder("n")
        channels = [SocketChannel(folder, 1.0) for _ in range(3)]
        for channel in channels:
            channel.request(Op.ADMIN, body=(control.pack_json({"call": "stats"}),)).result()
        with pytest.raises(kvstore.errors.Unavailable, match="sessions"):
            SocketChannel(folder, 1.0).request(Op.ADMIN, body=(control.pack_json({"call": "stats"}),)).result()
        channels[0].close()
        again = SocketChannel(folder, 5.0)
        wait_until("its place is free", lambda: connects(again))
    finally:
        daemon.kill()
        daemon.communicate()


def connects(channel: SocketChannel) -> bool:
    try:
        channel.request(Op.ADMIN, body=(control.pack_json({"call": "stats"}),)).result()
    except kvstore.errors.Unavailable:
        return False
    return True
