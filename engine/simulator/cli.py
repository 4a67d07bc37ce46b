"""`kvstore simulate`: make traces, look at them, and run the product's own decisions over them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from engine.simulator.cache import RULES
from engine.simulator.compare import Half, compare, compare_hints, known_policies, plot, require_plotting, table
from engine.simulator.generate import RATE_DEFAULT, agents, bimodal, conversations, scans, shifts
from engine.simulator.trace import TraceRequest, read_trace, statistics, write_trace
from kvstore.cli.output import json_option, print_json, print_pairs, print_table
from kvstore.errors import InvalidRequest
from kvstore.state.eviction import POLICY_DEFAULT

REQUESTS_DEFAULT = 12_000

GENERATORS: dict[str, Callable[[int, float, int], Iterator[TraceRequest]]] = {
    "conversations": lambda requests, rate, seed: conversations(requests, rate=rate, seed=seed),
    "bimodal": lambda requests, rate, seed: bimodal(requests, rate=rate, seed=seed),
    "scans": lambda requests, rate, seed: scans(requests, rate=rate, seed=seed),
    "agents": lambda requests, rate, seed: agents(requests, rate=rate, seed=seed),
    "shifts": lambda requests, rate, seed: shifts(requests, rate=rate, seed=seed),
}


@click.group()
def simulate() -> None:
    """Make traces; run policies over them."""


@simulate.command()
@click.option("--kind", type=click.Choice(tuple(GENERATORS)), default="conversations", show_default=True)
@click.option("--requests", type=int, default=REQUESTS_DEFAULT, show_default=True, help="How many requests.")
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


@simulate.command()
@click.option("--trace", metavar="FILE", help="A trace in Mooncake's JSONL format.")
@click.option("--generate", "kind", type=click.Choice(tuple(GENERATORS)), help="Make a trace instead of reading one.")
@click.option(
    "--requests", type=int, default=REQUESTS_DEFAULT, show_default=True, help="Requests of a generated trace."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of a generated trace.")
@click.option("--limit", type=int, help="Run no more requests than this.")
@click.option("--capacity", default="1000,5859,10000,50000", show_default=True, metavar="PAGES[,..]", help="In blocks.")
@click.option("--policy", metavar="NAME[,..]", help=f"All unless given: {', '.join(known_policies())}.")
@click.option("--hints", "rule", type=click.Choice(RULES), help="In addition, requests with the hints of this rule.")
@click.option("--half", type=click.Choice([half.value for half in Half]), default="all", show_default=True)
@click.option("--plot", "picture", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw it as well.")
@json_option
def cache(
    trace: str | None,
    kind: str | None,
    requests: int,
    seed: int,
    limit: int | None,
    capacity: str,
    policy: str | None,
    rule: str | None,
    half: str,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Run eviction policies over a trace; print block hit ratios.

    The policies are the ones a node runs, under a node's rules. In addition: LRU and the optimum (Belady) of a cache of
    single blocks, the optimum under the node's rules, and a cache that never evicts. --half first runs the first half
    of the requests alone, --half second runs all and counts the second half.

    --hints deals the requests to ten tenants and runs one policy (gittins unless given) without hints, with those that
    a program could give by the kind of its requests (type) or by what it knows of its sessions (sessions), and where
    one of the ten says of every page that it is worth the most.
    """
    if (trace is None) == (kind is None):
        raise InvalidRequest("trace", "give either --trace FILE or --generate KIND")
    if picture is not None:
        require_plotting()
    if trace is not None:
        source, run = Path(trace).name, read_trace(trace, limit)
    else:
        source, made = f"{kind}, seed {seed}", requests if limit is None else min(requests, limit)
        run = GENERATORS[str(kind)](made, RATE_DEFAULT, seed)
    if rule is not None:
        name = policy if policy is not None else POLICY_DEFAULT
        found = compare_hints(source, run, _capacities(capacity), name, rule, Half(half))
    else:
        names = _names(policy) if policy is not None else known_policies()
        found = compare(source, run, _capacities(capacity), names, Half(half))
    if picture is not None:
        plot(found, picture)
    if as_json:
        print_json(found)
    else:
        click.echo(f"{found.source}: {found.requests:,} requests counted, {found.blocks:,} blocks; block hit ratio")
        print_table(*table(found))


def _names(policy: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in policy.split(",")))


def _capacities(capacity: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(pages) for pages in capacity.split(",")))
    except ValueError:
        raise InvalidRequest("capacity", f"must be numbers of pages, with commas between, is {capacity!r}") from None


def _text(value: object) -> str:
    match value:
        case float():
            return f"{value:.3f}" if value < 100 else f"{value:.0f}"
        case list():
            return " ".join(f"{item:.2f}" for item in value)
        case _:
            return str(value)
