"""NodeFolder, Header and what finds, purges and reaps folders; with second processes where they matter."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, NodeBusy, OutOfSpace
from kvstore.shm.folder import NodeFolder, list_nodes, purge, reap_embedded
from kvstore.shm.header import HEADER_BYTES, Header
from kvstore.tier import dram
from kvstore.tier.dram import check_space


@pytest.fixture(params=["tmp", "shm"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory for node folders, on a disk and in shared memory."""
    if request.param == "tmp":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)


HOLDER = """
    import sys, time
    from kvstore.shm.folder import NodeFolder
    folder = NodeFolder(sys.argv[1], sys.argv[2])
    folder.lock()
    print("locked", flush=True)
    time.sleep(60)
"""


def start(source: str, *args: object) -> subprocess.Popen[str]:
    """A second process that has printed one line."""
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    assert process.stdout.readline() != ""
    return process


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a b", "x" * 65, "é"])
def test_names_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        NodeFolder(tmp_path, name)


@pytest.mark.parametrize("group_shared", [False, True])
def test_modes_whatever_the_umask(home: Path, group_shared: bool) -> None:
    folder = NodeFolder(home, "n", group_shared)
    before = os.umask(0o077)
    try:
        folder.lock()
        Header.create(folder, 5, 4096, 1).close()
    finally:
        os.umask(before)
        folder.close()
    assert folder.path.stat().st_mode & 0o777 == folder.sessions.stat().st_mode & 0o777 == folder.dir_mode
    assert folder.header.stat().st_mode & 0o777 == folder.lock_file.stat().st_mode & 0o777 == folder.file_mode
    assert NodeFolder.at(folder.path).group_shared is group_shared


def test_a_second_owner_is_refused_with_the_pid_of_the_first(home: Path) -> None:
    first, second = NodeFolder(home, "n"), NodeFolder(home, "n")
    first.lock()
    with pytest.raises(NodeBusy, match=rf"'n' is held by process {os.getpid()}"):
        second.lock()
    assert not second.locked
    first.close()
    second.lock()
    second.close()


def test_a_forked_child_keeps_no_lock(home: Path) -> None:
    folder = NodeFolder(home, "n")
    folder.lock()
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"1" if not folder.locked else b"0")
        os.read(go[0], 1)  # alive while the parent gives the lock back
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"1"
        with pytest.raises(NodeBusy):  # the fork took nothing from the parent
            NodeFolder(home, "n").lock()
        folder.close()
        other = NodeFolder(home, "n")
        other.lock()
        other.close()
    finally:
        os.write(go[1], b"1")
        os.waitpid(pid, 0)
        for fd in (*ready, *go):
            os.close(fd)


def test_a_new_owner_removes_what_a_dead_one_left_half_made(home: Path) -> None:
    folder = NodeFolder(home, "n")
    folder.create()
    (folder.path / ".tmp-records-4").write_bytes(b"half")
    (folder.path / "index-3.tmp").mkdir()
    (folder.path / "index-3.tmp" / "data.mdb").touch()
    folder.index(2).mkdir()
    folder.lock()
    assert sorted(os.listdir(folder.path)) == ["index-2", "lock", "sessions"]
    folder.close()


def test_new_files_are_whole_or_absent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = NodeFolder(home, "n")
    folder.create()
    path = folder.path / "file"
    folder.new_file(path, 8192, b"head")
    assert path.read_bytes() == b"head" + bytes(8188)
    assert path.stat().st_blocks * 512 >= 8192

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfSpace, match="remount,size"):
        folder.new_file(path, 16384, b"other")
    assert path.read_bytes()[:4] == b"head"
    assert sorted(os.listdir(folder.path)) == ["file", "sessions"]


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kvstore-n").symlink_to(tmp_path / "elsewhere")
    folder = NodeFolder(tmp_path, "n")
    assert not folder.is_trusted()
    with pytest.raises(InvalidRequest):
        folder.lock()


# --- purge, list, reap ----------------------------------------------------------------------------------------------


