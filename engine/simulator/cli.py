"""The command ``kvstore simulate``: generates traces, shows statistics of them, and runs eviction policies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from engine.simulator.cache import RULES
from engine.simulator.compare import Half, compare, compare_hints, plot, policy_names, require_plotting, table
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
    """Generate traces, and run eviction policies over them."""


@simulate.command()
@click.option("--kind", type=click.Choice(tuple(GENERATORS)), default="conversations", show_default=True)
@click.option("--requests", type=int, default=REQUESTS_DEFAULT, show_default=True, help="How many requests.")
@click.option("--rate", type=float, default=RATE_DEFAULT, show_default=True, help="Mean requests per second.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal traces.")
@click.option("--out", required=True, metavar="FILE|-", help="The file to write; - is stdout.")
@json_option
def generate(kind: str, requests: int, rate: float, seed: int, out: str, as_json: bool) -> None:
    """Write a generated trace in Mooncake's JSONL format."""
    if as_json and out == "-":
        raise click.BadParameter("must be a file if --json is used (got -)", param_hint="--out")
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
@click.option("--limit", type=int, help="The maximum number of requests to read.")
@json_option
def stats(trace: str, limit: int | None, as_json: bool) -> None:
    """Show statistics of a trace: lengths, arrivals, and reuse of blocks."""
    values = statistics(read_trace(trace, limit))
    if as_json:
        print_json(values)
    else:
        print_pairs({name: _text(value) for name, value in values.items()})


@simulate.command()
@click.option("--trace", metavar="FILE", help="A trace in Mooncake's JSONL format.")
@click.option("--generate", "kind", type=click.Choice(tuple(GENERATORS)), help="Generate a trace of this kind instead.")
@click.option(
    "--requests", type=int, default=REQUESTS_DEFAULT, show_default=True, help="Requests of a generated trace."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of a generated trace.")
@click.option("--limit", type=int, help="The maximum number of requests to run.")
@click.option(
    "--capacity",
    default="1000,5859,10000,50000",
    show_default=True,
    metavar="PAGES[,..]",
    help="Capacities of the cache, in pages of one block.",
)
@click.option("--policy", metavar="NAME[,..]", help=f"Policies to run.  [default: {','.join(policy_names())}]")
@click.option("--hints", "rule", type=click.Choice(RULES), help="Compare runs with and without the hints of this rule.")
@click.option(
    "--half",
    type=click.Choice([half.value for half in Half]),
    default="all",
    show_default=True,
    help="The requests to count.",
)
@click.option(
    "--plot", "picture", type=click.Path(path_type=Path), metavar="FILE.png", help="Also write a picture to this file."
)
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
    """Run eviction policies over a trace, and print block hit ratios.

    The policies run under the rules of a node. For comparison, there are also a cache that never evicts, the optimum
    (Belady) under the rules of a node, and LRU and the optimum for a cache of single blocks. With --half first, only
    the first half of the requests is run. With --half second, all requests are run, and the second half is counted.

    With --hints, the requests are assigned to ten tenants. One policy (the default is that of a node) runs without
    hints, and with the hints of a program that knows the kind of its requests (type) or whether a later request will
    continue them (sessions). In further runs, one of the ten tenants gives no hints, or the highest priority to all its
    pages.
    """
    if picture is not None:
        require_plotting()
    source, run = _source(trace, kind, requests, seed, limit)
    if rule is not None:
        name = policy if policy is not None else POLICY_DEFAULT
        comparison = compare_hints(source, run, _capacities(capacity), name, rule, Half(half))
    else:
        names = _names(policy) if policy is not None else policy_names()
        comparison = compare(source, run, _capacities(capacity), names, Half(half))
    if picture is not None:
        plot(comparison, picture)
    if as_json:
        print_json(comparison)
    else:
        counted = f"{comparison.requests:,} requests counted, {comparison.blocks:,} blocks"
        click.echo(f"{comparison.source}: {counted}; block hit ratio")
        print_table(*table(comparison))


def _source(
    trace: str | None, kind: str | None, requests: int, seed: int, limit: int | None
) -> tuple[str, Iterator[TraceRequest]]:
    """Return the name and the requests of the trace to run."""
    if (trace is None) == (kind is None):
        raise InvalidRequest("trace", "must have either --trace FILE or --generate KIND")
    if trace is not None:
        return Path(trace).name, read_trace(trace, limit)
    count = requests if limit is None else min(requests, limit)
    return f"{kind}, seed {seed}", GENERATORS[str(kind)](count, RATE_DEFAULT, seed)


def _names(policy: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in policy.split(",")))


def _capacities(capacity: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(pages) for pages in capacity.split(",")))
    except ValueError:
        raise InvalidRequest("capacity", f"must be numbers of pages separated by commas (got {capacity!r})") from None


def _text(value: object) -> str:
    match value:
        case float():
            return f"{value:.3f}" if value < 100 else f"{value:.0f}"
        case list():
            return " ".join(f"{item:.2f}" for item in value)
        case _:
            return str(value)
