"""Reports: reads other processes' descriptions of themselves, with bounds, before any decision depends on it.

Any process that may write to the catalog may list an engine, and the server at its address may say anything. A value
that makes no sense is refused with its name; a conductor never computes with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from engine.conductor.state.engine_table import EngineAbout, LoadReport
from engine.model.request import REVISION_MAX, Role, RoleOrder
from kvstore.errors import VersionMismatch
from kvstore.pb import store_pb2

PAGE_TOKENS_MAX: Final = (1 << 16) - 1
PAGE_BYTES_MAX: Final = (1 << 32) - 1
BATCH_MAX: Final = 1 << 16
TOKENS_MAX: Final = 1 << 40
REQUESTS_MAX: Final = 1 << 20  # more than any process has
RATE_MAX: Final = 1e12  # tokens per second
EGRESS_MAX: Final = 2.0**63
STEP_MS_MAX: Final = 3.6e6
TEXT_MAX: Final = 512
FINGERPRINT: Final = re.compile("[0-9a-f]{32}")


class Said:
    """A document of another process; ``address`` is its source.

    Every method raises VersionMismatch if there is no such value, or it is not valid.
    """

    def __init__(self, address: str, document: Any, path: str = "") -> None:
        self._address = address
        self._path = path
        self._document: Mapping[str, Any] = document if isinstance(document, Mapping) else {}

    def part(self, name: str) -> Said:
        """The nested document with this name."""
        found = self._document.get(name)
        if not isinstance(found, Mapping):
            raise self.wrong(name, "is not a document", found)
        return Said(self._address, found, f"{self._path}{name}.")

    @property
    def document(self) -> Mapping[str, Any]:
        """The whole document."""
        return self._document

    def items(self) -> list[tuple[str, Said]]:
        """The nested documents, by name."""
        return [(name, self.part(name)) for name in self._document]

    def number(self, name: str, least: float, most: float) -> float:
        """A finite number in these bounds."""
        found = self._document.get(name)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.wrong(name, "is not a number", found)
        if not least <= found <= most:  # also refuses NaN
            raise self.wrong(name, f"must be from {least:g} to {most:g}", found)
        return float(found)

    def whole(self, name: str, least: int, most: int) -> int:
        """A whole number in these bounds."""
        found = self.number(name, least, most)
        if found != int(found):
            raise self.wrong(name, "is not a whole number", found)
        return int(found)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """A text of ``TEXT_MAX`` characters at most."""
        found = self._document.get(name)
        if not isinstance(found, str) or len(found) > TEXT_MAX or (pattern and not pattern.fullmatch(found)):
            raise self.wrong(name, "is not a text, or too long", found)
        return found

    def flag(self, name: str) -> bool:
        """True or false."""
        found = self._document.get(name)
        if not isinstance(found, bool):
            raise self.wrong(name, "is not true or false", found)
        return found

    def role(self, name: str) -> Role:
        """The role of an engine."""
        try:
            return Role(self.text(name))
        except ValueError:
            raise self.wrong(name, f"is not one of {', '.join(Role)}", self._document.get(name)) from None

    def has(self, name: str) -> bool:
        """True if there is a value with this name."""
        return self._document.get(name) is not None

    def wrong(self, name: str, problem: str, value: object) -> VersionMismatch:
        """The error to raise about a value."""
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
        return VersionMismatch(f"{self._address}: {self._path}{name}: {problem} (got {shown})")


def engine_about(name: str, address: str, status: Any, node: str, host: str) -> EngineAbout:
    """An engine's description of itself in its status.

    Raises:
        VersionMismatch: a value is missing or not valid.
    """
    said = Said(address, status)
    layout, frames, pool = said.part("layout"), said.part("frames"), said.part("pool")
    page_tokens = layout.whole("page_tokens", 1, PAGE_TOKENS_MAX)
    return EngineAbout(
        name=name,
        address=address,
        model=said.text("model"),
        layout=layout.text("fingerprint", FINGERPRINT),
        page_tokens=page_tokens,
        kv_bytes=layout.whole("page_bytes", page_tokens, PAGE_BYTES_MAX) // page_tokens,
        node=node or (pool.text("node") if pool.has("node") else ""),
        host=host,
        batch_max=said.whole("batch_max", 1, BATCH_MAX),
        chunk_tokens=said.whole("chunk_tokens", 0, TOKENS_MAX),
        tokens_max=frames.whole("tokens_max", 0, TOKENS_MAX),
        kv_tokens_max=frames.whole("kv_tokens_max", 0, TOKENS_MAX),
        context_max=said.whole("context_tokens_max", 0, TOKENS_MAX),
    )


def load_report(address: str, status: Any) -> LoadReport:
    """How busy an engine says that it is. Raises like ``engine_about``."""
    said = Said(address, status)
    requests, speeds = said.part("requests"), said.part("speeds")
    return LoadReport(
        role=said.role("role"),
        order=_order(said),
        draining=said.flag("draining"),
        waiting=sum(requests.whole(name, 0, REQUESTS_MAX) for name in ("waiting", "loading", "computing")),
        running=requests.whole("decoding", 0, REQUESTS_MAX),
        kv_tokens=said.part("frames").whole("kv_tokens", 0, TOKENS_MAX),
        prefill_tokens_per_s=speeds.number("prefill_tokens_per_s", 0, RATE_MAX),
        step_s=speeds.number("step_ms", 0, STEP_MS_MAX) / 1e3,
    )


def _order(said: Said) -> RoleOrder:
    """The last order that an engine carried out."""
    order = said.part("role_order")
    return RoleOrder(order.whole("revision", 0, REVISION_MAX), order.whole("number", 0, REVISION_MAX))


def layout_of(address: str, status: Any) -> store_pb2.Layout:
    """The layout of its pages, for calls about them. Raises like ``engine_about``."""
    layout = Said(address, status).part("layout")
    fields = layout.part("fields")
    try:
        found = store_pb2.Layout(**fields.document)
    except (TypeError, ValueError) as error:
        raise layout.wrong("fields", f"are not those of a layout: {str(error)[:100]}", fields.document) from None
    if found.page_tokens != layout.whole("page_tokens", 1, PAGE_TOKENS_MAX):
        raise layout.wrong("fields.page_tokens", "is not page_tokens", found.page_tokens)
    return found


def model_path(address: str, status: Any) -> str | None:
    """The folder of its model's tokenizer; None: every byte is a token. Raises like ``engine_about``."""
    said = Said(address, status)
    return said.text("model_path") if said.has("model_path") else None
