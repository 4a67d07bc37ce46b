"""``kvstore events``: what happens to a node's pages, as it happens."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import json_option
from kvstore.cli.top import name_text
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable

KINDS = ("sealed", "demoted", "promoted", "evicted", "dropped", "cleared")
WAIT_S = 1.0  # of one call; while nothing happens
PAUSE_S = 0.05  # between two calls, so that what happens in quick succession comes together
KEYS_SHOWN = 3
DASH = "-"


@click.command()
@node_option
@click.option("--after", type=click.IntRange(0), help="Begin after that event; 0: with all that the node has kept.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more, or end with the newest.")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Only these; may repeat.")
@click.option("--keys", "all_keys", is_flag=True, help=f"Every key, not only the first {KEYS_SHOWN} of each event.")
@click.option("--dump", is_flag=True, help="All that is stored, as KV events for ZMQ tell of it, in msgpack.")
@json_option
def events(
    node: str | None,
    after: int | None,
    follow: bool,
    kinds: tuple[str, ...],
    all_keys: bool,
    dump: bool,
    as_json: bool,
) -> None:
    """Follow what happens to pages: stored, demoted, promoted, evicted, dropped, with reasons.

    Without --after from now on; with --no-follow alone, all that the node has kept. A line is:
    time, number, kind, tier, reason, tenant, pages, keys;
    with --json an event is one document per line. A reader that is too slow is told how many events were overwritten.
    """
    if dump and (after is not None or not follow or kinds or as_json):
        raise InvalidRequest("--dump", "is all that is stored: it takes no other option than --node")
    if dump and sys.stdout.isatty():
        raise InvalidRequest("--dump", "is msgpack, no text: send it to a file or a pipe")
    with kvstore.connect(node) as store:
        if dump:
            for part in store.kv_dump():
                sys.stdout.buffer.write(part)
            return
        for event in _events(store, after, follow):
            if "lost" in event or not kinds or event["kind"] in kinds:
                click.echo(json.dumps(event, sort_keys=True) if as_json else "\n".join(_lines(event, all_keys)))
                sys.stdout.flush()


def _events(store: kvstore.Store, after: int | None, follow: bool) -> Iterator[dict[str, Any]]:
    """Events, and in their place ``{"lost": n}`` where some were overwritten before they could be read.

    Where ``follow`` is not wanted it ends with the newest there was at the beginning; else a node that has answered
    once is looked for until it is back.
    """
    last, answered, missing = None, False, False
    if not follow:
        last, after = int(store.events()["next"]), after or 0
    while True:
        try:
            reply = store.events(after, wait_s=WAIT_S if follow else 0.0)
        except (NodeUnavailable, DeadlineExceeded):
            if not follow or not answered:
                raise
            if not missing:
                click.echo(f"kvstore: {store.name} does not answer; looking on", err=True)
            missing = True
            time.sleep(WAIT_S)
            continue
        answered, missing = True, False
        if reply["lost"]:
            yield {"lost": reply["lost"]}
        yield from reply["events"]
        if last is not None and (reply["next"] >= last or reply["next"] == after):
            return
        after = reply["next"]
        if follow:
            time.sleep(PAUSE_S)


def _lines(event: Mapping[str, Any], all_keys: bool) -> list[str]:
    """One line per tenant of the event."""
    if "lost" in event:
        return [f"{event['lost']} events were overwritten before they could be read"]
    time_ns = event["time_ns"]
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns // 10**9))
    head = f"{clock}.{time_ns // 10**6 % 1000:03d}  {event['seq']}  {event['kind']:<8}  {event['tier']:<4}"
    found = []
    for tenant, keys in _by_tenant(event):
        shown = keys if all_keys else keys[:KEYS_SHOWN]
        more = f" and {len(keys) - len(shown)} more" if len(keys) > len(shown) else ""
        pages = f"{len(keys)} page{'' if len(keys) == 1 else 's'}"
        found.append(f"{head}  {event['reason'] or DASH:<8}  {tenant}  {pages}  {' '.join(shown) or DASH}{more}")
    return found


def _by_tenant(event: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """(tenant, keys); ``-`` where the node does not know whose they were."""
    tenants, keys = event.get("tenants", []), event["keys"]
    if len(tenants) < 2:
        return [(name_text(tenants[0]) if tenants else DASH, keys)]
    found: dict[int, list[str]] = {}
    for whose, key in zip(event["whose"], keys, strict=True):
        found.setdefault(int(whose), []).append(key)
    return [(name_text(tenants[whose]) if whose >= 0 else DASH, some) for whose, some in found.items()]
