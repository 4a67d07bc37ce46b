"""A server that speaks OpenAI's API and tells KV events as vLLM does, in a process of its own. It computes nothing.

Token ``i`` of an answer follows from the tokens before it, so an answer that goes on elsewhere goes on the same way.
What it has "cached" are the blocks of prompts that it was asked, of which it tells over ZMQ: PUB, ROUTER for replay.

``POST /tell`` makes it do what tests want: see ``Traits`` and ``Backend.tell``. ``GET /seen``: what it was asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any
from urllib.request import Request, urlopen

import msgpack
import zmq
import zmq.asyncio
from aiohttp import web

from tests.helpers.nursery import of_engines
from tests.helpers.processes import Machine, Process, wait_until

MODEL = "words"
END = (-1).to_bytes(8, "big", signed=True)
ANSWER_S = 30.0


@dataclass
class Traits:
    """How it is.

    Attributes:
        ids: it tells them, and takes vLLM's parameters; else it refuses these.
        maps: its events are maps; else arrays. ``topic``: it is in replays, too.
        stop_after: it stands still after so many tokens; -1: never.
        raw: said, many times, in place of an answer.
    """

    block: int = 16
    context: int = 4096
    ids: bool = True
    details: bool = True
    maps: bool = True
    topic: bool = True
    buffer: int = 1000
    step_s: float = 0.0
    stop_after: int = -1
    raw: str = ""
    status: int = 200
    key: str = ""
    cert: str = ""
    cert_key: str = ""


def next_token(tokens: list[int]) -> int:
    """What follows these."""
    return (31 * tokens[-1] + len(tokens)) % 251


def continued(tokens: list[int], count: int) -> list[int]:
    """The next ``count`` tokens."""
    found = list(tokens)
    for _ in range(count):
        found.append(next_token(found))
    return found[len(tokens) :]


class Backend:
    """The server."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.asked: list[dict[str, Any]] = []
        self.open = self.gone = 0
        self._blocks: set[bytes] = set()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._context = zmq.asyncio.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self.events = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._silent = 0

    # --- events -----------------------------------------------------------------------------------------------------

    async def publish(self, events: list[dict[str, Any]]) -> None:
        """One message."""
        told = events if self.traits.maps else [[each["type"], *list(each.values())[1:]] for each in events]
        await self.publish_payload(msgpack.packb([time.time(), told, 0]))

    async def publish_payload(self, payload: bytes) -> None:
        number, self._number = self._number, self._number + 1
        self._kept.append((number, payload))
        while len(self._kept) > self.traits.buffer:
            self._kept.popleft()
        if self._silent:
            self._silent -= 1
        else:
            await self._pub.send_multipart((b"", number.to_bytes(8, "big"), payload))

    async def replays(self) -> None:
        """Answer those who missed something."""
        while True:
            who, _, start = await self._router.recv_multipart()
            topic = (b"",) if self.traits.topic else ()
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    await self._router.send_multipart((who, b"", *topic, number.to_bytes(8, "big"), payload))
            await self._router.send_multipart((who, b"", *topic, END, b""))

    async def _store(self, tokens: list[int], salt: str) -> int:
        """Keep a prompt's blocks, and tell of those that are new. Returns how many tokens were there."""
        size, parent, cached, events = self.traits.block, None, 0, []
        for start in range(0, len(tokens) - size + 1, size):
            ids = tokens[start : start + size]
            name = hashlib.sha256((parent or salt.encode()) + bytes(json.dumps(ids), "ascii")).digest()
            if name in self._blocks:
                cached += size
            else:
                self._blocks.add(name)
                extra = [[salt]] if salt and not start else None
                events.append(stored(name, parent, ids, extra))
            parent = name
        if events:
            await self.publish(events)
        return min(cached, len(tokens) - 1)

    # --- HTTP -------------------------------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": self.traits.context}]})

    def _check(self, request: web.Request) -> None:
        if self.traits.key and request.headers.get("Authorization") != f"Bearer {self.traits.key}":
            raise web.HTTPUnauthorized(text=json.dumps({"error": {"message": "who is that?"}}))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        body, traits = await request.json(), self.traits
        self.asked.append(body)
        if traits.status != 200:
            error = {"error": {"message": "it is not to its taste", "param": "top_p"}}
            return web.json_response(error, status=traits.status, headers={"Location": "/v1/models"})
        if not traits.ids and {"return_token_ids", "cache_salt", "ignore_eos"} & set(body):
            return web.json_response({"error": {"message": "what is that?"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        try:
            if traits.raw:
                for _ in range(1 << 12):
                    await response.write(traits.raw.encode())
            else:
                await self._draw(response, body)
        except (ConnectionError, asyncio.CancelledError):
            self.gone += 1
            raise
        finally:
            self.open -= 1
        return response

    async def _draw(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        traits, tokens = self.traits, list(body["prompt"])
        prompt = len(tokens)
        cached = await self._store(tokens, body.get("cache_salt", ""))
        for index in range(body["max_tokens"]):
            if index == traits.stop_after:
                await asyncio.sleep(3600)
            await asyncio.sleep(traits.step_s)
            tokens.append(next_token(tokens))
            choice: dict[str, Any] = {"index": 0, "text": f" {tokens[-1]}", "finish_reason": None}
            if index == body["max_tokens"] - 1:
                choice["finish_reason"] = "length"
            if body.get("return_token_ids"):
                choice["token_ids"] = tokens[-1:]
            await self._say(response, {"choices": [choice]})
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": len(tokens) - prompt}
        if traits.details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await self._say(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _say(self, response: web.StreamResponse, document: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(document)}\n\n".encode())

    async def seen(self, request: web.Request) -> web.Response:
        return web.json_response({"asked": self.asked, "open": self.open, "gone": self.gone})

    async def tell(self, request: web.Request) -> web.Response:
        """``traits``: change some; ``silent``: the next so many messages are not sent, only kept; ``drop``: keep
        nothing; ``payload``: publish that, in hexadecimal digits; ``clear``: forget all blocks, and tell so;
        ``anew``: be as one that has just begun."""
        for what, value in (await request.json()).items():
            match what:
                case "traits":
                    for name in value:
                        setattr(self.traits, name, value[name])
                case "silent":
                    self._silent = value
                case "drop":
                    self._kept.clear()
                case "payload":
                    await self.publish_payload(bytes.fromhex(value))
                case "anew":
                    self._blocks.clear()
                    self._kept.clear()
                    self._number = 0
                case "clear":
                    self._blocks.clear()
                    await self.publish([{"type": "AllBlocksCleared"}])
        return web.json_response({})


def stored(name: Any, parent: Any, ids: list[int], extra: Any = None, **more: Any) -> dict[str, Any]:
    """An event."""
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": len(ids),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra,
    } | more


async def serve(traits: Traits) -> None:
    """Until killed. Says where it is."""
    backend = Backend(traits)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.get("/v1/models", backend.models),
            web.post("/v1/completions", backend.completions),
            web.get("/seen", backend.seen),
            web.post("/tell", backend.tell),
        ]
    )
    tls = None
    if traits.cert:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(traits.cert, traits.cert_key)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    sys.stdout.write(json.dumps({"port": port, "events": backend.events, "replay": backend.replay}) + "\n")
    sys.stdout.flush()
    await backend.replays()


class BackendProcess(Process):
    """The server's process."""

    def wait_ready(self) -> BackendProcess:
        wait_until("the back end is ready", lambda: "\n" in self.output())
        return self

    @property
    def where(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output().splitlines()[0])
        return found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.where['port']}"

    def words(self, **more: str) -> str:
        """What a conductor is told of it."""
        given = {"tokenizer": "bytes", "dialect": "vllm", "events": self.where["events"]}
        given |= {"replay": self.where["replay"]} | more
        return " ".join([self.url, *(f"{name}={value}" for name, value in given.items() if value)])

    def tell(self, **what: Any) -> None:
        """See ``Backend.tell``."""
        asked = Request(f"{self.url}/tell", json.dumps(what).encode(), {"Content-Type": "application/json"})
        urlopen(asked, timeout=ANSWER_S).close()

    def ask(self, tokens: list[int]) -> None:
        """Have it answer a prompt, past every conductor."""
        body = json.dumps({"prompt": tokens, "max_tokens": 1}).encode()
        asked = Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(asked, timeout=ANSWER_S) as reply:
            assert b"[DONE]" in reply.read()

    def seen(self) -> dict[str, Any]:
        """What it was asked."""
        with urlopen(f"{self.url}/seen", timeout=ANSWER_S) as reply:
            found: dict[str, Any] = json.load(reply)
        return found


def spawn_backend(machine: Machine, **traits: Any) -> BackendProcess:
    """Start one, and wait until it is ready."""
    command = [sys.executable, "-m", "tests.helpers.backend", json.dumps(asdict(Traits(**traits)))]
    return machine.start(BackendProcess, "backend", command, of_engines()).wait_ready()


if __name__ == "__main__":
    asyncio.run(serve(Traits(**json.loads(sys.argv[1]))))
