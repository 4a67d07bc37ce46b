"""Hooks of mkdocs that add README.md and other files as pages of the site, and make links between pages."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages of the site that are not in docs/, because readers of the repository look for them elsewhere.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
}
PLACES = {place: page for page, place in ELSEWHERE.items()}


def on_config(config: Any) -> Any:
    """Add the records of decisions to the navigation."""
    records = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    decisions = next(part["Decisions"] for part in config.nav if "Decisions" in part)
    decisions += [f"decisions/{record.name}" for record in records]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in ``docs/``."""
    for page, place in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / place).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn each name of a page between backticks, such as ``docs/api.md``, into a link."""

    def link(match: re.Match[str]) -> str:
        name = PLACES.get(match[1], match[1].removeprefix("docs/"))
        if (match[1] not in PLACES and not match[1].startswith("docs/")) or files.get_file_from_path(name) is None:
            return match[0]
        if name == page.file.src_path:
            return match[0]
        return f"[{match[0]}]({posixpath.relpath(name, posixpath.dirname(page.file.src_path) or '.')})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else re.sub(r"`([\w/.-]+\.md)`", link, part) for part in parts)
