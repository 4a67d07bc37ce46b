"""What another user of the machine, or a link, puts where nodes keep their files: nothing beyond it is touched.

Anyone may make names in /dev/shm and /var/tmp. As root the tests plant them as another user, in a folder like those;
otherwise as ourselves, which still shows whether a link is followed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidRequest, NodeUnavailable
from kvstore.shm.folder import NodeFolder, list_nodes, purge, reap_embedded
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.processes import CLI

STRANGER = 65534
AS_ROOT = os.geteuid() == 0
DEAD = "kvstore-embedded-99-00000000"  # like a folder that a killed store left
PRECIOUS = bytes(range(64))


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder in shared memory where everyone makes names, as /dev/shm is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        os.chmod(path, 0o1777)
        yield Path(path)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of ours, in a folder of ours, that no node knows."""
    os.chmod(tmp_path, 0o700)
    (tmp_path / "precious").write_bytes(PRECIOUS)
    return tmp_path / "precious"


@contextlib.contextmanager
def stranger() -> Iterator[None]:
    """What follows is done by another user, where we may become one."""
    if AS_ROOT:
        os.setegid(STRANGER)
        os.seteuid(STRANGER)
    try:
        yield
    finally:
        if AS_ROOT:
            os.seteuid(0)
            os.setegid(0)


def link_header(where: Path, precious: Path) -> None:
    where.mkdir(mode=0o777)
    (where / "header").symlink_to(precious)


def link_folder(where: Path, precious: Path) -> None:
    where.symlink_to(precious.parent)


def link_lock(where: Path, precious: Path) -> None:
    where.mkdir(mode=0o777)
    (where / "lock").symlink_to(precious)


def link_below(where: Path, precious: Path) -> None:
    where.mkdir(mode=0o777)
    (where / "index-1").symlink_to(precious.parent)
    (where / "sessions").mkdir()
    (where / "sessions" / "0000000000000001").symlink_to(precious)


def pipes(where: Path, precious: Path) -> None:
    where.mkdir(mode=0o777)
    os.mkfifo(where / "lock")
    os.mkfifo(where / "header")


PLANTS: list[Callable[[Path, Path], None]] = [link_header, link_folder, link_lock, link_below, pipes]


def works(store: kvstore.Store, seed: int) -> bool:
    """Whether pages can be stored, and come back."""
    keys = chain(seed, 2, salt=f"tenant-{seed}")
    cache = store.cache(SMALL, salt=f"tenant-{seed}")
    cache.put(keys, contents(keys))
    return bool(np.array_equal(cache.get(keys).data, contents(keys)))


def untouched(precious: Path) -> bool:
    return precious.read_bytes() == PRECIOUS and os.listdir(precious.parent) == ["precious"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plant", PLANTS)
def test_opening_a_store_beside_what_a_stranger_left(
    plant: Callable[[Path, Path], None], open_dir: Path, precious: Path
) -> None:
    with stranger():
        plant(open_dir / DEAD, precious)
    with kvstore.open(dram="8MiB", shm_dir=str(open_dir)) as store:
        assert works(store, 1)
    assert untouched(precious)
    if AS_ROOT:
        assert os.path.lexists(open_dir / DEAD), "what is another's is his to remove"


@pytest.mark.timeout(60)
def test_what_we_left_ourselves_goes_and_no_link_in_it_is_followed(open_dir: Path, precious: Path) -> None:
    (open_dir / DEAD).mkdir(mode=0o700)
    link_into(open_dir / DEAD, precious)
    assert reap_embedded(open_dir) == [DEAD.removeprefix("kvstore-")]
    assert untouched(precious)
    assert not (open_dir / DEAD).exists()


def link_into(folder: Path, precious: Path) -> None:
    """Links in every place that a purge opens, empties or removes."""
    (folder / "header").symlink_to(precious)
    (folder / "segment").symlink_to(precious)
    (folder / "index-3").symlink_to(precious.parent)
    (folder / "sessions").mkdir()
    (folder / "sessions" / "below").symlink_to(precious.parent)


@pytest.mark.timeout(60)
def test_a_second_name_of_a_file_is_not_written_to(open_dir: Path) -> None:
    folder = NodeFolder(open_dir, "embedded-1-2")
    folder.create()
    (open_dir / "precious").write_bytes(PRECIOUS)
    os.link(open_dir / "precious", folder.header)
    purge(folder.path)
    assert (open_dir / "precious").read_bytes() == PRECIOUS
    assert not folder.path.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["linked", "strangers"])
