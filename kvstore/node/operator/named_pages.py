"""Prompts that are too long for one message: their pages are sent in parts before the call that needs them.

A page takes 35 bytes in JSON, so a message of 128 KiB holds about 3,600 pages. A longer prompt is sent ahead::

    {"call": "name_pages", "keys": [...], "root": hex}                  -> {"prompt": "9f..", "pages": 2000}
    {"call": "name_pages", "keys": [...], "root": hex, "prompt": "9f.."} -> {"prompt": "9f..", "pages": 4000}
    {"call": "evict", "prompt": "9f.."}                                 as if the call had keys and root

A prompt is dropped when it was not used for ``IDLE_S``, or when it is the least recently used of too many.
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
PAGES_MAX: Final = 1 << 16  # pages of one prompt; the limit of a gRPC call as well


def raw_keys(keys: Any) -> list[bytes]:
    """Parse the keys of a request. Raises InvalidRequest."""
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise InvalidRequest("keys", "must be a list of at least one key in hexadecimal digits")
    try:
        raw = [bytes.fromhex(key) for key in keys]
    except ValueError:
        raw = [b""]
    if any(len(key) != KEY_BYTES for key in raw):
        raise InvalidRequest("keys", f"must have {2 * KEY_BYTES} hexadecimal digits each")
    return raw


def raw_bytes(request: dict[str, Any], field: str) -> bytes:
    """Parse a field of 16 bytes, such as a root. Raises InvalidRequest."""
    value = request.get(field)
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != KEY_BYTES:
        raise InvalidRequest(field, f"must be {2 * KEY_BYTES} hexadecimal digits (got {value!r})")
    return raw


class NamedPages:
    """The prompts that callers have sent ahead, for any number of threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._prompts: OrderedDict[str, tuple[float, str, bytes]] = OrderedDict()  # id -> time of last use, root, keys

    def name(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out the admin call ``name_pages``: begin a prompt, or append to one."""
        keys, root = b"".join(raw_keys(request.get("keys"))), raw_bytes(request, "root").hex()
        prompt = request.get("prompt")
        with self._mutex:
            if prompt is None:
                prompt, earlier_keys = secrets.token_hex(8), b""
            else:
                prompt_root, earlier_keys = self._find(prompt)
                if prompt_root != root:
                    raise InvalidRequest("root", f"must be the root of the earlier parts, {prompt_root} (got {root})")
            count = (len(earlier_keys) + len(keys)) // KEY_BYTES
            if count > PAGES_MAX:
                raise InvalidRequest("keys", f"must be at most {PAGES_MAX} keys, with the earlier parts (got {count})")
            self._prompts[prompt] = time.monotonic(), root, earlier_keys + keys
            while len(self._prompts) > PROMPTS_MAX:
                self._prompts.popitem(last=False)
        return {"prompt": prompt, "pages": count}

    def expand(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the request with the keys and the root of its prompt in place of ``prompt``."""
        if "keys" in request:
            raise InvalidRequest("prompt", "cannot be combined with keys")
        with self._mutex:
            root, keys = self._find(request["prompt"])
        digits, step = keys.hex(), 2 * KEY_BYTES
        pages = {"keys": [digits[i : i + step] for i in range(0, len(digits), step)], "root": root}
        return {name: value for name, value in request.items() if name != "prompt"} | pages

    def _find(self, prompt: Any) -> tuple[str, bytes]:
        """Return the root and the keys of a prompt. The caller holds the mutex."""
        now_s = time.monotonic()
        for idle in [name for name, (used_s, *_) in self._prompts.items() if now_s - used_s > IDLE_S]:
            del self._prompts[idle]
        entry = self._prompts.pop(prompt, None) if isinstance(prompt, str) else None
        if entry is None:
            raise InvalidRequest("prompt", f"{prompt!r} is unknown or has expired: send its pages again")
        self._prompts[prompt] = now_s, *entry[1:]
        return entry[1:]
