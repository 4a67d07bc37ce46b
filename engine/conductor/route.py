"""``kvstore route``: where a conductor would send a prompt now, and why."""

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
    help="The conductor's gRPC API: HOST:PORT or unix:PATH; credentials by KVSTORE_TOKEN, KVSTORE_TLS_CA and so on.",
)
@click.option("--model", default="", help="[default: the only one]")
@click.option("--tokens", "ids", metavar="ID,ID,...", help="Token ids instead of a text.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=16, help="Length of the answer.  [default: 16]")
@click.option("--salt", help="Salt of the pages.  [default: the conductor's]")
@click.option("--tenant", default="", help="Another tenant, for operators.  [default: the caller's name]")
@click.option("--explain", is_flag=True, help="Show every candidate with its terms.")
@json_option
@click.argument("text", required=False)
def route(address: str, as_json: bool, explain: bool, text: str | None, ids: str | None, **how: Any) -> None:
    """Show where a conductor would send a prompt now, and why. Nothing is sent."""
    from engine.conductor.client import ask_route  # only here: it loads gRPC

    if (text is None) == (ids is None):
        raise InvalidRequest("TEXT", "give a prompt as text or --tokens, not both")
    found = ask_route(address, text or "", _tokens(ids) if ids is not None else (), CALL_S, **how)
    if as_json:
        print_json(found)
        return
    click.echo(found["outcome"])
    click.echo(found["why"])
    if explain:
        rows = [
            (each["engine"], each["part"], *(_cell(each.get(name, "")) for name in COLUMNS)) for each in _rows(found)
        ]
        print_table(("engine", "part", *COLUMNS), rows)
        for each in found["left_out"]:
            click.echo(f"{each['engine']}: left out, {each['why']}")


def _tokens(ids: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in ids.split(",") if part.strip())
    except ValueError:
        raise InvalidRequest("--tokens", f"{ids[:80]!r} are not whole numbers") from None


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return list(found["candidates"])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
