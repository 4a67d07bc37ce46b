"""`kvstore simulate`: make traces, look at them, and run the product's own decisions over them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import click

from engine.simulator.generate import RATE_DEFAULT, bimodal, conversations
from engine.simulator.trace import Request, read_trace, statistics, write_trace
from kvstore.cli.output import json_option, print_json, print_pairs

GENERATORS: dict[str, Callable[[int, float, int], Iterator[Request]]] = {
    "conversations": lambda requests, rate, seed: conversations(requests, rate=rate, seed=seed),
    "bimodal": lambda requests, rate, seed: bimodal(requests, rate=rate, seed=seed),
}


@click.group()
def simulate() -> None:
    """Make traces; run policies over them."""


@simulate.command()
@click.option("--kind", type=click.Choice(tuple(GENERATORS)), default="conversations", show_default=True)
@click.option("--requests", type=int, default=12_000, show_default=True, help="How many requests.")
@click.option("--rate", type=float, default=RATE_DEFAULT, show_default=True, help="Mean requests per second.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal traces.")
@click.option("--out", required=True, metavar="FILE|-", help="Where to; - is stdout.")
@json_option
def generate(kind: str, requests: int, rate: float, seed: int, out: str, as_json: bool) -> None:
    """Write a generated trace in Mooncake's JSONL format."""
    if as_json and out == "-":
        raise click.BadParameter("- leaves no room on stdout for --json", param_hint="--out")
    generated = GENERATORS[kind](requests, rate, seed)
    if out == "-":
        write_trace(sys.stdout, generated)
        return
    written = write_trace(out, generated)
    if as_json:
        print_json({"kind": kind, "requests": written, "rate": rate, "seed": seed, "out": out})
    else:
        click.echo(f"{out}: {written} requests")


@simulate.command()
@click.option("--trace", required=True, metavar="FILE", help="A trace in Mooncake's JSONL format.")
@click.option("--limit", type=int, help="Read no more requests than this.")
@json_option
def stats(trace: str, limit: int | None, as_json: bool) -> None:
    """Show what a trace offers a cache: lengths, arrivals, reuse."""
    found = statistics(read_trace(trace, limit))
    if as_json:
        print_json(found)
    else:
        print_pairs({name: _text(value) for name, value in found.items()})


def _text(value: object) -> str:
    match value:
        case float():
            return f"{value:.3f}" if value < 100 else f"{value:.0f}"
        case list():
            return " ".join(f"{item:.2f}" for item in value)
        case _:
            return str(value)
