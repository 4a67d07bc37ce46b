"""A real headless browser, driven through its own protocol: pages are opened, asked in JavaScript, and drawn."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
READY_S = 60.0
ANSWER_S = 60.0


def path_of_browser() -> str | None:
    """Where a browser is installed; None if there is none."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


class Browser:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_S):
            while True:
                said = json.loads(await self._socket.receive_str())
                if said.get("id") == number:
                    assert "error" not in said, said
                    result: dict[str, Any] = said["result"]
                    return result

    async def open(self, url: str) -> None:
        """Open a page."""
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Evaluate JavaScript."""
        said = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, script: str, seconds: float = ANSWER_S) -> Any:
        """Wait until JavaScript has a true value, and return it."""
        async with asyncio.timeout(seconds):
            while not (value := await self.value(script)):
                await asyncio.sleep(0.1)
        return value

    async def picture(self, path: Path, width: int = 1200, height: int = 1000, *, dark: bool = False) -> None:
        """Draw the page into a PNG."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await asyncio.sleep(0.3)
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A browser with one empty page."""
    program = path_of_browser()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        child = await asyncio.create_subprocess_exec(
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(READY_S):
                while not port.exists() or not port.read_text().strip():
                    await asyncio.sleep(0.1)
            address = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
            async with aiohttp.ClientSession() as session:
                async with asyncio.timeout(READY_S):
                    while True:
                        pages = await (await session.get(address)).json(content_type=None)
                        found = [each for each in pages if each["type"] == "page"]
                        if found:
                            break
                        await asyncio.sleep(0.1)
                async with session.ws_connect(found[0]["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
                    yield Browser(socket)
        finally:
            child.terminate()
            await asyncio.wait_for(child.wait(), READY_S)
