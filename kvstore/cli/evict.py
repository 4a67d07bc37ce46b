"""``kvstore evict``: evicts pages, and reports which."""

from __future__ import annotations

from typing import Any

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import Duration, Percent, Size, bytes_text, json_option, print_json, print_table
from kvstore.cli.prompt import PromptOptions, prompt_options
from kvstore.errors import InvalidRequest

NAMES_SHOWN = 20  # tenants or models; --json shows up to a hundred
STAY_REASONS = {
    "leased": "readers have leases on them",
    "pinned": "see `kvstore pin --list`",
    "held": "they are being copied, or their children are being written",
    "children": "later pages of their chains stay too",
    "changed": "they were evicted or moved in the meantime",
    "time": "too many pages for one call; run it again",
    "unsaved": "they were not saved to NVMe in time",
}


@click.command()
@node_option
@click.option(
    "--tier",
    type=click.Choice(["dram", "nvme", "all"]),
    default="dram",
    show_default=True,
    help="dram: save pages to NVMe first, if the node has NVMe and admits them; all: delete them.",
)
@click.option("--pages", "count", type=click.IntRange(min=1), metavar="N", help="Evict this many pages.")
@click.option("--bytes", "size", type=Size(), metavar="SIZE", help="Evict this many bytes of pages: 512MiB.")
@click.option("--percent", type=Percent(), metavar="P", help="Evict this share of the selected bytes.")
@click.option(
    "--age", "age_s", type=Duration(), metavar="DURATION", help="Select pages unused for this time: 10m, 1h30m."
)
@click.option("--tenant", "--salt", "salt", metavar="SALT", help="Select this tenant's pages, or this tenant's prompt.")
@click.option("--dry-run", is_flag=True, help="Report what would be evicted; change nothing.")
@prompt_options
@json_option
def evict(
    node: str | None,
    tier: str,
    count: int | None,
    size: int | None,
    percent: float | None,
    age_s: float | None,
    salt: str | None,
    dry_run: bool,
    prompt: PromptOptions,
    as_json: bool,
) -> None:
    """Evict pages, the coldest tails of chains first.

    Give an amount (--pages, --bytes or --percent; by default all selected pages) and a selection (--age, --tenant, a
    prompt); at least one of these options is required. Pages that are leased, pinned or being written stay, and so do
    all pages before them in their chains.
    """
    amounts = {"--pages": count, "--bytes": size, "--percent": percent}
    used = [option for option, value in amounts.items() if value is not None]
    if len(used) > 1:
        raise InvalidRequest(used[1], f"cannot be combined with {used[0]}")
    has_prompt = prompt.tokens is not None
    if not used and age_s is None and salt is None and not has_prompt:
        raise InvalidRequest("evict", "needs one of --pages, --bytes, --percent, --age, --tenant and a prompt")
    with kvstore.connect(node) as store:
        keys = prompt.find(store, salt).page_keys() if has_prompt else None
        salt = None if has_prompt else salt
        report = store.evict(
            count, size, percent=percent, tier=tier, age_s=age_s, salt=salt, keys=keys, dry_run=dry_run
        )
        name = store.name
    if as_json:
        print_json({"node": name, **report})
        return
    click.echo(f"{'would evict' if dry_run else 'evicted'} {report['pages']} pages ({bytes_text(report['bytes'])})")
    if report["pages"]:
        print_table(("by", "name", "pages", "size"), list(_rows(report)))
    for reason, pages in sorted(report["stayed"].items(), key=lambda item: -item[1]):
        click.echo(
            f"{pages} {'would stay' if dry_run else 'stayed'}: {reason}, {STAY_REASONS.get(reason, 'unknown reason')}"
        )


def _rows(report: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return the sums by tier, tenant and model, the largest first. The smallest ones share a row."""
    rows: list[tuple[object, ...]] = []
    for by in ("tier", "tenant", "model"):
        sums = sorted(report[f"by_{by}"].items(), key=lambda item: -item[1]["bytes"])
        rows += [(by, name or "(none)", of["pages"], bytes_text(of["bytes"])) for name, of in sums[:NAMES_SHOWN]]
        rest = [of for _, of in sums[NAMES_SHOWN:]]
        if rest:
            pages, size = (sum(of[unit] for of in rest) for unit in ("pages", "bytes"))
            rows.append((by, f"({len(rest)} more)", pages, bytes_text(size)))
    return rows
