"""AdminVerbs: what an operator asks of a node, the same through shared memory and over gRPC.

Every verb is one admin call (``node.operator.admin``): a JSON document to the node and one back. Each kind of store
carries the call in its own way (``_admin``).
"""

from __future__ import annotations

import base64
import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.model.prefix import Keys

KEYS_PER_CALL = 2000  # named by one message, 35 bytes each
KEYS_MAX = 1 << 16  # of one prompt
EXPLAINED_PER_CALL = 500
FIRST_TOKENS = 4096  # of a prompt: a page has no more
PINS_PER_CALL = 200
VERIFY_POLL_S = 0.02


def keys_argument(keys: Keys) -> dict[str, Any]:
    """Pages as an admin call names them: ``{"keys": [hex], "root": hex}``."""
    return {"keys": [key.hex() for key in keys.hashes], "root": keys.root.hex()}


class AdminVerbs:
    """Mixed into every store. Each verb raises NodeUnavailable or DeadlineExceeded if the node does not answer in time,
    and InvalidRequest if an argument is invalid; then nothing was changed."""

    @abstractmethod
    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Make one admin call; return the node's answer."""

    @abstractmethod
    def in_pool(self, keys: Keys) -> Keys:
        """Return the keys that these pages have in the node's pool."""

    def _pages_named(self, keys: Keys) -> dict[str, Any]:
        """Return pages as ``_admin`` takes them. Raises InvalidRequest if there are none, or too many."""
        if not len(keys):
            raise InvalidRequest("keys", "must name at least one page (got none)")
        return self._pages_sent(keys)

    def _pages_sent(self, keys: Keys) -> dict[str, Any]:
        """As ``_pages_named``, for any number of pages. Pages that do not fit one message are sent ahead, in parts."""
        keys = self.in_pool(keys)
        if len(keys) > KEYS_MAX:
            raise InvalidRequest("keys", f"must be at most {KEYS_MAX} pages (got {len(keys)})")
        if len(keys) <= KEYS_PER_CALL:
            return keys_argument(keys)
        named: dict[str, Any] = {}
        for start in range(0, len(keys), KEYS_PER_CALL):
            part = keys_argument(keys[start : start + KEYS_PER_CALL])
            named = {"prompt": self._admin("name_pages", **part, **named)["prompt"]}
        return named

    def stats(self) -> dict[str, Any]:
        """Numbers about the node; see ``node.operator.stats``."""
        return self._admin("stats")

    def evict(
        self,
        pages: int | None = None,
        bytes: int | None = None,
        *,
        percent: float | None = None,
        tier: str = "dram",
        age_s: float | None = None,
        salt: str | None = None,
        keys: Keys | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Evict pages, the coldest tails of chains first.

        At most one of ``pages``, ``bytes`` and ``percent`` says how much to evict of the selected pages; without any of
        them, all are evicted. The selected pages are those of ``tier`` ("dram", "nvme", "all") that were not used for
        ``age_s`` seconds, belong to the tenant ``salt``, and are among ``keys``. At least one argument is required.

        Pages evicted from "dram" are saved to NVMe first, if the node has NVMe and admits them; pages evicted from
        "all" are gone. Pages that are leased, pinned, held or have children that stay are not evicted.

        Returns ``pages`` and ``bytes`` evicted, in total and ``by_tier``, ``by_tenant`` and ``by_model``, and
        ``stayed``: pages that were not evicted, by reason. With ``dry_run`` it returns what would be evicted and
        changes nothing.

        Raises:
            InvalidRequest: no argument is given, more than one amount is given, or a value is invalid.
        """
        wish = {"pages": pages, "bytes": bytes, "percent": percent, "age_s": age_s, "salt": salt}
        wish = {name: value for name, value in wish.items() if value is not None}
        if not wish and keys is None:
            raise InvalidRequest("evict", "needs one of pages, bytes, percent, age_s, salt and keys (got none)")
        if sum(field in wish for field in ("pages", "bytes", "percent")) > 1:
            raise InvalidRequest("evict", "takes one of pages, bytes and percent (got several)")
        for field in ("pages", "bytes"):
            if field in wish and not _is_count(wish[field]):
                raise InvalidRequest(field, f"must be a positive integer (got {wish[field]!r})")
        named = self._pages_named(keys) if keys is not None else {}
        return self._admin("evict", tier=tier, dry_run=dry_run, **wish, **named)

    def pages(
        self,
        limit: int = 100,
        *,
        tier: str = "all",
        order: str = "coldest",
        salt: str | None = None,
        age_s: float | None = None,
        keys: Keys | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        """List up to ``limit`` stored pages in ``order`` ("coldest" first, "recent" first, or by "place"), and count
        all.

        Args:
            tier, salt, age_s, keys: select pages, as in ``evict``.
            after: the ``next`` of an earlier answer, to continue where it ended.

        Returns ``total`` and ``bytes`` of the selected pages, where a page in two tiers counts twice; ``pages``, each
        with key, root, parent, tier, address, position in its chain, bytes, tokens, seconds since its last use, tenant,
        model, and what keeps it: holds (children, pins), leased, pinned; and ``next`` where there are more. Pages that
        are stored or evicted in the meantime may be missed, or listed twice.
        """
        if not _is_count(limit):
            raise InvalidRequest("limit", f"must be a positive integer (got {limit!r})")
        said = {"salt": salt, "age_s": age_s, "order": order if order != "coldest" else None}
        wish: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        if keys is not None:
            wish |= self._pages_named(keys)
        pages: list[dict[str, Any]] = []
        while True:  # one message holds some hundreds of pages
            place = {"after": after} if after is not None else {}
            found = self._admin("pages", limit=limit - len(pages), tier=tier, **wish, **place)
            pages += found["pages"]
            after = found.get("next")
            if after is None or len(pages) >= limit or not found["pages"]:
                return {**found, "pages": pages}

    def explain(self, keys: Keys) -> dict[str, Any]:
        """What the node knows of each page of ``keys``, stored or not; see ``node.operator.explain_lookup``.

        Returns ``pages``, one entry per key: ``tiers`` that have it, and ``leased``, ``pinned``, ``identity``,
        ``writing`` or ``event`` if they apply. ``elsewhere``: other tenants, adapters or models under which a first
        page of the same tokens is stored, where the first of ``keys`` is not. ``events_s``: how far back the node
        remembers events. ``scanning``: true while the node has not read all of NVMe yet.
        """
        keys = self.in_pool(keys)
        told: dict[str, Any] = {"pages": [], "elsewhere": [], "events_s": 0.0, "scanning": False}
        for start in range(0, len(keys), EXPLAINED_PER_CALL):
            part = self._admin("explain", **keys_argument(keys[start : start + EXPLAINED_PER_CALL]))
            pages = told["pages"] + part["pages"]
            told = {**part, "events_s": max(told["events_s"], part["events_s"]), "pages": pages}
        if told["pages"] and not told["pages"][0]["tiers"]:
            tokens = base64.b64encode(keys.tokens[:FIRST_TOKENS].astype("<u4").tobytes()).decode()
            first = self._admin("explain", **keys_argument(keys[:1]), tokens=tokens)
            told["elsewhere"] = first["elsewhere"]
        return told

    def layouts(self, model: str | None = None) -> list[dict[str, Any]]:
        """List layouts that pages were put under, those with most pages first: ``fingerprint``, ``layout`` (the
        arguments of ``kvstore.Layout``; None if unknown), ``tenants`` and ``pages`` (counts). ``model`` selects the
        layouts of one model."""
        found: list[dict[str, Any]] = self._admin("layouts", **({"model": model} if model is not None else {}))[
            "layouts"
        ]
        return found

    def pin(self, keys: Keys, ttl_s: float) -> dict[str, Any]:
        """Protect the stored pages of ``keys`` from eviction for ``ttl_s`` seconds:
        ``{"pin", "pages", "bytes", "until"}``.

        ``until`` is in seconds since the epoch. A pin outlives this store and the daemon, but not a reboot.
        """
        return self._admin("pin", ttl_s=ttl_s, **self._pages_named(keys))

    def unpin(self, pin: str | int | None = None, keys: Keys | None = None) -> dict[str, Any]:
        """End a pin, by its id or by what it pins."""
        if (pin is None) == (keys is None):
            raise InvalidRequest("pin", "needs either the id of a pin or keys")
        return self._admin("unpin", **({"pin": pin} if keys is None else self._pages_named(keys)))

    def pins(self) -> dict[str, Any]:
        """List all pins as ``pins``, and ``bytes`` that they keep per tier."""
        found = self._admin("pins", limit=PINS_PER_CALL)
        pins = list(found["pins"])
        while "next" in found:
            found = self._admin("pins", limit=PINS_PER_CALL, after=found["next"])
            pins += found["pins"]
        return {**found, "pins": pins}

    def events(self, after: int | None = None, limit: int = 1000, wait_s: float = 0.0) -> dict[str, Any]:
        """What happened to pages after event ``after`` (None: from now on): ``{"events", "next", "lost"}``.

        ``next`` is the ``after`` of the next call; ``lost`` counts events that were overwritten before they could be
        read.
        """
        return self._admin("events", after=after, limit=limit, wait_s=wait_s)

    def kv_dump(self) -> Iterator[bytes]:
        """Yield everything that the node holds as KV events: concatenated msgpack batches, in parts; see
        docs/events.md.

        Read it without pauses: after a minute the node drops the dump, and the next part raises InvalidRequest.
        """
        reply = self._admin("kv_dump")
        yield base64.b64decode(reply["data"])
        while reply["dump"] is not None:
            reply = self._admin("kv_dump", dump=reply["dump"])
            yield base64.b64decode(reply["data"])

    def verify(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """Ask the node to verify every page's checksums, record and index entry, and then its conservation laws.

        Damaged pages are dropped with their descendants. Returns ``pages_verified``, ``pages_damaged``, ``findings``
        (one line per broken law; empty where all hold) and ``damage_since_start`` (pages by reason).

        Raises:
            NodeUnavailable, DeadlineExceeded: the daemon did not answer, or the sweep did not end, in time.
        """
        before = self._admin("scrub_status")
        sweep = self._admin("scrub")["sweep"]
        deadline = time.monotonic() + timeout_s
        while (now := self._admin("scrub_status"))["sweeps"] < sweep:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"the sweep did not end within {timeout_s:g} s")
            time.sleep(VERIFY_POLL_S)
        counters = self._admin("stats")["counters"]
        return {
            "pages_verified": now["asked_pages"],
            "pages_damaged": now["pages_damaged"] - before["pages_damaged"],
            "findings": self._admin("verify")["findings"],
            "damage_since_start": {name: n for name, n in counters.items() if name.startswith("damaged_")},
        }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
