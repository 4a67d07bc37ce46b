"""The HTTP server of ``kvstore web``.

One thread reads a frame of ``kvstore top`` every second while a page is open, and every ten seconds otherwise. A frame
becomes one event, which is encoded once and sent to all pages. A page that does not read its events is disconnected.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from engine.simulator.hardware import GPUS, LINKS, MODELS
from engine.simulator.what_if import MEANING, NUMBERS, TEXTS, what_if
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.server.http import HostNames

Frames = Iterator[dict[str, Any]]

OPEN_S: Final = 1.0  # between frames while a page is open
CLOSED_S: Final = 10.0
HISTORY: Final = 360  # points of ten seconds: the last hour
EVENTS_MAX: Final = 4  # events that wait for a page to read them
PAGES_MAX: Final = 256  # open pages
PAGES: Final = {"/": "live.html", "/plan": "plan.html", "/style.css": "style.css", "/charts.js": "charts.js",
                "/live.js": "live.js", "/plan.js": "plan.js"}  # fmt: skip
TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class LiveFrames:
    """Reads frames, keeps the history of the last hour, and sends events to open pages.

    Args:
        frames: of ``kvstore top``; None if there is nothing to watch.
    """

    def __init__(self, frames: Frames | None) -> None:
        self._frames = frames
        self._pages: set[asyncio.Queue[bytes | None]] = set()
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._last: dict[str, Any] = {"nothing": True}
        self._opened = asyncio.Event()

    async def run(self) -> None:
        """Read frames until it is cancelled."""
        frames, kept_s = self._frames, 0.0
        if frames is None:
            return
        while True:
            started_s = time.monotonic()
            try:
                self._last = await asyncio.to_thread(next, frames)
            except KVStoreError as error:
                self._last = {**self._last, "error": str(error)}
            if started_s - kept_s >= CLOSED_S:
                kept_s = started_s
                self._history.append({"at": round(time.time()), **_totals(self._last)})  # noqa: TID251 - shown to people
            self._send(self._event(self._last))
            self._opened.clear()
            left_s = (OPEN_S if self._pages else CLOSED_S) - (time.monotonic() - started_s)
            try:
                await asyncio.wait_for(self._opened.wait(), max(0.05, left_s))
            except TimeoutError:
                continue

    def _event(self, frame: dict[str, Any]) -> bytes:
        data = {"frame": frame, "point": self._history[-1] if self._history else None}
        return b"data: " + json.dumps(data, default=str).encode() + b"\n\n"

    def _send(self, event: bytes) -> None:
        for page in list(self._pages):
            if page.full():  # it does not read
                self._pages.discard(page)
                page.get_nowait()
                page.put_nowait(None)
            else:
                page.put_nowait(event)

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """Answer ``/events``."""
        if len(self._pages) >= PAGES_MAX:
            raise web.HTTPServiceUnavailable(text=f"{PAGES_MAX} pages are open already\n")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        page: asyncio.Queue[bytes | None] = asyncio.Queue(EVENTS_MAX)
        first = {"frame": self._last, "history": list(self._history)}
        self._pages.add(page)
        self._opened.set()
        try:
            await response.write(b"retry: 2000\ndata: " + json.dumps(first, default=str).encode() + b"\n\n")
            while (event := await page.get()) is not None:
                await response.write(event)
        except ConnectionResetError:
            return response
        finally:
            self._pages.discard(page)
        return response


def _totals(frame: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a frame that are kept for an hour: hits by tier, and misses, per second."""
    members = frame.get("members")
    if not isinstance(members, list):
        hits = {name: tier.get("hit_tokens_per_s") for name, tier in frame.get("tiers", {}).items()}
        return {"hits": hits, "missed": frame.get("missed_per_s", {}).get("tokens")}
    hits = {}
    for member in members:
        for name, tier in (member.get("tiers") or {}).items():
            hits[name] = (hits.get(name) or 0) + (tier.get("reused_pages_per_s") or 0)
    routed = [member.get("routed_per_s") for member in members if member.get("routed_per_s") is not None]
    refused = [member.get("refused_per_s") for member in members if member.get("refused_per_s") is not None]
    return {"hits": hits, "routed": sum(routed), "refused": sum(refused)}


def make_app(live: LiveFrames) -> web.Application:
    """Return the application. Each request has to name this machine as its host."""
    names = HostNames(())
    contents = {path: files("engine.web").joinpath("pages", name).read_bytes() for path, name in PAGES.items()}

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        refusal = names.refusal(request.headers.getall("Host", []), request.headers.getall("Origin", []))
        if refusal:
            return web.Response(status=403, text=f"{refusal}\n")
        response: web.StreamResponse = await handler(request)
        return response

    async def page(request: web.Request) -> web.Response:
        kind = TYPES[PAGES[request.path].rpartition(".")[2]]
        return web.Response(body=contents[request.path], content_type=kind, charset="utf-8", headers=HEADERS)

    async def plan(request: web.Request) -> web.Response:
        try:
            document = await asyncio.to_thread(what_if, request.query_string)
        except InvalidRequest as error:
            return web.json_response({"error": str(error)}, status=400, headers=HEADERS)
        return web.json_response(document, headers=HEADERS)

    async def choices(request: web.Request) -> web.Response:
        texts = {"model": list(MODELS), "gpu": list(GPUS), "fabric": list(LINKS), "layers": ["on", "off"],
                 "caching": ["on", "off"]}  # fmt: skip
        document = {"texts": texts, "defaults": dict(TEXTS), "numbers": dict(NUMBERS), "meaning": dict(MEANING)}
        return web.json_response(document, headers=HEADERS)

    app = web.Application(middlewares=[guard])
    app.add_routes([web.get(path, page) for path in PAGES])
    app.add_routes([web.get("/events", live.follow), web.get("/api/plan", plan), web.get("/api/choices", choices)])
    return app


async def serve(
    frames: Frames | None, host: str, port: int, ready: Callable[[str], None], ended: asyncio.Event
) -> None:
    """Serve pages until ``ended``. ``ready`` is called with the address.

    Raises:
        InvalidRequest: the address is in use, or not one of this machine.
    """
    live = LiveFrames(frames)
    runner = web.AppRunner(make_app(live), access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, host, port, shutdown_timeout=1.0)
    reading = asyncio.create_task(live.run())
    try:
        await site.start()
        bound = runner.addresses[0][1]
        ready(f"http://{host}:{bound}/")
        stopped = asyncio.create_task(ended.wait())
        await asyncio.wait((stopped, reading if frames is not None else stopped), return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and frames is not None:
            reading.result()
    except OSError as error:
        raise InvalidRequest("http", f"cannot listen on {host}:{port} ({error.strerror})") from None
    finally:
        reading.cancel()
        await runner.cleanup()
