"""README and docs name what is there: files, constants, commands with their flags; their Python runs."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import kvstore
from kvstore.cli.main import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / folder / "README.md" for folder in ("bench", "examples"))])
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# A page may leave out where a path begins: `state/space.py` is kvstore's, `shell/engine.py` is the engine's.
BASES = (ROOT, ROOT / "kvstore", ROOT / "engine")
FOLDERS = {found.name for base in BASES for found in base.iterdir() if found.is_dir() and found.name.isidentifier()}

CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
CONSTANT = re.compile(r"[A-Z]+(?:_[A-Z0-9]+)+")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items and table rows, without code."""
    for part in re.split(r"\n\s*\n", CODE.sub("", text)):
        yield from re.split(r"\n(?=\d+\. |- |\|)", part)


def quoted(text: str) -> Iterator[str]:
    """What stands between backticks."""
    for block in blocks(text):
        yield from QUOTED.findall(block)


def absent(block: str) -> list[str]:
    """Paths that a paragraph names and that are not there. A short one is below a folder that it has named before."""
    missing, folders = [], [*BASES, ROOT / "docs"]
    for text in QUOTED.findall(block):
        name = text.partition(":")[0]
        in_folder = "/" in name and name.split("/")[0] in FOLDERS
        if not PATH.fullmatch(name) or not (in_folder or name.endswith((".py", ".md"))):
            continue
        found = next((folder / name for folder in folders if (folder / name).exists()), None)
        if found is None:
            missing.append(name)
        else:
            folders.append(found if found.is_dir() else found.parent)
    return missing


@every_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    assert [name for block in blocks(page.read_text()) for name in absent(block)] == []


def test_a_file_that_is_not_there_is_noticed() -> None:
    assert absent("see `kvstore/state/space.py`, `frames.py`, `docs/api.md` and `compute/cpu.py`") == ["compute/cpu.py"]
    assert absent("see `kvstore/tier/`: `dram.py`, `space.py`") == ["space.py"]
    assert absent("`kvstore/nowhere/` and `team-a/x`, `state/frames.py:Segment.donor`") == ["kvstore/nowhere/"]


PROMISED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def unbroken(promises: str) -> list[str]:
    """Promises that name no test, and tests named there that do not exist."""
    missing = []
    for promise in re.findall(r"^- .*(?:\n  .*)*", promises, re.MULTILINE):
        tests = PROMISED.findall(promise)
        if not tests:
            missing.append(promise.partition("\n")[0])
        for file, name in tests:
            tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).is_file() else ast.Module([], [])
            if name not in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}:
                missing.append(f"{file}::{name}")
    return missing


def test_each_promise_names_tests_that_exist() -> None:
    assert unbroken((ROOT / "docs/promises.md").read_text()) == []
    assert unbroken("- **A.** It is.\n- **B.**\n  Test: `tests/test_docs.py::test_none`.") == [
        "- **A.** It is.",
        "tests/test_docs.py::test_none",
    ]


@cache
def source() -> str:
    """All code, and what goes with it."""
    files = [file for folder in ("kvstore", "engine", "proto", "deploy") for file in (ROOT / folder).rglob("*.*")]
    return "\n".join(file.read_text() for file in files if file.suffix in (".py", ".proto", ".service", ".toml"))


@every_page
def test_constants_that_a_page_names_are_there(page: Path) -> None:
    named = {name for text in quoted(page.read_text()) if CONSTANT.fullmatch(name := text.partition("=")[0])}
    own = {
        name for name in named if not name.startswith(("KVSTORE_ENGINE_", "KVSTORE_CONDUCTOR_"))
    }  # made of the names of settings
    assert {name for name in own if not re.search(rf"\b{name}\b", source())} == set()


