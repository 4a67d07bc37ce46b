"""The acts of the demo: chats over HTTP, conversations with and without the pool, a kill -9, and a restart."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from engine.demo.machine import Machine
from engine.model.request import Finished, Token, Usage
from engine.text.tokenizer import ByteTokenizer
from kvstore.cli.output import bytes_text, duration_text, ratio_text, table_text
from kvstore.errors import InvalidRequest, NodeUnavailable

Encode = Callable[[str, bool], list[int]]
"""Returns the tokens of a string. The flag is True if the string begins a prompt, so that special tokens precede it."""

ANSWER_S: Final = 120.0  # the deadline of an answer
ANSWER_TOKENS: Final = 10
CHAT_TOKENS: Final = 24
EXCERPT_CHARACTERS: Final = 1200  # of a document in a chat
EXCERPT_TOKENS: Final = 600  # of a document in a conversation
WARM_UP_TOKENS: Final = 300  # long enough that the prefill engine computes the prompt
DOCUMENTS: Final = 3
SYSTEM: Final = "You answer questions about kvstore from its documents. Be brief.\n\n"
QUESTIONS: Final = (
    "What is this about?",
    "What happens when DRAM is full?",
    "Who is allowed to do that?",
    "Which of this survives a restart of the machine?",
    "How do I see what is going on?",
    "What is done when a process dies in the middle?",
    "Which settings matter most?",
)
CHATS: Final = (0, 0, 1, 0)  # the number of the document of each chat
USERS: Final = (0, 1, 0, 2)  # the number of the document of each user; the first and the third have the same one
TURNS: Final = (("up", 0), ("up", 1), ("up", 2), ("up", 3), ("up", 0), ("killed", 1), ("killed", 2), ("back", 3))
RESTARTED: Final = (("restarted", 0), ("restarted", 1)) * 2
GIBBERISH: Final = "The weights are random, so answers are gibberish. Use `--model PATH` for a real model."
CHATS_FOLLOW: Final = """
Chats with the conductor over OpenAI's HTTP API. The conductor chooses the engines with the earliest first token:
"""
KILLED: Final = "-- kill -9 of the node: its pages can still be read, and no page is written until the node is back"
RESTARTS: Final = """
The machine restarts: all processes end, shared memory is emptied, and the NVMe file stays. Two users continue. From now
on, engines also keep pages in their own memory (HBM):
"""
HEADERS: Final = ("request", "node", "prompt", "HBM", "DRAM", "NVMe", "computed", "by", "TTFT", "without", "loaded",
                  "moved", "answer")  # fmt: skip
MEANING: Final = """
  HBM, DRAM, NVMe  tokens of the prompt that were reused from this tier; the engine in "by" computed the others
  TTFT, without    time to the first token with the pool, and without it
  loaded, moved    bytes of KV that were loaded from the pool, and moved from the prefill engine
  answer           same: the answers with and without the pool have the same tokens"""


@dataclass
class Conversation:
    """A user's questions about a document, and the answers.

    Attributes:
        tokens: the conversation so far, with which the next prompt begins.
        turns: the number of questions so far.
    """

    user: int
    document: str
    tokens: list[int]
    turns: int = 0


@dataclass(frozen=True, kw_only=True)
class DemoRow:
    """A request with the pool, compared with the same request without it.

    Attributes:
        phase: the node's phase: "up", "killed", "back" (started again), "restarted" (together with the machine).
        hbm_tokens, dram_tokens, nvme_tokens: tokens of the prompt that were reused from this tier.
        computed_by: "prefill" or "decode", the role of the engine that computed the other tokens of the prompt.
        same: True if both answers have the same tokens.
    """

    phase: str
    user: int
    turn: int
    document: str
    prompt_tokens: int
    hbm_tokens: int
    dram_tokens: int
    nvme_tokens: int
    computed_tokens: int
    computed_by: str
    answer: str
    ttft_ms: float
    ttft_without_ms: float
    loaded_bytes: int
    moved_bytes: int
    same: bool


class Demo:
    """One run of the demo on ``machine``. ``say`` prints text at once."""

    def __init__(
        self, machine: Machine, documents: Mapping[str, str], encode: Encode, say: Callable[..., None]
    ) -> None:
        self._machine = machine
        self._documents = documents
        self._names = list(documents)
        self._encode = encode
        self._say = say
        self._conversations: dict[int, Conversation] = {}
        self._rows: list[DemoRow] = []

    def run(self) -> dict[str, Any]:
        """Run all acts. Returns the measurements."""
        self._say("\n".join([*self._machine.start(), self._machine.start_conductor()]))
        if self._machine.plan.is_preset:
            self._say(GIBBERISH)
        self._say(CHATS_FOLLOW)
        chats = [self._chat(number, self._name(document)) for number, document in enumerate(CHATS)]
        self._warm_up()
        self._say("")
        before, restart_s = "up", 0.0
        for phase, user in TURNS:
            if phase == "killed" != before:
                self._machine.kill_node()
                self._say(KILLED)
            elif phase == "back" != before:
                started_s = time.monotonic()
                line = self._machine.start_node()
                restart_s = time.monotonic() - started_s
                self._say(f"-- the node is ready {restart_s:.2f} s after its start: {line}")
            self._turn(phase, user)
            before = phase
        self._say(f"\n{table(self._rows)}\n{MEANING}")
        self._say(RESTARTS)
        self._say("\n".join([*self._machine.restart(), ""]))
        self._warm_up()
        for phase, user in RESTARTED:
            self._turn(phase, user)
        self._say(f"\n{table(self._rows[len(TURNS) :])}\n\n{summary(self._rows)}")
        return {
            "model": self._machine.plan.model,
            "chats": chats,
            "requests": [asdict(row) for row in self._rows],
            "node_restart_s": restart_s,
            "same_answers": all(row.same for row in self._rows),
        }

    def _name(self, document: int) -> str:
        return self._names[document % len(self._names)]

    # --- over HTTP ------------------------------------------------------------------------------------------------

    def _chat(self, number: int, document: str) -> dict[str, Any]:
        """Send one chat to the conductor. A preset has no chat template, so it gets plain text."""
        question = QUESTIONS[number]
        system = f"{SYSTEM}# {document}\n\n{self._documents[document][:EXCERPT_CHARACTERS]}"
        body: dict[str, Any] = {"model": Path(self._machine.plan.model).name, "max_tokens": CHAT_TOKENS}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body["kvstore"] = {"explain": True}
        path = "/v1/completions" if self._machine.plan.is_preset else "/v1/chat/completions"
        if self._machine.plan.is_preset:
            body["prompt"] = f"{system}\n\nUser: {question}\nAssistant:"
        else:
            body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        self._say(f"  {document}: {question}\n  > ", nl=False)
        answer, ttft_s, started_s = "", 0.0, time.monotonic()
        route: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        for event in self._events(path, body):
            route = event.get("kvstore", {}).get("route", route)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                ttft_s = ttft_s or time.monotonic() - started_s
                text = choice["text"] if self._machine.plan.is_preset else choice["delta"].get("content", "")
                answer += text
                self._say(printable(text), nl=False)
        cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        computes, answers = (Path(route[name]).name for name in ("computes", "answers"))  # the role names the socket
        expected = duration_text(route["first_token_s"])
        self._say(
            f"\n    computed by {computes}, answered by {answers}; {cached} of {prompt} tokens were "
            f"cached; first token after {duration_text(ttft_s)}, expected {expected}"
        )
        return {"document": document, "question": question, "answer": answer, "usage": usage, "route": route}

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with closing(http.client.HTTPConnection(self._machine.http_address, timeout=ANSWER_S)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise NodeUnavailable(f"the conductor answered {response.status}: {response.read(4096)!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    # --- with the pool and without --------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Let each engine run its first forward pass, which is slow, before anything is measured."""
        self._answer(self._encode(self._documents[self._name(-1)], False)[-WARM_UP_TOKENS:], use_pool=False)

    def _turn(self, phase: str, user: int) -> None:
        """Ask the user's next question with the pool, then without it. The conversation gets the first answer."""
        conversation = self._conversations.get(user) or self._open(user)
        conversation.turns += 1
        question = QUESTIONS[(user + conversation.turns) % len(QUESTIONS)]
        conversation.tokens += self._encode(f"\n\nUser: {question}\nAssistant:", False)
        tokens, answer, ttft_ms, usage = self._answer(conversation.tokens, use_pool=True)
        without, _, ttft_without_ms, _ = self._answer(conversation.tokens, use_pool=False)
        conversation.tokens += tokens
        hbm, dram, nvme = (usage.cached_tokens.get(tier, 0) for tier in ("hbm", "dram", "nvme"))
        row = DemoRow(
            phase=phase,
            user=user,
            turn=conversation.turns,
            document=conversation.document,
            prompt_tokens=usage.prompt_tokens,
            hbm_tokens=hbm,
            dram_tokens=dram,
            nvme_tokens=nvme,
            computed_tokens=usage.prompt_tokens - hbm - dram - nvme,
            computed_by="prefill" if usage.prefill_engine == self._machine.prefill_address else "decode",
            answer=answer,
            ttft_ms=ttft_ms,
            ttft_without_ms=ttft_without_ms,
            loaded_bytes=usage.loaded_bytes,
            moved_bytes=usage.moved_bytes,
            same=tokens == without,
        )
        self._rows.append(row)
        self._say(
            f"  user {user + 1}, turn {row.turn}  {row.document:<20}  {question:<48} > {printable(answer):<40}"
            f" {row.ttft_ms:.0f} ms{'' if row.same else '  WRONG: not the answer without the pool'}"
        )

    def _open(self, user: int) -> Conversation:
        name = self._name(USERS[user])
        tokens = self._encode(f"{SYSTEM}# {name}\n\n", True)
        tokens += self._encode(self._documents[name], False)[:EXCERPT_TOKENS]
        self._conversations[user] = Conversation(user, name, tokens)
        return self._conversations[user]

    def _answer(self, prompt: Sequence[int], use_pool: bool) -> tuple[list[int], str, float, Usage]:
        """Return the answer's tokens and text, the time to the first token in milliseconds, and the usage."""
        machine, tokens, text, ttft_ms, started_s = self._machine, [], "", 0.0, time.monotonic()
        stream = machine.client.stream(
            prompt,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=machine.plan.is_preset,
            use_pool=use_pool,
            deadline_s=ANSWER_S,
        )
        usage = Usage(prompt_tokens=len(prompt))
        # An exception from a signal handler would break gRPC's stream.
        with machine.interrupts.deferred(), closing(stream):
            for event in stream:
                match event:
                    case Token():
                        ttft_ms = ttft_ms or 1e3 * (time.monotonic() - started_s)
                        tokens.append(event.id)
                    case Finished():
                        usage = event.usage
                text += event.text
                if machine.interrupts.is_pending:
                    break
        return tokens, text, ttft_ms, usage


