"""What operators type about pages: durations, percentages, prompts, layouts; and how a lookup is printed."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.cli import lookup, prompt
from kvstore.cli.main import cli, run
from kvstore.cli.output import parse_duration
from kvstore.cli.prompt import find_layout, from_file, from_text, parse_layout
from kvstore.errors import InvalidRequest, NodeUnavailable, PermissionDenied
from kvstore.model.layout import Layout

LAYOUT = Layout(model="m", layers=2, kv_heads=1, head_dim=16, page_tokens=16)


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90.0), ("0", 0.0), ("1.5h", 5400.0), ("1h30m", 5400.0), ("1h 30m 5s", 5405.0)),
        *(("2d", 172_800.0), ("250ms", 0.25), ("10min", 600.0), (" 3 s ", 3.0), ("1w", 604_800.0)),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [3, 1, 4, 1, 5]
    np.save(tmp_path / "a.npy", np.array(ids, np.int64))
    written = {"a.json": json.dumps(ids), "b.json": json.dumps({"tokens": ids, "x": 1}), "a.txt": "3 1\n4,1 5\n"}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    for name in ("a.npy", *written):
        assert from_file(str(tmp_path / name)).tolist() == ids, name
        data = (tmp_path / name).read_bytes()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        assert from_file("-").tolist() == ids, name


class FakeTokenizer:
    """As `tokenizers.Tokenizer`: ids of a text's words are their lengths; 0 begins a prompt."""

    @classmethod
    def from_file(cls, path: str) -> FakeTokenizer:
        if not Path(path).read_text().startswith("{"):
            raise Exception("expected value at line 1\nand more")
        return cls()

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=[0] * add_special_tokens + [len(word) for word in text.split()])


def test_text_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tokenizers")
    module.Tokenizer = FakeTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "tokenizer.json", tmp_path):
        assert from_text("a bcd", str(path), True).tolist() == [0, 1, 3]
        assert from_text("a bcd", str(path), False).tolist() == [1, 3]
    (tmp_path / "tokenizer.json").write_text("x")
    with pytest.raises(InvalidRequest, match="^--tokenizer: .* cannot be used \\(expected value at line 1\\)$"):
        from_text("a", str(tmp_path), True)


# --- layouts --------------------------------------------------------------------------------------------------------

PAIRS = "model=m, layers=2,kv_heads=1,head_dim=16,page_tokens=16"


def test_layouts(tmp_path: Path) -> None:
    said = {name: getattr(LAYOUT, name) for name in ("model", "layers", "kv_heads", "head_dim", "page_tokens")}
    (tmp_path / "a.json").write_text(json.dumps(said))
    (tmp_path / "b.json").write_text(json.dumps({"layout": asdict(LAYOUT)}))
    (tmp_path / "a.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in said.items()))
    (tmp_path / "b.toml").write_text("[layout]\n" + (tmp_path / "a.toml").read_text())
    for text in (PAIRS, *(str(path) for path in tmp_path.iterdir())):
        assert parse_layout(text) == LAYOUT, text


class Knows:
    """A store that has met these layouts."""

    def __init__(self, *layouts: Layout, refusal: Exception | None = None) -> None:
        self._met = layouts
        self._refusal = refusal

    def layouts(self, model: str | None = None) -> list[dict[str, Any]]:
        if self._refusal is not None:
            raise self._refusal
        return [
            {"fingerprint": met.fingerprint.hex(), "layout": asdict(met), "pages": 1, "tenants": 1}
            for met in self._met
            if model in (None, met.model)
        ]


def test_a_layout_that_the_node_has_met() -> None:
    other = Layout(model="n", layers=1, head_dim=16)
    window = Layout(model="n", layers=1, head_dim=16, group="window")
    store: Any = Knows(LAYOUT, other, window)
    assert find_layout(store, None, "m") == LAYOUT
    assert find_layout(store, window.fingerprint.hex()[:8], None) == window
    assert find_layout(Knows(other), None, None) == other  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="^--layout: must be one of 2 known layouts of model 'n': .*group window"):
        find_layout(store, None, "n")
    for given, model in ((None, "o"), ("00000000", None)):
        with pytest.raises(InvalidRequest, match="^--layout: is needed: the node has no known layout"):
            find_layout(store, given, model)
    with pytest.raises(InvalidRequest, match="^--model"):
        find_layout(store, PAIRS, "n")
    for refusal in (PermissionDenied("no"), NodeUnavailable("down")):
        silent: Any = Knows(refusal=refusal)
        assert find_layout(silent, PAIRS, None) == LAYOUT  # nobody has to be asked
        with pytest.raises(InvalidRequest, match="^--layout: is needed"):
            find_layout(silent, None, None)


