"""Servers for the rows about the HTTP door: ``python -m engine.bench.front door|bare`` prints its port, and serves.

``door`` is the conductor's over answers that cost nothing. ``bare`` is the same web framework sending the same bytes,
event by event, with nothing of ours in front: it reads the body and its JSON, and looks at nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

from aiohttp import web

from engine.bench.instant import InstantAnswers
from engine.conductor.door.opening import open_door
from engine.conductor.door.prompts import PromptMaker
from engine.conductor.door.replies import DONE, Choice, OpenAIReply
from engine.conductor.shell.answers import Answered
from engine.model.request import Usage
from kvstore.config.daemon import DaemonConfig
from kvstore.serving.identities import Identities

MODEL = "instant"
TOKENS = 16  # of an answer
PROMPT = list(range(1000, 1064))
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


def asked(stream: bool) -> bytes:
    """A request as it travels."""
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def main() -> None:
    """Serve until the process is killed."""
    asyncio.run(_door() if sys.argv[1:] == ["door"] else _bare())


async def _door() -> None:
    config, answers = DaemonConfig(http="127.0.0.1:0"), InstantAnswers(**{MODEL: None})
    door = open_door(config, Identities(None), answers, {}, PromptMaker())
    await door.start()
    await _serve(int(door.address.rpartition(":")[2]))


async def _bare() -> None:
    whole, events = _replies()

    async def reply(request: web.BaseRequest) -> web.StreamResponse:
        wanted = json.loads(await request.read())
        if not wanted["stream"]:
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await response.write_eof()
        return response

    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] = reply
    server = await asyncio.get_running_loop().create_server(
        web.Server(handler, handler_cancellation=True), "127.0.0.1", 0, backlog=1024
    )
    await _serve(server.sockets[0].getsockname()[1])


def _replies() -> tuple[bytes, list[bytes]]:
    """What the door would send."""
    words = [f" word{index}" for index in range(TOKENS)]
    choice = Choice(words)
    choice.ended(Answered("length", "", Usage(prompt_tokens=len(PROMPT), completion_tokens=TOKENS)))
    reply = OpenAIReply(f"cmpl-{'0' * 32}", 0, MODEL, False, 1, False, [choice])
    return reply.whole(), [*(reply.drawn(0, word) for word in words), reply.ended(0), DONE]


async def _serve(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
