"""The demo's way in from outside: chats over HTTP with a conductor, which says where each one went and why."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from engine.demo.script import SYSTEM, Document
from kvstore.cli.output import table_text

ANSWER_S: Final = 120.0
ANSWER_TOKENS: Final = 24
EXCERPT_CHARACTERS: Final = 1200
# (document, question): two users ask about the same one, then about another one, then again about the first.
ASKED: Final = (
    (0, "What is this about?"),
    (0, "What happens when DRAM is full?"),
    (1, "Who is allowed to do that?"),
    (0, "Which of this survives a restart of the machine?"),
)
HEADERS: Final = ("chat", "about", "prompt", "cached", "computed by", "answered by", "TTFT", "expected: wait", "move",
                  "prefill", "in all")  # fmt: skip
INTRODUCTION: Final = """
Chats over HTTP: the conductor's OpenAI-compatible door, streamed. It sends each one where its first token is expected
soonest: the wait there, the pages to be moved there, and the part of the prompt that nobody has.
"""


@dataclass(frozen=True)
class FrontRow:
    """One chat. ``route``: the conductor's document; ``cached_tokens``: as the engine found them."""

    document: str
    question: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    route: dict[str, Any] = field(default_factory=dict)


class FrontDoor:
    """Asks the conductor at ``address``; ``say`` is told line by line, as it happens."""

    def __init__(self, address: str, say: Callable[..., None]) -> None:
        self._address = address
        self._say = say

    def run(self, documents: list[Document], is_chat: bool) -> list[dict[str, Any]]:
        """All chats. ``is_chat`` False: the model has no chat template, and the same is asked as plain text."""
        self._say(INTRODUCTION)
        rows = [self._ask(documents[number % len(documents)], question, is_chat) for number, question in ASKED]
        self._say(f"\n{table(rows)}\n")
        return [asdict(row) for row in rows]

    def _ask(self, document: Document, question: str, is_chat: bool) -> FrontRow:
        system = f"{SYSTEM}# {document.name}\n\n{document.text[:EXCERPT_CHARACTERS]}"
        self._say(f"  {document.name}: {question}\n  > ", nl=False)
        asked: dict[str, Any] = {"model": self._model(), "stream": True, "stream_options": {"include_usage": True}}
        asked |= {"max_tokens": ANSWER_TOKENS, "temperature": 0, "kvstore": {"explain": True}}
        if is_chat:
            asked["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        else:
            asked["prompt"] = f"{system}\n\nUser: {question}\nAssistant:"
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        text, ttft_ms = "", 0.0
        route: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        began_s = time.monotonic()
        for event in self._events(path, asked):
            route = event.get("kvstore", {}).get("route", route)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                more = choice["delta"].get("content", "") if is_chat else choice["text"]
                ttft_ms = ttft_ms or 1e3 * (time.monotonic() - began_s)
                text += more
                self._say("".join(letter if letter.isprintable() else "." for letter in more), nl=False)
        self._say("")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return FrontRow(document.name, question, text, usage["prompt_tokens"], cached, ttft_ms, route)

    def _model(self) -> str:
        connection = http.client.HTTPConnection(self._address, timeout=ANSWER_S)
        try:
            connection.request("GET", "/v1/models")
            return str(json.loads(connection.getresponse().read())["data"][0]["id"])
        finally:
            connection.close()

    def _events(self, path: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(self._address, timeout=ANSWER_S)
        try:
            connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise AssertionError(f"the conductor answered {response.status}: {response.read(4096)!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        finally:
            connection.close()


def table(rows: list[FrontRow]) -> str:
    """A line per chat: where it went, and what was expected of that."""
    cells = []
    for number, row in enumerate(rows):
        route = row.route
        expected = [f"{1e3 * route[name]:.0f} ms" for name in ("wait_s", "move_s", "prefill_s", "first_token_s")]
        engines = (route[what].rpartition("/")[2] for what in ("computes", "answers"))  # of a socket its file's name
        cells.append(
            (number, row.document, row.prompt_tokens, row.cached_tokens, *engines, f"{row.ttft_ms:.0f} ms", *expected)
        )
    return table_text(HEADERS, cells)