def test_purge_by_command_says_why_not(name: str, open_dir: Path, precious: Path) -> None:
    with stranger():
        (link_folder if name == "linked" else link_header)(open_dir / f"kvstore-{name}", precious)
    command = [*CLI, "purge", name]
    env = {**os.environ, "KVSTORE_SHM_DIR": str(open_dir)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert untouched(precious)
    if name == "linked":
        assert done.returncode == 2 and "not a folder" in done.stderr, done.stderr
        assert (open_dir / "kvstore-linked").is_symlink()
    else:  # ours to remove: root may purge what it names, and follows nothing there
        assert done.returncode == 0, done.stderr
        assert not (open_dir / "kvstore-strangers").exists()


@pytest.mark.skipif(not AS_ROOT, reason="needs a second user")
@pytest.mark.timeout(60)
def test_purge_all_takes_our_own_and_a_user_is_refused_anothers(open_dir: Path) -> None:
    with stranger():
        NodeFolder(open_dir, "theirs", group_shared=True).create()
    NodeFolder(open_dir, "ours").create()
    done = subprocess.run([*CLI, "purge", "--all"], env={**os.environ, "KVSTORE_SHM_DIR": str(open_dir)}, timeout=60)
    assert done.returncode == 0
    assert sorted(os.listdir(open_dir)) == ["kvstore-theirs"]
    NodeFolder(open_dir, "ours").create()
    os.chmod(open_dir / "kvstore-ours", 0o777)
    with stranger(), pytest.raises(InvalidRequest, match="belongs to user 0"):
        purge(open_dir / "kvstore-ours")
    assert (open_dir / "kvstore-ours" / "sessions").is_dir()


@pytest.mark.timeout(60)
def test_a_node_is_not_made_in_a_linked_folder(open_dir: Path, precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stranger():
        link_folder(open_dir / "kvstore-n", precious)
    with pytest.raises(InvalidRequest, match="name"):
        kvstore.open("n", dram="8MiB", shm_dir=str(open_dir))
    assert untouched(precious), "sessions/ was made in it"
    assert list_nodes(open_dir) == []
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(open_dir))
    with pytest.raises((NodeUnavailable, InvalidRequest)):
        kvstore.connect("n", timeout_s=0.1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fresh", [True, False])
def test_links_in_a_shared_folder_are_not_followed(fresh: bool, open_dir: Path, precious: Path) -> None:
    """Members of the group may make names in a shared node's folder: they are its trust domain, the files of its
    owner elsewhere are not."""
    with kvstore.open("n", dram="8MiB", shm_dir=str(open_dir), group=True) as store:
        assert works(store, 1)
        folder = NodeFolder(open_dir, "n")
    for path in [folder.header] if fresh else [folder.records(1), folder.uses(1)]:
        path.unlink()
        path.symlink_to(precious)
    for name in ("names", "pins", "control", "nvme", ".tmp-header", ".tmp-records-2", "index-2.tmp", "names.new"):
        (folder.path / name).unlink(missing_ok=True)
        (folder.path / name).symlink_to(precious if name != "index-2.tmp" else precious.parent)
    (folder.sessions / f"{5:016x}").symlink_to(precious)
    os.mkfifo(folder.session(6))
    epoch = folder.epochs()[0]
    (folder.index(epoch) / "data.mdb").unlink()
    (folder.index(epoch) / "data.mdb").symlink_to(precious)
    with kvstore.open("n", dram="8MiB", shm_dir=str(open_dir), group=True) as store:
        assert works(store, 2)
    assert untouched(precious)


# --- NVMe targets ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not AS_ROOT, reason="needs a second user")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_target_that_a_stranger_put_there_is_refused(kind: str, tmp_path: Path, open_dir: Path) -> None:
    (tmp_path / "blank").write_bytes(b"")
    place = open_dir / "kv"
    with stranger():
        if kind == "file":
            place.touch(0o666)
        else:
            place.symlink_to(tmp_path / "blank")
    with pytest.raises(InvalidRequest, match=f"{STRANGER}"):
        kvstore.open(dram="8MiB", nvme=f"{place}:16MiB", shm_dir=str(open_dir)).close()
    assert os.stat(place).st_size == 0
