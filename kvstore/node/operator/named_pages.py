"""NamedPages: prompts that do not fit one message, named in parts before the call that is about them.

A page takes 35 bytes in JSON, so a message of 128 KiB names about 3,600. A longer prompt is sent ahead::

    {"call": "name_pages", "keys": [...], "root": hex}                  -> {"prompt": "9f..", "pages": 2000}
    {"call": "name_pages", "keys": [...], "root": hex, "prompt": "9f.."} -> {"prompt": "9f..", "pages": 4000}
    {"call": "evict", "prompt": "9f.."}                                 as if it said keys and root

Named pages are kept until they were unused for ``IDLE_S``; beyond the limit, what was used longest ago goes first.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore.model.replica import KEY_BYTES

IDLE_S: Final = 60.0
PROMPTS_MAX: Final = 16
PAGES_MAX: Final = 1 << 16  # of one prompt, as in a call of the gRPC API


def raw_keys(keys: Any) -> list[bytes]:
    """The keys of a request. Raises InvalidRequest."""
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise InvalidRequest("keys", "must be a list of at least one key in hexadecimal digits")
    try:
        raw = [bytes.fromhex(key) for key in keys]
    except ValueError:
        raw = [b""]
    if any(len(key) != KEY_BYTES for key in raw):
        raise InvalidRequest("keys", f"must have {2 * KEY_BYTES} hexadecimal digits each")
    return raw


def raw_root(root: Any) -> bytes:
    """The root of a request. Raises InvalidRequest."""
    try:
        raw = bytes.fromhex(root) if isinstance(root, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != KEY_BYTES:
        raise InvalidRequest("root", f"must be {2 * KEY_BYTES} hexadecimal digits (got {root!r})")
    return raw


class NamedPages:
    """Prompts named so far. Lives with ``Admin``; threads may share it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._named: OrderedDict[str, tuple[float, str, bytes]] = OrderedDict()  # id -> last used, root, keys

    def name(self, request: dict[str, Any]) -> dict[str, Any]:
        """The admin call ``name_pages``."""
        keys, root = b"".join(raw_keys(request.get("keys"))), raw_root(request.get("root")).hex()
        prompt = request.get("prompt")
        with self._mutex:
            if prompt is None:
                prompt, before = secrets.token_hex(8), b""
            else:
                known_root, before = self._find(prompt)
                if known_root != root:
                    raise InvalidRequest("root", "is another than that of the parts before")
            count = (len(before) + len(keys)) // KEY_BYTES
            if count > PAGES_MAX:
                raise InvalidRequest("keys", f"{count} pages, one call is about {PAGES_MAX} at most")
            self._named[prompt] = time.monotonic(), root, before + keys
            while len(self._named) > PROMPTS_MAX:
                self._named.popitem(last=False)
        return {"prompt": prompt, "pages": count}

    def filled(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request with the keys and root of the prompt that it names."""
        if "keys" in request:
            raise InvalidRequest("prompt", "cannot be said together with keys")
        with self._mutex:
            root, keys = self._find(request["prompt"])
        digits, step = keys.hex(), 2 * KEY_BYTES
        named = {"keys": [digits[i : i + step] for i in range(0, len(digits), step)], "root": root}
        return {name: value for name, value in request.items() if name != "prompt"} | named

    def _find(self, prompt: Any) -> tuple[str, bytes]:
        now_s = time.monotonic()
        for idle in [name for name, (used_s, *_) in self._named.items() if now_s - used_s > IDLE_S]:
            del self._named[idle]
        found = self._named.pop(prompt, None) if isinstance(prompt, str) else None
        if found is None:
            raise InvalidRequest("prompt", f"{prompt!r} is not known (any more): name its pages again")
        self._named[prompt] = now_s, *found[1:]
        return found[1:]
