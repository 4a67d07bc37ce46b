"""The rules of language that a pattern can check, for docstrings, comments, texts and docs."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECKED = (  # files and folders
    "kvstore",
    "engine",
    "bench",
    "examples",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
GENERATED = "kvstore/pb/"

# Rule 1: a docstring stands alone.
NOT_ALONE = re.compile(r"(It|That|Those|The same|Of|So|One more)\b")
# Rules 2 to 8, anywhere.
PATTERNS = {
    "2: name the actor": re.compile(
        r"\b[Ww]hoever\b|(?:^|[.:;] )Who\b(?![^.]*\?)|\b(?:and|or|of|to|for|by|than|from) who\b", re.MULTILINE
    ),
    "3: is not a": re.compile(
        r"(?<![Tt]here )\b(?:is|are|was|were) (?:no|none)\b(?! (?:longer|more|less|later|earlier))"
    ),
    "4: no fronted of": re.compile(r"(?:^|[.:;] )Of (?!course)[a-z]", re.MULTILINE),
    "5: no so many": re.compile(r"\bso (?:many|long|much)\b(?! (?:as|that)\b)"),
    "6: processes have names": re.compile(r"\b(?:[Nn]o|[Ss]ome|[Ee]very)body\b"),
    "7: next to, in addition to": re.compile(r"\b[Bb]eside\b(?![`:])"),
    "8: usual adverbs": re.compile(
        r"\banew\b(?!:)|\bmeanwhile\b(?! \w)|\b[Mm]ostly\b|\bby (?:itself|themselves)\b|\b(?:of late|in vain)\b"
    ),
}


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether it is a docstring) of everything in a file that a person reads."""
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
    for node in ast.walk(tree):
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
    """Yield a line for each place where a file breaks a rule."""
    for line, text, is_doc in texts(path):
        if is_doc and NOT_ALONE.match(text.strip()):
            yield f"{path.relative_to(ROOT)}:{line}: rule 1: {text.strip()[:60]!r}"
        for rule, pattern in PATTERNS.items():
            for found in pattern.finditer(re.sub(r"\s*\n\s*", " ", text)):
                around = re.sub(r"\s*\n\s*", " ", text)[max(0, found.start() - 20) : found.end() + 30]
                yield f"{path.relative_to(ROOT)}:{line}: rule {rule}: {around!r}"


def checked() -> list[Path]:
    """Every file that the rules apply to."""
    found = []
    for name in CHECKED:
        place = ROOT / name
        assert place.exists(), f"{name} does not exist"
        pages = [place] if place.is_file() else sorted((*place.rglob("*.py"), *place.rglob("*.md")))
        found += [page for page in pages if not str(page.relative_to(ROOT)).startswith(GENERATED)]
    return found


@pytest.mark.parametrize("path", checked(), ids=lambda path: str(path.relative_to(ROOT)))
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
        "x = 1  # nobody reads it",
        "x = 1  # stored beside the page",
        'raise ValueError("the file was made anew")',
        '"""A page that changed meanwhile."""',
    ],
)
def test_the_rules_bite(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_language.ROOT", tmp_path)
    file = tmp_path / "x.py"
    file.write_text(text + "\n")
    assert list(complaints(file))


SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 +[^\n]*\n|\n)+)", re.MULTILINE)


def described(doc: str) -> list[str]:
    """The names that the sections "Args" and "Attributes" of a docstring describe."""
    names = []
    for _, body in SECTION.findall(doc + "\n"):
        indent = min(len(line) - len(line.lstrip()) for line in body.splitlines() if line.strip())
        for line in body.splitlines():
            head = re.match(rf" {{{indent}}}([a-z_*][\w*, ]*?):", line)
            names += [name.strip(" *") for name in head[1].split(",")] if head else []
    return names


def names_in(node: ast.AST) -> set[str]:
    """Every name, argument, attribute and text in a piece of code."""
    names = set()
    for each in ast.walk(node):
        for field in ("id", "arg", "attr", "name", "value"):
            value = getattr(each, field, None)
            names |= {value} if isinstance(value, str) else set()
    return names


@pytest.mark.parametrize("part", ("kvstore", "engine"))
def test_names_that_a_docstring_describes_exist(part: str) -> None:
    """Arguments and attributes that were renamed keep their description."""
    wrong = []
    for path in sorted((ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            documented = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            inherits = isinstance(node, ast.ClassDef) and any(
                getattr(base, "id", "") not in ("Protocol", "ABC", "NamedTuple") for base in node.bases
            )
            if documented and not inherits:
                names = described(ast.get_docstring(node) or "")
                missing = set(names) - names_in(node) if names else set()
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in sorted(missing)]
    assert wrong == []