def test_a_path_names_each_folder_once() -> None:
    """The numbered steps of each path begin with a folder, and no folder comes twice."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Five paths")[2].partition("\n## ")[0]
    paths = [re.findall(r"^\d+\. `([^`]+/)`", path, re.MULTILINE) for path in text.split("\n### ")[1:]]
    assert len(paths) == 5 and all(len(path) >= 4 for path in paths)
    for path in paths:
        assert len(set(path)) == len(path), path


def test_every_request_that_can_be_published_is_named() -> None:
    """Beside the log of puts, as the code that decodes it has them."""
    drain = (ROOT / "kvstore" / "node" / "put_drain.py").read_text()
    page = (ROOT / "docs" / "internals" / "node.md").read_text()
    ops = re.findall(r"^ +Op\.(\w+): self\._\w+,$", drain, re.MULTILINE)
    assert len(ops) >= 7 and [op for op in ops if f"`{op}`" not in page] == []


def test_the_tour_takes_ten_minutes() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 250


def broken_links(page: Path) -> list[str]:
    """Targets of links in a page that are neither addresses elsewhere nor files, and headings that do not exist."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        if re.match(r"https?://", target):
            continue
        titles = re.findall(r"^#+ (.*)$", CODE.sub("", file.read_text()), re.MULTILINE) if file.is_file() else []
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        if not file.exists() or (heading and heading not in anchors):
            broken.append(target)
    return broken


@every_page
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](page.md#no-title) [c](none.md) [d](https://example.com)\n")
    assert broken_links(page) == ["page.md#no-title", "none.md"]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"^ +- .*?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in docs - listed if not page.startswith("decisions/0")} == set()  # `docs/site.py` lists them
    assert all((ROOT / "docs" / name).exists() for name in listed & docs)


# --- commands and code ------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Calls of ``kvstore`` in blocks of code, and between backticks, as words; a remark after them is left out."""
    code = [code for _, code in CODE.findall(text)] + re.findall(r"^    (.+)$", text, re.MULTILINE)
    lines = [line.strip().removeprefix(".venv/bin/") for part in code for line in part.splitlines()]
    for line in [re.split(r"\s{3,}|\s#|\s>>?\s|\)\s", line)[0] for line in lines] + list(quoted(text)):
        if line.startswith("kvstore ") and "`" not in line:
            yield shlex.split(line.replace("[", " ").replace("]", " "))[1:]


def unknown(words: list[str]) -> str:
    """The first word of a call that the command line does not know; "" where it knows all of them."""
    found: click.Command = cli
    for word in words:
        if word.startswith("--"):
            flags = {flag for parameter in found.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {
                "--help",
                "--version",
            }
            if word.split("=")[0] not in flags:
                return word
        elif isinstance(found, click.Group) and not word.startswith("-"):
            below = found.get_command(click.Context(found), word)
            if below is None:
                return "" if found.invoke_without_command else word
            found = below
    return ""


@every_page
def test_commands_that_a_page_shows_are_there(page: Path) -> None:
    assert [(words, wrong) for words in commands(page.read_text()) if (wrong := unknown(words))] == []


def test_a_command_that_is_not_there_is_noticed() -> None:
    assert unknown(["evict", "--percent", "20", "--age", "1h"]) == ""
    assert unknown(["evict", "--percentage", "20"]) == "--percentage"
    assert unknown(["simulate", "cache", "--capacities=5"]) == "--capacities=5"
    assert unknown(["engine", "ask", "--at", "x", "text"]) == "" and unknown(["expel"]) == "expel"


@pytest.mark.parametrize("name", ["README.md", "docs/python.md"])
def test_python_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but in a smaller node."""
    opened = kvstore.open
    sizes = {"dram": "192MiB", "nvme": f"{tmp_path}/kv:256MiB", "shm_dir": str(tmp_path)}
    monkeypatch.setattr(kvstore, "open", lambda **_: opened(**sizes))
    code = next(code for language, code in CODE.findall((ROOT / name).read_text()) if language == "python")
    names: dict[str, object] = {}
    exec(compile(code, name, "exec"), names)
    match = names["match"]
    assert isinstance(match, kvstore.Match) and match.pages == 15
