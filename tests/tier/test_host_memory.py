"""Arrays that start at a memory page, and that the copy is a copy in each of its ways."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore
from kvstore.device import host_memory
from kvstore.device.host_memory import PAGE_BYTES, copy, empty
from kvstore.errors import InvalidRequest


@pytest.mark.parametrize("shape", [0, 1, 7, np.int64(5), (3, 70_000), [2, 3, 5], (), (4, 0)])
@pytest.mark.parametrize("dtype", [np.uint8, "float32", np.dtype("<u2")])
def test_empty_is_numpys_but_starts_at_a_page(shape: object, dtype: object) -> None:
    ours, theirs = kvstore.empty(shape, dtype), np.empty(shape, dtype)  # type: ignore[arg-type,call-overload]
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert ours.ctypes.data % PAGE_BYTES == 0 or not ours.size
    assert ours.flags.c_contiguous and ours.flags.writeable
    ours[...] = 3
    assert (ours == 3).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "field"),
    [(-1, np.uint8, "shape"), ((3, -1), np.uint8, "shape"), (3, object, "dtype"), (3, "no such", "dtype")],
)
def test_empty_refuses_by_name(shape: object, dtype: object, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        empty(shape, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("looped", [range(0), range(1, 1 << 30)], ids=["memcpy", "loop"])
@pytest.mark.parametrize("start", [0, 1, 16, 31, 4095])
def test_a_copy_is_a_copy(monkeypatch: pytest.MonkeyPatch, looped: range, start: int) -> None:
    monkeypatch.setattr(host_memory, "_LOOP_LENGTHS", looped)
    source = np.random.default_rng(start).integers(0, 256, (5, 40_000), np.uint8)
    source.flags.writeable = False
    memory = empty(source.nbytes + 2 * PAGE_BYTES)
    memory[:] = 0
    target = memory[start : start + source.nbytes].reshape(source.shape)
    for part in (np.s_[:], np.s_[1:3], np.s_[:, 7:30_007], np.s_[2], np.s_[0:0]):
        target[:] = 0
        copy(target[part], source[part])
        assert np.array_equal(target[part], source[part])
        target[part] = 0
        assert not memory.any(), "a byte outside was written"
    layers, parts = source.reshape(5, 4, 10_000), target.reshape(5, 4, 10_000)
    copy(parts[:, 1:3, 100:9_000], layers[:, 1:3, 100:9_000])
    assert np.array_equal(parts[:, 1:3, 100:9_000], layers[:, 1:3, 100:9_000])
