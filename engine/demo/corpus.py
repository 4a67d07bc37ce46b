"""What the demo's model learns from: this project's documents, and questions about them with answers out of them.

A question is made from a heading or from a row of a table, and its answer is the text that stands there. Some questions
come with the beginning of their document in front, as the demo asks them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.demo.script import QUESTIONS, SYSTEM

ROOT = Path(__file__).resolve().parents[2]
ANSWER_CHARACTERS_MAX = 300
EXCERPT_CHARACTERS = (300, 1800)
EXCERPTS = 0.3  # of all questions
HEADING_QUESTIONS = ("Tell me about {}.", "Explain {}.")
ROW_QUESTIONS = ("What is {}?", "Explain {}.")

_HEADING = re.compile(r"^#{1,4} +(.+)$", re.MULTILINE)
_ROW = re.compile(r"^\| *([^|]+?) *\| *([^|]+?) *\|", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


@dataclass(frozen=True)
class Lesson:
    """A question about a document, and the answer that the document gives."""

    document: str
    question: str
    answer: str


def documents() -> dict[str, str]:
    """Name and text of each document, in the order of their names."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def questions(texts: dict[str, str], chance: random.Random) -> Iterator[Lesson]:
    """Questions about all of them, worded anew at each call."""
    for name, text in texts.items():
        headings = list(_HEADING.finditer(text))
        for index, heading in enumerate(headings):
            end = headings[index + 1].start() if index + 1 < len(headings) else len(text)
            answer = _shortened(text[heading.end() : end])
            if answer:
                wording = chance.choice(HEADING_QUESTIONS)
                yield Lesson(name, wording.format(_plain(heading[1])), answer)
                yield Lesson(name, chance.choice(QUESTIONS), answer)
        for row in _ROW.finditer(text):
            if set(row[2]) - set("-: "):
                wording = chance.choice(ROW_QUESTIONS)
                yield Lesson(name, wording.format(_plain(row[1])), f"{_plain(row[1])}: {row[2]}")


def messages(asked: Lesson, texts: dict[str, str], chance: random.Random) -> list[dict[str, str]]:
    """The question as a chat; some of them after the beginning of the document."""
    said = [{"role": "user", "content": asked.question}, {"role": "assistant", "content": asked.answer}]
    if chance.random() < EXCERPTS:
        excerpt = texts[asked.document][: chance.randint(*EXCERPT_CHARACTERS)]
        said.insert(0, {"role": "system", "content": f"{SYSTEM}# {asked.document}\n\n{excerpt}"})
    return said


def _shortened(text: str) -> str:
    """The first sentences of a section, tables and examples left out."""
    lines = [line for line in text.split("\n") if not line.startswith(("|", "    ", "```", "#"))]
    answer = ""
    for sentence in _SENTENCE_END.split(" ".join(" ".join(lines).split())):
        if len(answer) + len(sentence) > ANSWER_CHARACTERS_MAX:
            break
        answer = f"{answer} {sentence}".strip()
    return answer


def _plain(text: str) -> str:
    return text.replace("`", "").replace("*", "").strip()
