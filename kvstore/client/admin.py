"""The operators' verbs of every store, the same through shared memory and over gRPC.

Each verb makes one or more admin calls (``node.operator.admin``): a JSON document to the node, and one back. Each kind
of store sends calls in its own way (``_admin``).
"""

from __future__ import annotations

import base64
import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.model.prefix import Keys

KEYS_PER_CALL = 2000  # keys in one message, 35 bytes each
KEYS_MAX = 1 << 16  # keys of one prompt
EXPLAINED_PER_CALL = 500
FIRST_TOKENS = 4096  # the first page of a prompt has at most this many tokens
PINS_PER_CALL = 200
VERIFY_POLL_S = 0.02
DRAIN_POLL_S = 0.2


def keys_argument(keys: Keys) -> dict[str, Any]:
    """Return the arguments that name these pages in an admin call: ``{"keys": [hex], "root": hex}``."""
    return {"keys": [key.hex() for key in keys.hashes], "root": keys.root.hex()}


class AdminVerbs:
    """The verbs for operators, a base class of every store.

    Each verb raises NodeUnavailable or DeadlineExceeded if the node does not answer in time, and InvalidRequest if an
    argument is invalid; then nothing was changed."""

    @abstractmethod
    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Make one admin call and return the node's answer."""

    @abstractmethod
    def in_pool(self, keys: Keys) -> Keys:
        """Return the keys that these pages have in the node's pool."""

    def _page_arguments(self, keys: Keys) -> dict[str, Any]:
        """Return the arguments that name these pages. Raises InvalidRequest if there are none, or too many."""
        if not len(keys):
            raise InvalidRequest("keys", "must name at least one page (got none)")
        return self._encode_pages(keys)

    def _encode_pages(self, keys: Keys) -> dict[str, Any]:
        """Return the arguments that name these pages. Keys that do not fit one message are sent ahead, in parts."""
        keys = self.in_pool(keys)
        if len(keys) > KEYS_MAX:
            raise InvalidRequest("keys", f"must be at most {KEYS_MAX} pages (got {len(keys)})")
        if len(keys) <= KEYS_PER_CALL:
            return keys_argument(keys)
        prompt: dict[str, Any] = {}
        for start in range(0, len(keys), KEYS_PER_CALL):
            part = keys_argument(keys[start : start + KEYS_PER_CALL])
            prompt = {"prompt": self._admin("name_pages", **part, **prompt)["prompt"]}
        return prompt

    def stats(self) -> dict[str, Any]:
        """Return numbers about the node; see ``node.operator.stats``."""
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
        amounts = {"pages": pages, "bytes": bytes, "percent": percent, "age_s": age_s, "salt": salt}
        arguments = {name: value for name, value in amounts.items() if value is not None}
        if not arguments and keys is None:
            raise InvalidRequest("evict", "needs one of pages, bytes, percent, age_s, salt and keys (got none)")
        if sum(field in arguments for field in ("pages", "bytes", "percent")) > 1:
            raise InvalidRequest("evict", "takes one of pages, bytes and percent (got several)")
        for field in ("pages", "bytes"):
            if field in arguments and not _is_count(arguments[field]):
                raise InvalidRequest(field, f"must be a positive integer (got {arguments[field]!r})")
        if keys is not None:
            arguments |= self._page_arguments(keys)
        return self._admin("evict", tier=tier, dry_run=dry_run, **arguments)

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

        Returns ``total`` and ``bytes`` of the selected pages, where a page in two tiers counts twice; ``pages``; and
        ``next`` if more pages follow. Each page has its key, root, parent, tier, address, position in its chain, bytes,
        tokens, replicas, seconds since its last use, tenant and model, and what protects it from eviction: holds
        (children, pins), leased, pinned. Pages that are stored or evicted during the call may be missing, or listed
        twice.
        """
        if not _is_count(limit):
            raise InvalidRequest("limit", f"must be a positive integer (got {limit!r})")
        filters = {"salt": salt, "age_s": age_s, "order": order if order != "coldest" else None}
        arguments: dict[str, Any] = {name: value for name, value in filters.items() if value is not None}
        if keys is not None:
            arguments |= self._page_arguments(keys)
        pages: list[dict[str, Any]] = []
        while True:  # one message holds some hundreds of pages
            place = {"after": after} if after is not None else {}
            answer = self._admin("pages", limit=limit - len(pages), tier=tier, **arguments, **place)
            pages += answer["pages"]
            after = answer.get("next")
            if after is None or len(pages) >= limit or not answer["pages"]:
                return {**answer, "pages": pages}

    def drain(self, deadline_s: float = 300.0) -> dict[str, Any]:
        """Move the node's pages to other nodes of its pool, those worth most first, and take the node out of the pool.

        The call returns when nothing is left to move, or soon after the deadline; in either case the node has left the
        pool. It continues to serve programs of its machine until it is stopped, and joins again when it is started.

        Returns ``moved_pages`` and ``moved_bytes``; ``left_pages`` and ``left_bytes``, which no other node has, and
        ``reasons``; ``left_object_pages`` of opaque objects, which are not moved.

        Raises:
            InvalidRequest: the deadline is invalid, or the node is in no pool.
        """
        status = self._admin("drain", deadline_s=deadline_s)
        while status["state"] == "moving":
            time.sleep(DRAIN_POLL_S)
            status = self._admin("drain_status")
        return status

    def explain(self, keys: Keys) -> dict[str, Any]:
        """Explain a lookup: return the state of each page of ``keys``, stored or not.

        ``pages`` has one entry per key: ``tiers`` that store it, and ``leased``, ``pinned``, ``identity``, ``writing``
        or ``event`` if they apply (see ``node.operator.explain_lookup``). If the first page is not stored,
        ``elsewhere`` lists other tenants, adapters or models that store a page of the same tokens. ``events_s`` is the
        age of the oldest known event. ``scanning`` is true until the node has read all of NVMe.
        """
        keys = self.in_pool(keys)
        answer: dict[str, Any] = {"pages": [], "elsewhere": [], "events_s": 0.0, "scanning": False}
        for start in range(0, len(keys), EXPLAINED_PER_CALL):
            part = self._admin("explain", **keys_argument(keys[start : start + EXPLAINED_PER_CALL]))
            pages = answer["pages"] + part["pages"]
            answer = {**part, "events_s": max(answer["events_s"], part["events_s"]), "pages": pages}
        if answer["pages"] and not answer["pages"][0]["tiers"]:
            tokens = base64.b64encode(keys.tokens[:FIRST_TOKENS].astype("<u4").tobytes()).decode()
            first = self._admin("explain", **keys_argument(keys[:1]), tokens=tokens)
            answer["elsewhere"] = first["elsewhere"]
        return answer

    def layouts(self, model: str | None = None) -> list[dict[str, Any]]:
        """List the layouts of stored pages, the one with most pages first.

        Each entry has ``fingerprint``, ``layout`` (the arguments of ``kvstore.Layout``; None if unknown), and the
        numbers of ``tenants`` and ``pages``. ``model`` selects the layouts of one model."""
        arguments = {"model": model} if model is not None else {}
        layouts: list[dict[str, Any]] = self._admin("layouts", **arguments)["layouts"]
        return layouts

    def pin(self, keys: Keys, ttl_s: float) -> dict[str, Any]:
        """Protect the stored pages of ``keys`` from eviction for ``ttl_s`` seconds.

        Returns ``{"pin", "pages", "bytes", "until"}``; ``until`` is in seconds since the epoch. A pin stays after this
        store or the daemon has ended, but not after a reboot.
        """
        return self._admin("pin", ttl_s=ttl_s, **self._page_arguments(keys))

    def unpin(self, pin: str | int | None = None, keys: Keys | None = None) -> dict[str, Any]:
        """End a pin, named by its id or by its pages."""
        if (pin is None) == (keys is None):
            raise InvalidRequest("pin", "needs either the id of a pin or keys")
        return self._admin("unpin", **({"pin": pin} if keys is None else self._page_arguments(keys)))

    def pins(self) -> dict[str, Any]:
        """Return all pins as ``pins``, and how many bytes of each tier they protect as ``bytes``."""
        answer = self._admin("pins", limit=PINS_PER_CALL)
        pins = list(answer["pins"])
        while "next" in answer:
            answer = self._admin("pins", limit=PINS_PER_CALL, after=answer["next"])
            pins += answer["pins"]
        return {**answer, "pins": pins}

    def events(self, after: int | None = None, limit: int = 1000, wait_s: float = 0.0) -> dict[str, Any]:
        """Return page events after event ``after``, or from now on if that is None: ``{"events", "next", "lost"}``.

        ``next`` is the ``after`` of the next call. ``lost`` counts events that were overwritten before this call.
        """
        return self._admin("events", after=after, limit=limit, wait_s=wait_s)

    def kv_dump(self) -> Iterator[bytes]:
        """Yield all stored pages as KV events: concatenated msgpack batches, in parts. docs/events.md describes them.

        Read without long pauses: after a minute the node drops the dump, and the next part raises InvalidRequest.
        """
        reply = self._admin("kv_dump")
        yield base64.b64decode(reply["data"])
        while reply["dump"] is not None:
            reply = self._admin("kv_dump", dump=reply["dump"])
            yield base64.b64decode(reply["data"])

    def verify(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """Ask the node to verify every page's checksums, record and index entry, and then its conservation laws.

        Damaged pages are dropped with their descendants. Returns ``pages_verified``, ``pages_damaged``, ``findings``
        (one line per violated invariant) and ``damage_since_start`` (pages by reason).

        Raises:
            NodeUnavailable, DeadlineExceeded: the daemon did not answer, or the sweep did not end, in time.
        """
        before = self._admin("scrub_status")
        sweep = self._admin("scrub")["sweep"]
        deadline = time.monotonic() + timeout_s
        while (status := self._admin("scrub_status"))["sweeps"] < sweep:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"the sweep did not end within {timeout_s:g} s")
            time.sleep(VERIFY_POLL_S)
        counters = self._admin("stats")["counters"]
        return {
            "pages_verified": status["asked_pages"],
            "pages_damaged": status["pages_damaged"] - before["pages_damaged"],
            "findings": self._admin("verify")["findings"],
            "damage_since_start": {name: n for name, n in counters.items() if name.startswith("damaged_")},
        }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