def read_documents(folder: Path | None) -> dict[str, str]:
    """Return the texts of the largest documents in a folder, by name.

    A folder of None means the documents of this project.

    Raises:
        InvalidRequest: the folder has no documents.
    """
    root = folder if folder is not None else Path(__file__).resolve().parents[2] / "docs"
    texts = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in root.glob("*.md")}
    largest = sorted((name for name, text in texts.items() if text), key=lambda name: (-len(texts[name]), name))
    if not largest:
        raise InvalidRequest("documents", f"must be a folder with *.md (got {str(root)!r})")
    return {name: texts[name] for name in largest[:DOCUMENTS]}


def encoder(model: str | None) -> Encode:
    """Return the encoder of the model in a folder. For None (a preset), every byte is a token."""
    if model is None:
        tokenizer = ByteTokenizer()
        return lambda text, _: tokenizer.encode(text)
    from transformers import AutoTokenizer  # imported only here, because presets do not need it

    loaded = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    # No warnings: a document may be longer than the model's context, but a prompt has only a part of it.
    return lambda text, first: [int(token) for token in loaded.encode(text, add_special_tokens=first, verbose=False)]


def printable(text: str) -> str:
    """Return the text with a dot for each character that a terminal cannot print or would interpret."""
    return "".join(letter if letter.isprintable() and letter != "\N{REPLACEMENT CHARACTER}" else "." for letter in text)


