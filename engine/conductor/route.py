"""``kvstore route``: ask a conductor where it would send a prompt now, and why."""

from __future__ import annotations

from typing import Any, Final

import click

from kvstore.cli.output import json_option, print_json, print_table
from kvstore.errors import InvalidRequest

CALL_S: Final = 10.0
COLUMNS: Final = ("own_tokens", "cached_tokens", "donor", "wait_s", "move_s", "prefill_s", "harm_s", "token_s")


@click.command()
@click.option(
    "--conductor",
    "address",
    metavar="ADDRESS",
    required=True,
    help="The conductor's gRPC API: HOST:PORT or unix:PATH. Credentials: KVSTORE_TOKEN, KVSTORE_TLS_CA and so on.",
)
@click.option("--model", default="", help="[default: the only one]")
@click.option("--tokens", "ids", metavar="ID,ID,...", help="Token ids instead of text.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=16, help="Length of the answer.  [default: 16]")
@click.option("--salt", help="Salt of the pages.  [default: the conductor's]")
@click.option("--tenant", default="", help="Tenant, which only operators may name.  [default: the caller's name]")
@click.option("--explain", is_flag=True, help="Show every candidate with its terms.")
@json_option
@click.argument("text", required=False)
def route(address: str, as_json: bool, explain: bool, text: str | None, ids: str | None, **how: Any) -> None:
    """Show where a conductor would send a prompt now, and why. It sends nothing."""
    from engine.conductor.client import ask_route  # only here: the import loads gRPC

    if (text is None) == (ids is None):
        raise InvalidRequest("TEXT", "give a prompt as text or --tokens, not both")
    explanation = ask_route(address, text or "", _tokens(ids) if ids is not None else (), CALL_S, **how)
    if as_json:
        print_json(explanation)
        return
    click.echo(explanation["outcome"])
    click.echo(explanation["why"])
    if explain:
        rows = [
            (row["engine"], row["part"], *(_cell(row.get(name, "")) for name in COLUMNS))
            for row in explanation["candidates"]
        ]
        print_table(("engine", "part", *COLUMNS), rows)
        for each in explanation["left_out"]:
            click.echo(f"{each['engine']}: left out, {each['why']}")


def _tokens(ids: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in ids.split(",") if part.strip())
    except ValueError:
        raise InvalidRequest("--tokens", f"must be whole numbers (got {ids[:80]!r})") from None


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
