"""``kvstore demo --nodes``: several nodes as one pool, what each fault of one of them costs, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import kvstore
from engine.client import EngineClient
from engine.compute.presets import PRESETS
from engine.demo.machine import ENGINE_START_S, NODE_START_S, PAGE_TOKENS, Interrupts
from engine.demo.script import Script, ScriptTurn
from engine.model.request import Finished, Token
from kvstore.cli.output import table_text
from kvstore.cli.prompt_layout import find_layout
from kvstore.client.prefix_cache import PrefixCache
from kvstore.serving.child import Child
from kvstore.tier.data_file import find_data_server
from kvstore.tier.folder import PREFIX, NodeFolder
from kvstore.tier.purging import purge

SETTLED_S: Final = 20.0  # a page that was stored is known to the pool, and a node that left is known to have
STEADY_S: Final = 2.5  # longer than what owners told is kept
LOOK_S: Final = 0.05
ANSWER_S: Final = 120.0
ANSWER_TOKENS: Final = 8
PROMPT_TOKENS: Final = 300  # of the documents; four prompts fit the DRAM of a node
CONVERSATIONS: Final = (20, 0, 1, 3, 6)  # about as many documents as there are; the first one warms up
HEADERS: Final = ("what happened", "prompt", "here", "elsewhere", "computed", "TTFT", "without", "answer")
MEANING: Final = """\
  here, elsewhere   tokens of the prompt that the engine's own node had, and those that it found listed on another node:
                    where that one is dead, they are computed
  TTFT, without     time to the first token with the pool, and of the same prompt once more without it"""


@dataclass(frozen=True)
class FleetPlan:
    """What there is. ``place``: a folder for sockets, logs and the catalog."""

    name: str
    place: Path
    model: str
    nodes: int
    dram_bytes: int


@dataclass(frozen=True, kw_only=True)
class FleetRow:
    """One prompt that was computed on the first node, asked on the second one."""

    what: str
    prompt_tokens: int
    here_tokens: int
    elsewhere_tokens: int
    computed_tokens: int
    ttft_ms: float
    ttft_without_ms: float
    same: bool


class Fleet:
    """Nodes that share a catalog, with an engine on each of the first two. ``run``, then ``close`` in any case."""

    def __init__(self, plan: FleetPlan, script: Script, interrupts: Interrupts, say: Callable[..., None]) -> None:
        self._plan = plan
        self._script = script
        self._say = say
        self._interrupts = interrupts
        self._shm_dir = Path(os.environ.get("KVSTORE_SHM_DIR", "/dev/shm"))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        ours = {"KVSTORE_SHM_DIR": self._shm_dir, "TMPDIR": plan.place, "OMP_NUM_THREADS": 1}
        self._env = clean | {name: str(value) for name, value in ours.items()}
        self._catalog = f"file:{plan.place}/catalog/members"
        self._nodes: dict[int, Child] = {}
        self._engines: list[Child] = []
        self._clients: list[EngineClient] = []
        self.rows: list[FleetRow] = []

    def run(self) -> dict[str, Any]:
        """All acts; everything that was measured."""
        for number in range(self._plan.nodes):
            self._say(self._start_node(number))
        for number in (0, 1):
            self._say(self._start_engine(number))
        warm, *prompts = (self._prompt(conversation) for conversation in CONVERSATIONS)
        for client in self._clients:  # the first forward of a process is slow
            self._ask(client, warm, use_pool=False)
        for prompt in prompts:
            self._ask(self._clients[0], prompt, use_pool=True)
        with kvstore.connect(self._name(0)) as store:
            layout = find_layout(store, None, None)
        with kvstore.connect(self._name(1)) as store:
            self._acts(store.cache(layout), prompts)
        self._say(f"\n{self._table()}\n\n{MEANING}")
        wrong = [row.what for row in self.rows if not row.same]
        self._say(f"\nWRONG answers: {', '.join(wrong)}" if wrong else "\nevery answer is the same without the pool")
        return {"model": self._plan.model, "acts": [asdict(row) for row in self.rows], "same_answers": not wrong}

    def _acts(self, cache: PrefixCache, prompts: Sequence[list[int]]) -> None:
        for prompt in prompts:
            self._await_elsewhere(cache, prompt)
        self._act(cache, "nothing: another node has them", prompts[0])
        self._nodes[0].kill()
        self._act(cache, "kill -9 of that node's daemon", prompts[1])
        server = find_data_server(self._folder(0))
        if server is not None:
            os.kill(server.pid, signal.SIGKILL)
        self._act(cache, "kill -9 of its data server too", prompts[2])
        self._start_node(0)
        self._await_elsewhere(cache, prompts[3])
        self._act(cache, "its daemon is started again", prompts[3])

    def _act(self, cache: PrefixCache, what: str, prompt: list[int]) -> None:
        """Ask the second engine what the first one has computed."""
        self._say(f"-- {what}")
        match = cache.lookup(prompt)
        elsewhere = sum(match.nodes.values()) * PAGE_TOKENS
        given, ttft_s, computed = self._ask(self._clients[1], prompt, use_pool=True)
        without, without_s, _ = self._ask(self._clients[1], prompt, use_pool=False)
        self.rows.append(
            FleetRow(
                what=what,
                prompt_tokens=len(prompt),
                here_tokens=match.tokens - elsewhere,
                elsewhere_tokens=elsewhere,
                computed_tokens=computed,
                ttft_ms=1e3 * ttft_s,
                ttft_without_ms=1e3 * without_s,
                same=given == without,
            )
        )

    def _ask(self, client: EngineClient, prompt: list[int], use_pool: bool) -> tuple[list[int], float, int]:
        """The answer's tokens, seconds to the first one, and how many of the prompt's were computed."""
        tokens: list[int] = []
        computed, first_s, begun_s = 0, 0.0, time.monotonic()
        with self._interrupts.held():
            for event in client.stream(
                prompt,
                max_tokens=ANSWER_TOKENS,
                ignore_eos=self._plan.model in PRESETS,
                deadline_s=ANSWER_S,
                use_pool=use_pool,
            ):
                match event:
                    case Token():
                        first_s = first_s or time.monotonic() - begun_s
                        tokens.append(event.id)
                    case Finished():
                        computed = event.usage.computed_tokens
        return tokens, first_s, computed

    def _await_elsewhere(self, cache: PrefixCache, prompt: list[int]) -> None:
        """Until the pool has known for a while that other nodes have all of it, or long enough: owners of spans that
        came or went meanwhile have been told then."""
        deadline_s, since_s = time.monotonic() + SETTLED_S, 0.0
        while (now_s := time.monotonic()) < deadline_s:
            match = cache.lookup(prompt)
            whole = bool(match.nodes) and match.pages == len(prompt) // PAGE_TOKENS
            since_s = (since_s or now_s) if whole else 0.0
            if since_s and now_s - since_s > STEADY_S:
                return
            time.sleep(LOOK_S)

    def _prompt(self, conversation: int) -> list[int]:
        return list(self._script.prompt(ScriptTurn(conversation, 1, PROMPT_TOKENS, ANSWER_TOKENS)).tokens)

    def _table(self) -> str:
        cells = [
            (
                row.what,
                row.prompt_tokens,
                row.here_tokens,
                row.elsewhere_tokens,
                row.computed_tokens,
                f"{row.ttft_ms:.0f} ms",
                f"{row.ttft_without_ms:.0f} ms",
                "same" if row.same else "WRONG",
            )
            for row in self.rows
        ]
        return table_text(HEADERS, cells)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return f"{self._plan.name}-n{number}"

    def _folder(self, number: int) -> NodeFolder:
        return NodeFolder(self._shm_dir, self._name(number))

    def _start_node(self, number: int) -> str:
        arguments = ["serve", "--name", self._name(number), "--dram", str(self._plan.dram_bytes)]
        arguments += ["--catalog", self._catalog, "--pool", self._plan.name, "--log-level", "error"]
        self._nodes[number] = child = self._child(f"node {number}", arguments)
        return child.line(NODE_START_S)

    def _start_engine(self, number: int) -> str:
        plan, socket = self._plan, f"unix:{self._plan.place / f'engine{number}'}"
        arguments = ["engine", "--role", "both", "--model", plan.model, "--node", self._name(number)]
        arguments += ["--listen", socket, "--threads", "1", "--page-tokens", str(PAGE_TOKENS), "--arena", "256MiB"]
        arguments += ["--keep-pages", "0"]  # what nodes have is shown here
        arguments += ["--drain-s", "1", "--name", f"engine{number}", "--log-level", "error"]
        child = self._child(f"engine {number}", arguments)
        self._engines.append(child)
        line = child.line(ENGINE_START_S)
        self._clients.append(EngineClient(socket))
        return line

    def _child(self, what: str, arguments: list[str]) -> Child:
        with self._interrupts.held():
            return Child(what, arguments, self._env, self._plan.place / f"{what.replace(' ', '')}.log")

    def close(self) -> None:
        """End every process, and remove what was in shared memory."""
        self._interrupts.ignored()
        for client in self._clients:
            client.close()
        servers = [found for number in self._nodes if (found := find_data_server(self._folder(number)))]
        children = [*self._engines, *self._nodes.values()]
        for child in children:
            child.ask_to_end()
        for child in children:
            child.wait()
        for server in servers:  # of a daemon that was killed
            with suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGTERM)
        for number in self._nodes:
            purge(self._shm_dir / f"{PREFIX}{self._name(number)}")
