"""What happens in the demo: requests, a node that is killed, a machine that restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import kvstore
from engine.demo import telling
from engine.demo.front import FrontDoor
from engine.demo.machine import Machine
from engine.demo.rows import DemoRow
from engine.demo.script import Conversation, Script, ScriptTurn
from engine.model.request import Finished, Token, Usage

ANSWER_S: Final = 120.0  # the longest an answer may take
WARM_UP_TOKENS: Final = 300  # so many that the prefill engine is asked
SAVED_S: Final = 10.0  # pages that are on their way to NVMe get there
LOOK_S: Final = 0.05
TURNS_AFTER_RESTART: Final = 2
ANSWER_TOKENS_AFTER_RESTART: Final = 12


@dataclass
class TurnAnswer:
    """One answer, timed where it was asked for."""

    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    ttft_ms: float = 0.0


class Demo:
    """One run on ``machine``, told line by line to ``say`` as it happens."""

    def __init__(self, machine: Machine, script: Script, say: Callable[..., None]) -> None:
        self._machine = machine
        self._script = script
        self._say = say
        self._say_text = telling.Streamed(say)
        self.rows: list[DemoRow] = []

    def run(self, turns: list[ScriptTurn]) -> dict[str, Any]:
        """All acts; everything that was measured."""
        kill_at = len(turns) // 2
        down = max(1, len(turns) // 6)
        kill: dict[str, Any] = {}
        self._say("\n".join(self._machine.start()))
        if self._machine.plan.is_preset:
            self._say(telling.GIBBERISH)
        self._say("")
        self._warm_up()
        with self._machine.conductor() as address:
            chats = FrontDoor(address, self._say).run(self._script.documents, not self._machine.plan.is_preset)
        for index, turn in enumerate(turns):
            if index == kill_at:
                self._machine.kill_node()
                self._say(telling.KILLED)
            elif index == kill_at + down:
                kill = self._start_node()
            phase = "up" if index < kill_at else "down" if index < kill_at + down else "again"
            self._ask(turn, phase)
        if not kill:
            kill = self._start_node()
        tiers = self._tiers_saved()
        self._say(f"{telling.table(self.rows)}\n\n{telling.MEANING}")
        self._say(telling.tiers(tiers))
        restart = self._restart(turns)
        return self._told(kill, tiers, restart) | {"chats": chats}

    def _warm_up(self) -> None:
        """The first forward of a process is slow, of each engine: that is not what is measured here."""
        tokens = self._script.some(WARM_UP_TOKENS)
        with self._machine.interrupts.held():
            for _ in self._stream(tokens, 2, False):
                pass

    def _start_node(self) -> dict[str, Any]:
        begun_s = time.monotonic()
        line = self._machine.start_node()
        took_s = time.monotonic() - begun_s
        self._say(telling.started_again(line, took_s))
        return {"seconds": took_s, "node": line}

    def _restart(self, turns: list[ScriptTurn]) -> dict[str, Any]:
        """The machine restarts; then conversations go on, two turns each: the longest ones, of as many documents."""
        self._say(telling.RESTARTING)
        lines = self._machine.restart()
        self._say("\n".join(lines) + "\n")
        self._warm_up()
        before = len(self.rows)
        for conversation in 2 * self._longest():
            last = self._script.conversations[conversation]
            self._ask(ScriptTurn(conversation, last.turns + 1, 0, ANSWER_TOKENS_AFTER_RESTART), "restarted")
        self._say(telling.table(self.rows[before:]))
        return {"lines": lines}

    def _longest(self) -> list[int]:
        chosen: dict[str, int] = {}
        conversations = self._script.conversations
        for number in sorted(conversations, key=lambda number: -len(conversations[number].tokens)):
            chosen.setdefault(conversations[number].document, number)
        return list(chosen.values())[:TURNS_AFTER_RESTART]

    def _ask(self, turn: ScriptTurn, phase: str) -> None:
        """One request with the pool, then without; the answer with it goes into the conversation."""
        conversation = self._script.prompt(turn)
        self._say_text.begin(telling.asked(len(self.rows), conversation))
        given = self._answer(conversation, turn, use_pool=True)
        without = self._answer(conversation, turn, use_pool=False)
        row = _row(len(self.rows), phase, conversation, given, without, self._machine.prefill_address)
        self.rows.append(row)
        self._say_text.end(telling.summary(row))
        self._script.answered(turn, given.tokens)

    def _answer(self, conversation: Conversation, turn: ScriptTurn, use_pool: bool) -> TurnAnswer:
        answered = TurnAnswer()
        begun_s = time.monotonic()
        stream = self._stream(conversation.tokens, turn.answer_tokens, use_pool)
        interrupts = self._machine.interrupts
        with interrupts.held(), closing(stream):  # an exception out of a signal's handler would break gRPC's stream
            for event in stream:
                match event:
                    case Token():
                        answered.ttft_ms = answered.ttft_ms or 1e3 * (time.monotonic() - begun_s)
                        answered.tokens.append(event.id)
                    case Finished():
                        answered.usage = event.usage
                if use_pool:
                    self._say_text.more(event.text)
                if interrupts.came:
                    break
        return answered

    def _stream(self, tokens: list[int], max_tokens: int, use_pool: bool) -> Generator[Token | Finished, None, None]:
        machine = self._machine
        stream = machine.client.stream(
            tokens,
            max_tokens=max_tokens,
            ignore_eos=machine.plan.is_preset,
            use_pool=use_pool,
            deadline_s=ANSWER_S,
        )
        yield from stream

    def _tiers_saved(self) -> dict[str, Any]:
        """The node's tiers, when all that shall be saved is."""
        deadline_s = time.monotonic() + SAVED_S
        with kvstore.connect(self._machine.plan.name) as store:
            while True:
                stats = store.stats()
                if stats["queues"]["unsaved"] + stats["queues"]["copies"] == 0 or time.monotonic() > deadline_s:
                    tiers = stats["tiers"]
                    assert isinstance(tiers, dict)
                    return tiers
                time.sleep(LOOK_S)

    def _told(self, kill: dict[str, Any], tiers: dict[str, Any], restart: dict[str, Any]) -> dict[str, Any]:
        wrong = [row.number for row in self.rows if not row.same]
        totals = telling.totals(self.rows)
        self._say(telling.ending(totals, wrong))
        return {
            "model": self._machine.plan.model,
            "requests": [asdict(row) for row in self.rows],
            "totals": totals,
            "kill": kill,
            "restart": restart,
            "tiers": tiers,
            "same_answers": not wrong,
        }


def _row(
    number: int, phase: str, conversation: Conversation, given: TurnAnswer, without: TurnAnswer, prefill: str
) -> DemoRow:
    usage = given.usage
    assert usage is not None, "a stream ends with Finished, or raises"
    hbm, dram, nvme = (usage.cached_tokens.get(tier, 0) for tier in ("hbm", "dram", "nvme"))
    return DemoRow(
        number=number,
        phase=phase,
        user=conversation.user,
        turn=conversation.turns,
        document=conversation.document,
        prompt_tokens=usage.prompt_tokens,
        hbm_tokens=hbm,
        dram_tokens=dram,
        nvme_tokens=nvme,
        computed_tokens=usage.prompt_tokens - hbm - dram - nvme,
        computed_by="prefill" if usage.prefill_engine == prefill else "decode",
        answer_tokens=len(given.tokens),
        ttft_ms=given.ttft_ms,
        ttft_without_ms=without.ttft_ms,
        loaded_bytes=usage.loaded_bytes,
        moved_bytes=usage.moved_bytes,
        same=given.tokens == without.tokens,
    )