# --- what is printed ------------------------------------------------------------------------------------------------


def test_every_reason_has_a_text() -> None:
    about: dict[str, Any] = {"tiers": []}
    told: dict[str, Any] = {"elsewhere": [], "scanning": False}
    event = {"event": {"kind": "dropped", "tier": "dram", "reason": "checksum", "ago_s": 1.0}}
    met = {
        lookup._reason(about, 0, True, told, True),
        lookup._reason(about, 0, True, told, False),
        lookup._reason(about, 0, True, {**told, "elsewhere": [{}]}, True),
        lookup._reason(about, 0, True, {**told, "scanning": True}, True),
        lookup._reason(about, 4, False, told, True),
        lookup._reason({"tiers": ["dram"]}, 4, False, told, True),
        lookup._reason({**about, "identity": True}, 4, True, told, True),
    }
    assert met == set(lookup.TEXTS)
    assert lookup._reason({**about, **event}, 4, False, told, True) == "dropped"
    assert lookup._reason({**about, "writing": {}}, 4, False, told, True) == "writing"


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("lookup", "prompt: needs one of"),
        ("lookup --tokens 1 --file x", "--file: cannot be combined with --tokens"),
        ("lookup --tokens 1 --tokenizer bytes", "--tokenizer: needs --text"),
        ("lookup --text a", "--tokenizer: is needed for text"),
        ("evict", "evict: needs one of"),
        ("evict --pages 0", "--pages: 0 is not"),
        ("evict --pages 1 --bytes 1MiB", "--bytes: cannot be combined with --pages"),
        ("evict --percent 0", "--percent: must be above 0"),
        ("evict --age soon", "--age: must be a duration"),
        ("evict --tier tape --pages 1", "--tier: 'tape' is not one of"),
        ("evict --pages 1 --layout model=m", "--layout: needs a prompt"),
        ("pages --limit 0", "--limit: 0 is not"),
        ("pages --order hottest", "--order: 'hottest' is not one of"),
        ("pages --model m", "--model: needs a prompt"),
        ("pin", "prompt: needs one of"),
        ("pin --tokens 1", "--ttl: is needed"),
        ("pin --tokens 1 --ttl 31d", "--ttl: must be above zero"),
        ("pin --list --tokens 1", "--list: takes no prompt"),
        ("unpin", "ID: is needed: the number of a pin"),
        ("unpin x", "ID: must be the number"),
        ("unpin 1 --tokens 1", "ID: cannot be combined with a prompt"),
        ("unpin 1 --salt s", "--salt: needs a prompt"),
    ],
)
def test_what_makes_no_sense_is_one_line_before_any_node_is_asked(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("no node is asked")

    monkeypatch.setattr("kvstore.connect", connect)
    assert run(cli, command.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"kvstore: {said}") and printed.err.count("\n") == 1 and not printed.out


def test_bounds_of_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("1 " * 20)
    (tmp_path / "a.json").write_text(json.dumps(asdict(LAYOUT)))
    monkeypatch.setattr(prompt, "TOKENS_MAX", 19)
    with pytest.raises(InvalidRequest, match="^--file: must have at most 19 tokens"):
        from_file(str(tmp_path / "a.txt"))
    monkeypatch.setattr(prompt, "FILE_BYTES_MAX", 39)
    with pytest.raises(InvalidRequest, match="^--file: .* must have at most 39 bytes"):
        from_file(str(tmp_path / "a.txt"))
    with pytest.raises(InvalidRequest, match="^--layout: .* must have at most 39 bytes"):
        parse_layout(str(tmp_path / "a.json"))
