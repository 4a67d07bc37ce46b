"""``kvstore lookup``: shows for each page of a prompt whether it is stored, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import duration_text, json_option, print_json, print_table
from kvstore.cli.prompt import NEEDED, SALT_HELP, Prompt, PromptOptions, prompt_options
from kvstore.client.local.cache import LocalCache
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest, NodeUnavailable, PermissionDenied
from kvstore.model.replica import TIERS, Tier

Document = dict[str, Any]

TEXTS = {
    "identity": "another page has this key",
    "gap": "stored, but an earlier page is not",
    "parent": "the pages before it are not stored",
    "scanning": "not found yet: NVMe is still being scanned",
    "elsewhere": "not stored under this tenant, adapter and layout",
    "absent": "not stored",
    "unknown": "not found; only operators can see why, while the node is running",
}


@dataclass(frozen=True)
class PageLine:
    """The result for one page. ``reason`` is "" for a hit, otherwise a code; ``detail`` can explain it."""

    page: int
    key: str
    hit: bool
    tiers: list[str]
    reason: str
    detail: Document
    node: str = ""  # another node of the pool that has it


@click.command()
@node_option
@click.option("--salt", "--tenant", "salt", metavar="SALT", help=SALT_HELP)
@prompt_options
@json_option
def lookup(node: str | None, salt: str | None, prompt: PromptOptions, as_json: bool) -> None:
    """Show for each page of a prompt whether it is stored, in which tiers, or why it is not.

    Give the prompt as token ids (--tokens, --file) or as text with a tokenizer. The command reads no page, marks none
    as used, and changes nothing. Pages with equal answers share a line; --json has every page.
    """
    if prompt.tokens is None:
        raise InvalidRequest("prompt", NEEDED)
    with kvstore.connect(node) as store:
        keyed_prompt = prompt.find(store, salt)
        answer, explained = _explain(store, keyed_prompt)
        pages = _with_others(_pages(keyed_prompt, answer, explained), keyed_prompt)
        name = store.name
    document = _document(name, keyed_prompt, pages, answer, explained)
    if as_json:
        print_json(document)
        return
    if pages:
        headers = ("pages", "tokens", "key of the first", "found", "tiers", "reason or protection")
        print_table(headers, list(_rows(pages, keyed_prompt.cache.layout.page_tokens)))
        click.echo()
    click.echo(_summary(document))
    for other in document["elsewhere"]:
        click.echo(f"these tokens are stored under {_other(other)}")


def _explain(store: Store, prompt: Prompt) -> tuple[Document, bool]:
    """Return the node's facts about each page and True. Return only the result of a lookup and False if the node does
    not explain misses."""
    try:
        if store.stats()["state"] == "down":  # a call would wait for the daemon
            raise NodeUnavailable(store.name)
        return store.explain(prompt.keys), True
    except (NodeUnavailable, PermissionDenied):  # lookups also work without the daemon, and for tenants
        match = prompt.cache.lookup(prompt.keys)
        dram = match.tiers.get(Tier.DRAM, 0)
        tiers = [["dram"]] * dram + [["nvme"]] * (match.pages - dram) + [[]] * (len(prompt.keys) - match.pages)
        return {
            "pages": [{"tiers": names} for names in tiers],
            "elsewhere": [],
            "events_s": 0,
            "scanning": False,
        }, False


def _with_others(pages: list[PageLine], prompt: Prompt) -> list[PageLine]:
    """Mark pages that only other nodes of the pool have as hits."""
    first = next((page.page for page in pages if not page.hit), len(pages))
    stretches = prompt.cache.peer_stretches(prompt.keys, first) if isinstance(prompt.cache, LocalCache) else []
    for stretch in stretches:
        for page, tier in enumerate(stretch.tiers, first + stretch.start):
            old = pages[page]
            pages[page] = replace(old, hit=True, tiers=[str(TIERS[tier])], reason="", detail={}, node=stretch.node)
    return pages


def _pages(prompt: Prompt, answer: Document, explained: bool) -> list[PageLine]:
    pages: list[PageLine] = []
    is_complete = True  # every page so far is a hit
    for number, (key, about) in enumerate(zip(prompt.keys.hashes, answer["pages"], strict=True)):
        hit = is_complete and bool(about["tiers"])
        reason = "" if hit else _reason(about, number, is_complete, answer, explained)
        detail = {name: value for name, value in about.items() if name != "tiers"}
        pages.append(PageLine(number, key.hex(), hit, about["tiers"], reason, detail))
        is_complete = hit
    return pages


def _reason(about: Document, number: int, is_complete: bool, answer: Document, explained: bool) -> str:
    """Return why a page is not found. Facts about the page itself take precedence over facts about others."""
    event = about.get("event", {})
    if not explained:
        return "unknown"
    if about["tiers"]:
        return "gap"
    for fact in ("writing", "identity"):
        if fact in about:
            return fact
    if event.get("kind") in ("evicted", "dropped"):
        return str(event["kind"])
    if not is_complete:
        return "parent"
    if number == 0 and answer["elsewhere"]:
        return "elsewhere"
    return "scanning" if answer["scanning"] else "absent"


def _document(name: str, prompt: Prompt, pages: list[PageLine], answer: Document, explained: bool) -> Document:
    """Return the document that --json prints."""
    layout = prompt.cache.layout
    stored = sum(page.hit and not page.node for page in pages)
    pool_pages = stored + sum(bool(page.node) for page in pages)
    usable_pages = (len(prompt.tokens) - 1) // layout.page_tokens
    dram = sum(page.hit and not page.node and "dram" in page.tiers for page in pages)
    return {
        "node": name,
        "layout": asdict(layout),
        "fingerprint": layout.fingerprint.hex(),
        "salt": prompt.cache.salt,
        "adapter": prompt.cache.adapter,
        "root": prompt.cache.root.hex(),
        "tokens": len(prompt.tokens),
        "page_tokens": layout.page_tokens,
        "full_pages": len(pages),
        "stored_pages": stored,
        "stored_tokens": stored * layout.page_tokens,
        "dram_pages": dram,
        "nvme_only_pages": stored - dram,
        "other_nodes_pages": pool_pages - stored,
        "match_pages": min(pool_pages, usable_pages),
        "match_tokens": min(pool_pages, usable_pages) * layout.page_tokens,
        "reason": next((page.reason for page in pages if not page.hit), ""),
        "explained": explained,
        "events_s": answer["events_s"],
        "scanning": answer["scanning"],
        "elsewhere": answer["elsewhere"],
        "pages": [asdict(page) for page in pages],
    }


def _summary(document: Document) -> str:
    full, stored, tokens = document["full_pages"], document["stored_pages"], document["tokens"]
    if not full:
        return f"{tokens} tokens fill no page of {document['page_tokens']}: nothing of this prompt can be stored"
    where = f": {document['dram_pages']} in DRAM, {document['nvme_only_pages']} more on NVMe" if stored else ""
    rest = tokens - full * document["page_tokens"]
    lines = [f"{stored} of {full} pages are stored ({document['stored_tokens']} of {tokens} tokens){where}"]
    if document["other_nodes_pages"]:
        lines.append(f"{document['other_nodes_pages']} more are on other nodes of the pool")
    if rest:
        lines.append(f"the last {rest} tokens fill no page")
    elif stored == full:
        lines.append(f"a request with this prompt gets {document['match_pages']} of them: its last token is computed")
    if document["reason"] == "absent":
        lines.append(f"no such page was evicted in the last {duration_text(document['events_s'])}")
    return "\n".join(lines)


def _rows(pages: Iterable[PageLine], page_tokens: int) -> Iterable[tuple[object, ...]]:
    """Yield one row per run of pages with the same answer."""
    for _, run in groupby(pages, key=_alike):
        first, *others = run
        last = others[-1] if others else first
        tokens = f"{first.page * page_tokens}-{(last.page + 1) * page_tokens - 1}"
        numbers = str(first.page) if first is last else f"{first.page}-{last.page}"
        found = "miss" if not first.hit else "hit" if not first.node else f"on {first.node}"
        yield numbers, tokens, first.key, found, "+".join(first.tiers) or "-", _note(first)


def _alike(page: PageLine) -> tuple[object, ...]:
    event = page.detail.get("event", {})
    cause = (event.get("kind"), event.get("tier"), event.get("reason")) if page.reason in ("evicted", "dropped") else ()
    writing = page.detail.get("writing", {})
    how = writing.get("shards"), writing.get("sealed")
    held = page.detail.get("leased", False), page.detail.get("pinned", False)
    return page.hit, page.node, tuple(page.tiers), page.reason, cause, how, held


def _note(page: PageLine) -> str:
    """Return why a page is not found, or what protects it from eviction."""
    if page.hit:
        return ", ".join(fact for fact in ("leased", "pinned") if page.detail.get(fact))
    if page.reason in ("evicted", "dropped"):
        event = page.detail["event"]
        cause = f" ({event['reason']})" if event["reason"] else ""
        damaged = "damaged: " if page.reason == "dropped" and event["reason"] != "deleted" else ""
        return f"{damaged}{page.reason} from {event['tier']} {duration_text(event['ago_s'])} ago{cause}"
    if page.reason == "writing":
        writing = page.detail["writing"]
        ranks = f", {writing['sealed']} of {writing['shards']} ranks are done" if writing["shards"] > 1 else ""
        return f"reserved: being written{ranks}, for {duration_text(writing['left_s'])} at most"
    return TEXTS[page.reason]


def _other(about: Document) -> str:
    parts = [f"salt {about['salt']!r}"]
    parts += [f"{name} {about[name]!r}" for name in ("adapter", "model") if about[name]]
    return f"{', '.join(parts)}, layout {about['fingerprint'][:12]}"
