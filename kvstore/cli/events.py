"""``kvstore events``: follows the events of a node's pages."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import json_option, name_text
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable

KINDS = ("sealed", "demoted", "promoted", "evicted", "dropped", "cleared")
WAIT_S = 1.0  # how long one call waits for new events
PAUSE_S = 0.05  # between two calls, so that events in quick succession are fetched together
KEYS_SHOWN = 3
DASH = "-"


@click.command()
@node_option
@click.option(
    "--after", type=click.IntRange(0), help="Begin after this event; 0: with all events that the node has kept."
)
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more, or end with the newest.")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Show only this kind; may repeat.")
@click.option(
    "--keys", "all_keys", is_flag=True, help=f"Show every key, not only the first {KEYS_SHOWN} of each event."
)
@click.option("--dump", is_flag=True, help="Write all stored pages as KV events in msgpack, as sent over ZMQ.")
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
    """Follow the events of pages (stored, demoted, promoted, evicted, dropped) with their reasons.

    Without --after it shows events from now on; with --no-follow alone, all events that the node has kept. A line has
    time, number, kind, tier, reason, tenant, pages and keys; with --json each event is one document per line. If the
    reader is too slow, a line says how many events were overwritten.
    """
    if dump and (after is not None or not follow or kinds or as_json):
        raise InvalidRequest("--dump", "takes no other option than --node")
    if dump and sys.stdout.isatty():
        raise InvalidRequest("--dump", "writes binary msgpack: redirect it to a file or a pipe")
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
    """Yield events, and ``{"lost": n}`` in place of events that were overwritten before they could be read.

    Without ``follow`` the last event is the newest one at the time of the call. With ``follow`` a node that has
    answered once is polled after it stops answering.
    """
    last, has_answered, is_missing = None, False, False
    if not follow:
        last, after = int(store.events()["next"]), after or 0
    while True:
        try:
            reply = store.events(after, wait_s=WAIT_S if follow else 0.0)
        except (NodeUnavailable, DeadlineExceeded):
            if not follow or not has_answered:
                raise
            if not is_missing:
                click.echo(f"kvstore: {store.name} is not responding; retrying", err=True)
            is_missing = True
            time.sleep(WAIT_S)
            continue
        has_answered, is_missing = True, False
        if reply["lost"]:
            yield {"lost": reply["lost"]}
        yield from reply["events"]
        if last is not None and (reply["next"] >= last or reply["next"] == after):
            return
        after = reply["next"]
        if follow:
            time.sleep(PAUSE_S)


def _lines(event: Mapping[str, Any], all_keys: bool) -> list[str]:
    """Return one line per tenant of the event."""
    if "lost" in event:
        return [f"{event['lost']} events were overwritten before they could be read"]
    time_ns = event["time_ns"]
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns // 10**9))
    head = f"{clock}.{time_ns // 10**6 % 1000:03d}  {event['seq']}  {event['kind']:<8}  {event['tier']:<4}"
    lines = []
    for tenant, keys in _by_tenant(event):
        shown = keys if all_keys else keys[:KEYS_SHOWN]
        more = f" and {len(keys) - len(shown)} more" if len(keys) > len(shown) else ""
        pages = f"{len(keys)} page{'' if len(keys) == 1 else 's'}"
        lines.append(f"{head}  {event['reason'] or DASH:<8}  {tenant}  {pages}  {' '.join(shown) or DASH}{more}")
    return lines


def _by_tenant(event: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return each tenant with its keys. The tenant is ``-`` if the node has no name for it."""
    tenants, keys = event.get("tenants", []), event["keys"]
    if len(tenants) < 2:
        return [(name_text(tenants[0]) if tenants else DASH, keys)]
    keys_of: dict[int, list[str]] = {}  # by the index of the tenant; -1 for unknown tenants
    for index, key in zip(event["whose"], keys, strict=True):
        keys_of.setdefault(int(index), []).append(key)
    return [(name_text(tenants[index]) if index >= 0 else DASH, keys) for index, keys in keys_of.items()]