def table(rows: Sequence[DemoRow]) -> str:
    """Return a table with a line for each request."""
    cells = [
        (
            f"{row.user + 1}.{row.turn}",
            row.phase,
            row.prompt_tokens,
            row.hbm_tokens,
            row.dram_tokens,
            row.nvme_tokens,
            row.computed_tokens,
            row.computed_by,
            f"{row.ttft_ms:.0f} ms",
            f"{row.ttft_without_ms:.0f} ms",
            bytes_text(row.loaded_bytes),
            bytes_text(row.moved_bytes),
            "same" if row.same else "WRONG",
        )
        for row in rows
    ]
    return table_text(HEADERS, cells)


def summary(rows: Sequence[DemoRow]) -> str:
    """Return the sums of all rows, and whether all answers are the same without the pool."""
    prompt, hbm, dram, nvme = (
        sum(getattr(row, f"{name}_tokens") for row in rows) for name in ("prompt", "hbm", "dram", "nvme")
    )
    with_s, without_s = (sum(getattr(row, name) for row in rows) / 1e3 for name in ("ttft_ms", "ttft_without_ms"))
    wrong = sum(not row.same for row in rows)
    return (
        f"reused {hbm + dram + nvme} of {prompt} prompt tokens ({ratio_text(hbm + dram + nvme, prompt)}): "
        f"{hbm} from HBM, {dram} from DRAM, {nvme} from NVMe\nsum of the times to the first token: "
        f"{duration_text(with_s)} with the pool, {duration_text(without_s)} without it; "
        + (f"{wrong} answers are WRONG" if wrong else "all answers are the same")
    )
