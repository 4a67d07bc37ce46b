"""The rules of language that a pattern can hold, over docstrings, comments, texts and docs.

A folder is held to them once its text has been edited: ``EDITED`` grows until it names everything.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EDITED = (  # files, folders and pages of docs
    "engine/__init__.py",
    "engine/api",
    "engine/client.py",
    "engine/daemon.py",
    "engine/cli.py",
    "engine/compute",
    "engine/conductor",
    "engine/config.py",
    "engine/memory",
    "engine/model",
    "engine/pool",
    "engine/transfer",
    "engine/shell",
    "engine/simulator",
    "engine/state",
    "engine/text",
    "kvstore/about.py",
    "kvstore/adapters",
    "kvstore/boundary.py",
    "kvstore/cli",
    "kvstore/client",
    "kvstore/cluster",
    "kvstore/device",
    "kvstore/shm",
    "kvstore/tier",
    "kvstore/errors.py",
    "kvstore/limits.py",
    "kvstore/model",
    "kvstore/wire",
    "kvstore/server",
    "kvstore/node",
    "kvstore/state",
)

# Rule 1: a docstring stands alone.
NOT_ALONE = re.compile(r"(It|That|Those|The same|Of|So|One more)\b")
# Rules 2 to 5, anywhere.
PATTERNS = {
    "2: name the actor": re.compile(
        r"\b[Ww]hoever\b|(?:^|[.:;] )Who\b(?![^.]*\?)|\b(?:and|or|of|to|for|by|than|from) who\b", re.MULTILINE
    ),
    "3: is not a": re.compile(
        r"(?<![Tt]here )\b(?:is|are|was|were) (?:no|none)\b(?! (?:longer|more|less|later|earlier))"
    ),
    "4: no fronted of": re.compile(r"(?:^|[.:;] )Of (?!course)[a-z]", re.MULTILINE),
    "5: no so many": re.compile(r"\bso (?:many|long|much)\b(?! (?:as|that)\b)"),
}


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a docstring) of everything in a file that a person reads."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, re.sub(r"```.*?```|`[^`]*`", "", source, flags=re.DOTALL), False
        return
    docs, tree = set(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docs.add(id(first.value))
                yield first.lineno, first.value.value, True
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in docs
        ):
            yield node.lineno, node.value, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def complaints(path: Path) -> Iterator[str]:
    """What the rules say of a file."""
    for line, text, is_doc in texts(path):
        if is_doc and NOT_ALONE.match(text.strip()):
            yield f"{path.relative_to(ROOT)}:{line}: rule 1: {text.strip()[:60]!r}"
        for rule, pattern in PATTERNS.items():
            for found in pattern.finditer(re.sub(r"\s*\n\s*", " ", text)):
                around = re.sub(r"\s*\n\s*", " ", text)[max(0, found.start() - 20) : found.end() + 30]
                yield f"{path.relative_to(ROOT)}:{line}: rule {rule}: {around!r}"


def edited() -> list[Path]:
    """Every file that is held to the rules."""
    found = []
    for name in EDITED:
        place = ROOT / name
        assert place.exists(), f"{name} is not there"
        found += [place] if place.is_file() else sorted(place.rglob("*.py"))
    return found


@pytest.mark.parametrize("path", edited(), ids=lambda path: str(path.relative_to(ROOT)))
def test_text_keeps_the_rules(path: Path) -> None:
    found = list(complaints(path))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        '"""It is over."""',
        '"""Whoever reads this."""',
        '"""A value, and whoever has it."""',
        'raise ValueError("it is no JSON")',
        "x = 1  # Of a chain DRAM holds the first pages.",
        '"""Wait for so long."""',
    ],
)
def test_the_rules_bite(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_language.ROOT", tmp_path)
    file = tmp_path / "x.py"
    file.write_text(text + "\n")
    assert list(complaints(file))
