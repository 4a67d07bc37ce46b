"""The command line and all that can be wrong with it: one line that names the field, and a non-zero exit code."""

from __future__ import annotations

import signal
import socket
import subprocess
import urllib.error
import urllib.request

import pytest

from kvstore.errors import NodeUnavailable
from kvstore.wire import control
from kvstore.wire.control import Op
from tests.helpers.content import SMALL, chain
from tests.helpers.processes import Machine, check_laws, check_pages, put, wait_until


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