def test_purge_is_refused_while_the_owner_lives(home: Path) -> None:
    folder = NodeFolder(home, "n")
    folder.lock()
    header = Header.create(folder, 5, 4096, 1)
    with pytest.raises(NodeBusy, match="stop it before"):
        purge(folder.path)
    assert header.incarnation == 5
    folder.close()
    reader = Header.open(folder)
    assert reader is not None
    purge(folder.path)
    assert not folder.path.exists()
    assert reader.incarnation == 0, "who maps it sees that the node is gone"
    purge(folder.path)  # absent: nothing happens
    header.close()
    reader.close()


def test_purge_waits_for_who_looks_and_for_no_owner(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, naps = NodeFolder(home, "n"), list[float]()
    folder.lock()
    monkeypatch.setattr("kvstore.shm.folder.time.sleep", naps.append)
    with pytest.raises(NodeBusy):
        purge(folder.path)
    assert naps == []
    folder.close()
    with open(folder.lock_file) as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr("kvstore.shm.folder.time.sleep", lambda _: looking.close())
        purge(folder.path)
    assert looking.closed and not folder.path.exists()


def test_reap_takes_dead_embedded_folders_only(home: Path) -> None:
    process = start(HOLDER, home, "embedded-alive")
    try:
        killed = start(HOLDER, home, "embedded-dead")
        stop(killed)
        NodeFolder(home, "standing").create()
        assert reap_embedded(home) == ["embedded-dead"]
        assert [name for name, _ in list_nodes(home)] == ["embedded-alive", "standing"]
    finally:
        stop(process)


def test_locking_while_others_probe_and_purge(home: Path) -> None:
    """A probe's moment of shared lock, or a purge of the old folder, makes no owner fail."""
    source = """
        import sys, time
        from kvstore.errors import NodeBusy
        from kvstore.shm.folder import list_nodes
        from kvstore.shm.folder import purge
        print("ready", flush=True)
        while True:
            list_nodes(sys.argv[1])
            try:
                purge(sys.argv[1] + "/kvstore-n")
            except NodeBusy:
                pass
            time.sleep(0.001)
    """
    process = start(source, home)
    try:
        for _ in range(100):
            folder = NodeFolder(home, "n")
            folder.lock()
            assert folder.lock_file.read_text() == f"{os.getpid()}\n"
            folder.close()
    finally:
        stop(process)


# --- header ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(home: Path) -> NodeFolder:
    folder = NodeFolder(home, "n")
    folder.create()
    return folder


@pytest.mark.parametrize("damage", ["absent", "empty", "short", "magic", "purged"])
def test_a_doubtful_header_is_none(folder: NodeFolder, damage: str) -> None:
    if damage != "absent":
        Header.create(folder, 77, 4096, 1).close()
        data = bytearray(folder.header.read_bytes())
        if damage == "magic":
            data[0] ^= 1
        elif damage == "purged":
            data[16:24] = bytes(8)
        folder.header.write_bytes(data[: {"empty": 0, "short": 100}.get(damage, HEADER_BYTES)])
    assert Header.open(folder) is None
    assert Header.open(folder, writable=True) is None


# --- space ----------------------------------------------------------------------------------------------------------


def test_too_little_space_names_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match=r"needs 1024\.0 GiB.*mount -o remount,size=\d+M /dev/shm.*--dram") as e:
        check_space("/dev/shm", 1 << 40)
    assert e.value.field == "dram"
    with pytest.raises(InvalidRequest, match="shm_dir"):
        check_space("/absent", 1)


def test_a_memory_limit_counts_and_cache_that_can_go_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(tmp_path / name for name in ("memory.max", "memory.current", "memory.stat"))
    for path, text in zip(
        files, (f"{64 << 20}\n", f"{60 << 20}\n", f"file {40 << 20}\nshmem {8 << 20}\n"), strict=True
    ):
        path.write_text(text)
    monkeypatch.setattr(dram, "_cgroup_files", lambda: [files])
    check_space("/dev/shm", 36 << 20)
    with pytest.raises(InvalidRequest, match=r"memory\.max leaves 36\.0 MiB.*--memory"):
        check_space("/dev/shm", 37 << 20)
    files[0].write_text("max\n")
    check_space("/dev/shm", 37 << 20)
