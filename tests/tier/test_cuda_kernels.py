"""The kernel compiles for every device we name, without one; and what was compiled is kept where nobody else writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.device.cuda_copies import NAME, PIECES_MAX, TILE_BYTES, compile_kernel, launches, load_file, store_file


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_kernel_compiles_without_a_device(arch: int) -> None:
    cubin = compile_kernel(arch)
    assert cubin.startswith(b"\x7fELF")
    assert NAME in cubin


@pytest.mark.parametrize("damage", [lambda all: all[:-1], lambda all: all[:40] + b"?" + all[41:], lambda all: b""])
def test_a_damaged_one_is_compiled_again(damage, tmp_path: Path) -> None:
    path = tmp_path / "x.cubin"
    store_file(path, b"code" * 100)
    path.write_bytes(damage(path.read_bytes()))
    assert load_file(path) is None


def test_what_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "kvstore"
    path = folder / "x.cubin"
    store_file(path, b"code")
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    folder.chmod(0o770)
    assert load_file(path) is None
    store_file(folder / "y.cubin", b"code")  # nothing is put there either
    folder.chmod(0o700)
    assert [each.name for each in folder.iterdir()] == ["x.cubin"]
    (folder / "y.cubin").symlink_to(path)
    assert load_file(folder / "y.cubin") is None
    (tmp_path / "link").symlink_to(folder)
    assert load_file(tmp_path / "link" / "x.cubin") is None


def arguments(launch) -> tuple[np.ndarray, int, int]:
    """What the kernel gets of a launch: its three tables, the pieces and the tiles of a piece."""
    pieces, count, tiles = (
        int(at) for at in np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint64 * 3).from_address(launch.address))
    )
    table = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint64 * (3 * PIECES_MAX)).from_address(pieces))
    numbers = [np.ctypeslib.ctypes.c_uint32.from_address(at).value for at in (count, tiles)]
    return table.reshape(3, -1).copy(), *numbers


def test_each_piece_is_in_one_launch() -> None:
    count = 2 * PIECES_MAX + 3
    targets = np.arange(count, dtype=np.uint64) * 7 + (1 << 47)
    sources = targets + 1_000_000
    nbytes = np.arange(count, dtype=np.uint64) * 100
    nbytes[[5, PIECES_MAX]] = 0
    found = []
    for launch in launches(targets, sources, nbytes, 32):
        table, pieces, tiles = arguments(launch)
        assert tiles == -(-int(table[2].max()) // TILE_BYTES)
        assert launch.blocks == min(32, pieces * tiles)
        found += list(zip(*table[:, :pieces].tolist(), strict=True))
    some = nbytes > 0
    assert found == list(zip(targets[some].tolist(), sources[some].tolist(), nbytes[some].tolist(), strict=True))
    assert list(launches(targets, sources, np.zeros(count, np.uint64), 32)) == []
