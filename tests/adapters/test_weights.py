"""Model folders are told apart by their config and their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.adapters.weights import SAMPLE_BYTES, folder_digest, required_digest

SIZE = 3 * SAMPLE_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(bytes(SIZE))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def changed(at: int) -> Callable[[Path], object]:
    data = bytearray(SIZE)
    data[at] = 1
    return lambda folder: (folder / "model-1.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        changed(0),
        changed(SIZE - 1),
        lambda folder: (folder / "model-1.safetensors").write_bytes(bytes(SIZE + 1)),
        lambda folder: (folder / "model-1.safetensors").rename(folder / "model-2.safetensors"),
        lambda folder: (folder / "model-2.safetensors").write_bytes(b""),
        lambda folder: (folder / "config.json").write_text('{"rope_theta": 2}'),
        lambda folder: (folder / "config.json").unlink(),
    ],
    ids=["front", "end", "size", "name", "more", "config", "no config"],
)
def test_what_makes_another_model(folder: Path, change: Callable[[Path], object]) -> None:
    before = folder_digest(str(folder))
    assert before == folder_digest(str(folder)) != ""
    change(folder)
    assert folder_digest(str(folder)) not in ("", before)


def test_what_makes_no_other_model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = folder_digest(str(folder))
    (folder / "tokenizer.json").write_text('{"version": 2}')
    moved = folder.rename(tmp_path_factory.mktemp("else") / "where")
    assert folder_digest(str(moved)) == before == required_digest("a host", str(moved))


def test_a_name_is_no_folder(folder: Path) -> None:
    missing = str(folder / "missing")
    assert folder_digest("") == folder_digest("some/model") == folder_digest(missing) == ""
    with pytest.raises(ValueError, match="kvstore for a host: there is no folder"):
        required_digest("a host", missing)
    (folder / "model-2.safetensors").symlink_to("gone")
    with pytest.raises(ValueError, match="kvstore for a host: weights in .* cannot be read"):
        required_digest("a host", str(folder))
