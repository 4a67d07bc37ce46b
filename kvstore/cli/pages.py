"""``kvstore pages``: lists a node's stored pages."""

from __future__ import annotations

from typing import Any

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import Duration, bytes_text, duration_text, json_option, print_json, print_table
from kvstore.cli.prompt import PromptOptions, prompt_options

LIMIT_MAX = 1_000_000


@click.command()
@node_option
@click.option("--tier", type=click.Choice(["dram", "nvme", "all"]), default="all", show_default=True)
@click.option("--tenant", "--salt", "salt", metavar="SALT", help="Select this tenant's pages, or this tenant's prompt.")
@click.option(
    "--age", "age_s", type=Duration(), metavar="DURATION", help="Select pages unused for this time: 10m, 1h30m."
)
@click.option("--order", type=click.Choice(["coldest", "recent", "place"]), default="coldest", show_default=True)
@click.option(
    "--limit", type=click.IntRange(1, LIMIT_MAX), default=50, show_default=True, help="List at most this many pages."
)
@click.option("--after", metavar="PLACE", help="Continue an earlier list, from its `next`.")
@prompt_options
@json_option
def pages(
    node: str | None,
    tier: str,
    salt: str | None,
    age_s: float | None,
    order: str,
    limit: int,
    after: str | None,
    prompt: PromptOptions,
    as_json: bool,
) -> None:
    """List stored pages, the least recently used first.

    A page in two tiers is listed twice. With a prompt only its stored pages are listed; `lookup` also shows those that
    are not stored.
    """
    has_prompt = prompt.tokens is not None
    with kvstore.connect(node) as store:
        keys = prompt.find(store, salt).page_keys() if has_prompt else None
        salt = None if has_prompt else salt
        reply = store.pages(limit, tier=tier, order=order, salt=salt, age_s=age_s, keys=keys, after=after)
        name = store.name
    if as_json:
        print_json({"node": name, "next": None, **reply})
        return
    if reply["pages"]:
        headers = ("key", "tier", "page", "size", "unused for", "tenant", "model", "priority", "children", "kept")
        print_table(headers, [_row(page) for page in reply["pages"]])
        click.echo()
    shown = len(reply["pages"])
    click.echo(f"{shown} of {reply['total']} pages ({bytes_text(reply['bytes'])} in all)")
    if "next" in reply:
        click.echo(f"continue with --after {reply['next']}")


def _priority(page: dict[str, Any]) -> str:
    ttl = f" for {duration_text(page['ttl_s'])}" if page.get("ttl_s") else ""
    return f"{page['priority']:+}{ttl}" if page.get("priority") else "-"


def _row(page: dict[str, Any]) -> tuple[object, ...]:
    return (
        page["key"],
        page["tier"],
        page["position"],
        bytes_text(page["bytes"]),
        duration_text(page["unused_s"]),
        page["tenant"] or "-",
        page["model"] or "-",
        _priority(page),
        page["holds"],
        ", ".join(fact for fact in ("leased", "pinned") if page[fact]) or "-",
    )
