"""The secret of a pool: where it is drawn, where it lies, what outlives what; and whose keys have which tags."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import ARRAY_PAGES, TAG_BYTES, apply_tag, tag_of
from kvstore.shm.folder import NodeFolder, new_secret, purge, read_secret
from kvstore.shm.header import Header
from kvstore.tier.nvme.disk import BLOCK_BYTES
from kvstore.tier.nvme.table import Superblock
from tests.helpers.processes import wait_until

LAYOUT = Layout(model="secret", layers=2, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=16)
PAGES = 4
PROMPT = np.arange(PAGES * 16, dtype=np.uint32)
Open = Callable[..., Store]


def pages(byte: int = 1) -> npt.NDArray[np.uint8]:
    return np.full((PAGES, LAYOUT.page_bytes), byte, np.uint8)


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Stores of one name, one after the other; ``nvme`` says which targets."""

    def open_(nvme: str = "", **more: Any) -> Store:
        targets = [f"{tmp_path / name}:8MiB" for name in nvme]
        settings = {"dram": "4MiB", "nvme_extent": "1MiB", "demote_at": 0.0, "shm_dir": tmp_path, **more}
        return kvstore.open("n", nvme=targets, **settings)

    return open_


def folder(tmp_path: Path) -> NodeFolder:
    return NodeFolder(tmp_path, "n")


def secret_of(tmp_path: Path) -> bytes | None:
    """What the folder says."""
    header = Header.open(folder(tmp_path))
    assert header is not None
    with_secret = read_secret(folder(tmp_path), header.incarnation)
    header.close()
    return with_secret


def reboot(tmp_path: Path) -> None:
    shutil.rmtree(folder(tmp_path).path)


def on_disk(path: Path) -> list[bytes]:
    """The secrets at both ends of a target."""
    data = path.read_bytes()
    blocks = (np.frombuffer(data[start:][:BLOCK_BYTES], np.uint8) for start in (0, len(data) - BLOCK_BYTES))
    found = [Superblock.unpacked(block) for block in blocks]
    return [block.secret if block is not None else b"" for block in found]


def fill(store: Store, nvme: bool = False) -> None:
    assert store.cache(LAYOUT).put(PROMPT, pages()) == PAGES
    if nvme:
        wait_until("saved", lambda: store.stats()["tiers"]["nvme"]["pages"] == PAGES)


def check(store: Store) -> None:
    cache = store.cache(LAYOUT)
    keys = cache.keys(PROMPT)
    wait_until("all are there", lambda: cache.lookup(keys).pages == PAGES)
    found = cache.get(keys)
    assert found.pages == PAGES and found.data is not None and (found.data == 1).all()
    assert store.verify()["findings"] == []


def test_tags_tell_roots_apart_and_leave_keys_alone() -> None:
    secret, root = new_secret(), bytes(range(16))
    tag = tag_of(secret, root)
    assert len(tag) == TAG_BYTES and tag != tag_of(secret, root[::-1]) and tag != tag_of(new_secret(), root)
    assert tag == tag_of(secret, root)
    keys = apply_tag([root, root[::-1]], tag)
    assert keys == [root[:8] + tag, root[::-1][:8] + tag] == apply_tag(keys, tag)
    many = [new_secret() for _ in range(2 * ARRAY_PAGES)]
    assert apply_tag(many, tag) == [link[:8] + tag for link in many]
    assert apply_tag(many, b"\0" * 8) == [link[:8] + b"\0" * 8 for link in many]


def test_without_nvme_it_lasts_as_long_as_the_memory(opened: Open, tmp_path: Path) -> None:
    with opened() as store:
        fill(store)
        first = secret_of(tmp_path)
        assert first is not None and stat.S_IMODE(folder(tmp_path).secret.stat().st_mode) == 0o600
        keys = store.cache(LAYOUT).keys(PROMPT)
        assert keys.tag == tag_of(first, keys.root) and all(key.endswith(keys.tag) for key in keys.hashes)
        assert [page["key"] for page in store.pages(order="place")["pages"]] == [key.hex() for key in keys.hashes]
    with opened() as store:
        assert secret_of(tmp_path) == first
        check(store)
    reboot(tmp_path)
    with opened() as store:
        assert secret_of(tmp_path) not in (first, None)
        assert store.cache(LAYOUT).lookup(keys).pages == 0
        fill(store)


def test_a_reboot_finds_it_on_nvme(opened: Open, tmp_path: Path) -> None:
    with opened("a") as store:
        fill(store, nvme=True)
        secret = secret_of(tmp_path)
    assert on_disk(tmp_path / "a") == [secret, secret] and any(secret)
    reboot(tmp_path)
    with opened("a") as store:
        assert secret_of(tmp_path) == secret
        check(store)


@pytest.mark.parametrize("damage", ["absent", "cut", "of another incarnation"])
def test_memory_whose_secret_is_lost_is_made_anew(damage: str, opened: Open, tmp_path: Path) -> None:
    """What NVMe holds is found again: the secret is there as well."""
    with opened("a") as store:
        fill(store, nvme=True)
        secret = secret_of(tmp_path)
    path = folder(tmp_path).secret
    data = path.read_bytes()
    path.unlink()
    if damage != "absent":
        path.write_bytes(data[:-1] if damage == "cut" else data[:8] + bytes(8) + data[16:])
    assert secret_of(tmp_path) is None
    with opened("a") as store:
        assert secret_of(tmp_path) == secret
        check(store)


def test_a_target_that_comes_later_gets_it(opened: Open, tmp_path: Path) -> None:
    with opened() as store:
        fill(store)
        secret = secret_of(tmp_path)
    for targets in ("a", "ba"):
        with opened(targets) as store:
            check(store)
        assert on_disk(tmp_path / targets[0]) == [secret, secret]


def test_targets_of_two_pools_are_not_mixed(opened: Open, tmp_path: Path) -> None:
    secrets = []
    for name in "ab":
        with opened(name) as store:
            fill(store, nvme=True)
            secrets.append(secret_of(tmp_path))
        reboot(tmp_path)
    assert secrets[0] != secrets[1]
    with pytest.raises(InvalidRequest, match="another secret.*--format"):
        opened("ab")
    assert [on_disk(tmp_path / name) for name in "ab"] == [[secret] * 2 for secret in secrets], "nothing was changed"
    with opened("ab", nvme_format=True) as store:
        check(store)
    assert on_disk(tmp_path / "b") == [secrets[0]] * 2


def test_caches_and_keys_outlive_a_pool(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes on while the node is made anew, with another secret: misses, then hits; nothing raises."""
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(tmp_path))
    with opened() as store:
        fill(store)
        client = kvstore.connect("n")
        cache = client.cache(LAYOUT)
        keys = cache.keys(PROMPT)
        assert cache.get(keys).pages == PAGES
    purge(folder(tmp_path).path)
    assert cache.get(keys).pages == cache.lookup(keys).pages == 0
    with opened() as store:
        wait_until("it is seen", lambda: cache.lookup(keys).pages == 0 and cache.keys(PROMPT).tag != keys.tag)
        fill(store)
        for given in (keys, PROMPT, cache.keys(PROMPT)):
            assert cache.lookup(given).pages >= PAGES - 1 and cache.get(given).pages >= PAGES - 1
        assert store.pin(keys, 9.0)["pages"] == PAGES and store.unpin(keys=keys) == {"unpinned": 1}
        with store.cache(LAYOUT).lease(keys) as lease:
            assert len(lease.pages) == PAGES
    client.close()
