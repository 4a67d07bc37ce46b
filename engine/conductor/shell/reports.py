"""Reports: readers of the descriptions that processes send about themselves. Every value is checked against bounds.

Any process that may write to the catalog may list an engine, and the server at its address may send anything. A value
out of bounds is refused with its name, and no decision uses it.
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
REQUESTS_MAX: Final = 1 << 20  # more than any process can have
RATE_MAX: Final = 1e12  # tokens per second
EGRESS_MAX: Final = 2.0**63
STEP_MS_MAX: Final = 3.6e6
TEXT_MAX: Final = 512
FINGERPRINT: Final = re.compile("[0-9a-f]{32}")


class ReportReader:
    """Reads values from a document that another process sent.

    Every method that returns a value raises VersionMismatch if the value is missing or not valid.

    Args:
        address: the address of that process, for errors.
        path: the names of the enclosing documents, for errors.
    """

    def __init__(self, address: str, document: Any, path: str = "") -> None:
        self._address = address
        self._path = path
        self._document: Mapping[str, Any] = document if isinstance(document, Mapping) else {}

    def part(self, name: str) -> ReportReader:
        """Return the nested document with this name."""
        value = self._document.get(name)
        if not isinstance(value, Mapping):
            raise self.error(name, "is not a document", value)
        return ReportReader(self._address, value, f"{self._path}{name}.")

    @property
    def document(self) -> Mapping[str, Any]:
        """The whole document."""
        return self._document

    def items(self) -> list[tuple[str, ReportReader]]:
        """Return the names of all values, and the values as nested documents."""
        return [(name, self.part(name)) for name in self._document]

    def number(self, name: str, least: float, most: float) -> float:
        """Return a number from ``least`` to ``most``."""
        value = self._document.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "is not a number", value)
        if not least <= value <= most:  # also refuses NaN
            raise self.error(name, f"must be from {least:g} to {most:g}", value)
        return float(value)

    def whole(self, name: str, least: int, most: int) -> int:
        """Return a whole number from ``least`` to ``most``."""
        value = self.number(name, least, most)
        if value != int(value):
            raise self.error(name, "is not a whole number", value)
        return int(value)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Return a string that has at most ``TEXT_MAX`` characters and matches ``pattern``."""
        value = self._document.get(name)
        if not isinstance(value, str):
            raise self.error(name, "is not a string", value)
        if len(value) > TEXT_MAX:
            raise self.error(name, f"has more than {TEXT_MAX} characters", value)
        if pattern is not None and not pattern.fullmatch(value):
            raise self.error(name, f"does not match {pattern.pattern}", value)
        return value

    def flag(self, name: str) -> bool:
        """Return a value that is true or false."""
        value = self._document.get(name)
        if not isinstance(value, bool):
            raise self.error(name, "is not true or false", value)
        return value

    def role(self, name: str) -> Role:
        """Return the role of an engine."""
        try:
            return Role(self.text(name))
        except ValueError:
            raise self.error(name, f"is not one of {', '.join(Role)}", self._document.get(name)) from None

    def has(self, name: str) -> bool:
        """Return True if the document has a value with this name."""
        return self._document.get(name) is not None

    def error(self, name: str, problem: str, value: object) -> VersionMismatch:
        """Return the error to raise about a value."""
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
        return VersionMismatch(f"{self._address}: {self._path}{name}: {problem} (got {shown})")


def engine_about(name: str, address: str, status: Any, node: str, host: str) -> EngineAbout:
    """Return an engine's description, read from its status.

    Args:
        node, host: the engine's node and host in the catalog; empty if unknown.

    Raises:
        VersionMismatch: a value is missing or not valid.
    """
    report = ReportReader(address, status)
    layout, frames, pool = report.part("layout"), report.part("frames"), report.part("pool")
    page_tokens = layout.whole("page_tokens", 1, PAGE_TOKENS_MAX)
    return EngineAbout(
        name=name,
        address=address,
        model=report.text("model"),
        layout=layout.text("fingerprint", FINGERPRINT),
        page_tokens=page_tokens,
        kv_bytes=layout.whole("page_bytes", page_tokens, PAGE_BYTES_MAX) // page_tokens,
        node=node or (pool.text("node") if pool.has("node") else ""),
        host=host,
        batch_max=report.whole("batch_max", 1, BATCH_MAX),
        chunk_tokens=report.whole("chunk_tokens", 0, TOKENS_MAX),
        tokens_max=frames.whole("tokens_max", 0, TOKENS_MAX),
        kv_tokens_max=frames.whole("kv_tokens_max", 0, TOKENS_MAX),
        context_max=report.whole("context_tokens_max", 0, TOKENS_MAX),
    )


def load_report(address: str, status: Any) -> LoadReport:
    """Return how busy an engine is, from its status. Raises VersionMismatch as ``engine_about`` does."""
    report = ReportReader(address, status)
    requests, speeds = report.part("requests"), report.part("speeds")
    return LoadReport(
        role=report.role("role"),
        order=_order(report),
        draining=report.flag("draining"),
        waiting=sum(requests.whole(name, 0, REQUESTS_MAX) for name in ("waiting", "loading", "computing")),
        running=requests.whole("decoding", 0, REQUESTS_MAX),
        kv_tokens=report.part("frames").whole("kv_tokens", 0, TOKENS_MAX),
        prefill_tokens_per_s=speeds.number("prefill_tokens_per_s", 0, RATE_MAX),
        step_s=speeds.number("step_ms", 0, STEP_MS_MAX) / 1e3,
    )


def _order(report: ReportReader) -> RoleOrder:
    """Return the last order of a leader that the engine carried out."""
    order = report.part("role_order")
    return RoleOrder(order.whole("revision", 0, REVISION_MAX), order.whole("number", 0, REVISION_MAX))


def layout_of(address: str, status: Any) -> store_pb2.Layout:
    """Return the layout of an engine's pages, from its status. Raises VersionMismatch as ``engine_about`` does."""
    layout = ReportReader(address, status).part("layout")
    fields = layout.part("fields")
    try:
        message = store_pb2.Layout(**fields.document)
    except (TypeError, ValueError) as error:
        raise layout.error("fields", f"are not those of a layout: {str(error)[:100]}", fields.document) from None
    if message.page_tokens != layout.whole("page_tokens", 1, PAGE_TOKENS_MAX):
        raise layout.error("fields.page_tokens", "differs from page_tokens", message.page_tokens)
    return message


def model_path(address: str, status: Any) -> str | None:
    """Return the folder of the model's tokenizer; None if every byte is a token. Raises as ``engine_about`` does."""
    report = ReportReader(address, status)
    return report.text("model_path") if report.has("model_path") else None
