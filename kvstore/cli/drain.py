"""``kvstore drain``: moves a node's pages to other nodes, and takes the node out of its pool."""

from __future__ import annotations

import click

import kvstore
from kvstore.cli.output import Duration, bytes_text, duration_text, json_option, print_json

REASONS = {
    "space": "the other nodes have no space for them",
    "late": "the other nodes did not store them in time",
    "absent": "they changed while they were read",
}


@click.command()
@click.argument("node")
@click.option(
    "--deadline", "deadline_s", type=Duration(), default="5m", show_default=True, metavar="DURATION", help="10m, 1h30m."
)
@json_option
def drain(node: str, deadline_s: float, as_json: bool) -> None:
    """Move a node's pages to other nodes, and take the node out of its pool.

    NODE is a name on this machine, or kv://HOST:PORT. Pages that no other node has are copied, those worth most first,
    until nothing is left or the deadline has passed. Then the node leaves the catalog. It continues to serve programs
    of its machine until it is stopped; when it is started again, it joins the pool again.
    """
    with kvstore.connect(node) as store:
        report = store.drain(deadline_s)
        name = store.name
    if as_json:
        print_json({"node": name, **report})
        return
    moved, left = report["moved_pages"], report["left_pages"]
    click.echo(
        f"moved {moved} pages ({bytes_text(report['moved_bytes'])}) in {duration_text(report['took_s'])}; "
        f"{name} has left the pool, and serves its own machine until it is stopped"
    )
    if left:
        click.echo(f"{left} pages ({bytes_text(report['left_bytes'])}) are only on {name}")
    for reason, pages in sorted(report["reasons"].items(), key=lambda item: -item[1]):
        click.echo(f"{pages} were not moved: {REASONS.get(reason, reason)}")
    if report["left_object_pages"]:
        click.echo(f"{report['left_object_pages']} pages of opaque objects were not moved")
