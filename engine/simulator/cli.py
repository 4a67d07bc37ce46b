"""The commands ``kvstore simulate`` (traces, eviction policies, clusters) and ``kvstore plan``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from engine.conductor.state import policies
from engine.conductor.state.conductor_state import ConductorRules
from engine.conductor.state.policies import SPLITS
from engine.simulator.cache import RULES
from engine.simulator.cluster import ClusterSpec, read_spec, with_values
from engine.simulator.compare import Half, compare, compare_hints, plot, policy_names, require_plotting, table
from engine.simulator.generate import RATE_DEFAULT, agents, bimodal, conversations, scans, shifts
from engine.simulator.hardware import GPUS, LINKS, MODELS
from engine.simulator.pictures import plot_plan, plot_timeline
from engine.simulator.plan import ClusterPlan, Design, Slo, at_rate, make_plan
from engine.simulator.serve import ServeReport, ServeSimulation, report
from engine.simulator.trace import TraceRequest, read_trace, statistics, write_trace
from engine.simulator.what_if import what_if
from kvstore.cli.output import (
    bytes_text,
    duration_text,
    json_option,
    parse_duration,
    print_json,
    print_pairs,
    print_table,
    ratio_text,
)
from kvstore.errors import InvalidRequest
from kvstore.state.eviction import POLICY_DEFAULT

REQUESTS_DEFAULT = 12_000
PLAN_REQUESTS = 500

GENERATORS: dict[str, Callable[[int, float, int], Iterator[TraceRequest]]] = {
    "conversations": lambda requests, rate, seed: conversations(requests, rate=rate, seed=seed),
    "bimodal": lambda requests, rate, seed: bimodal(requests, rate=rate, seed=seed),
    "scans": lambda requests, rate, seed: scans(requests, rate=rate, seed=seed),
    "agents": lambda requests, rate, seed: agents(requests, rate=rate, seed=seed),
    "shifts": lambda requests, rate, seed: shifts(requests, rate=rate, seed=seed),
}


@click.group()
def simulate() -> None:
    """Generate traces, and run eviction policies or whole clusters over them."""


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


@simulate.command()
@click.option("--trace", metavar="FILE", help="A trace: Mooncake's JSONL, Dynamo's request traces, or Weka's sessions.")
@click.option("--generate", "kind", type=click.Choice(tuple(GENERATORS)), help="Generate a trace of this kind instead.")
@click.option(
    "--requests", type=int, default=REQUESTS_DEFAULT, show_default=True, help="Requests of a generated trace."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of a generated trace.")
@click.option("--limit", type=int, help="The maximum number of requests to run.")
@click.option("--rate", type=float, help="Requests per second, instead of the rate of the trace.")
@click.option(
    "--cluster", default="", metavar="SPEC", help="key=value,.. or a TOML file; see docs/scheduling.md for the keys."
)
@click.option("--policy", default="kv-centric", show_default=True, metavar="NAME[,..]", help="Policies to run.")
@click.option(
    "--split", type=click.Choice(tuple(SPLITS)), default="cost", show_default=True, help="When two engines share."
)
@click.option("--slo", metavar="LIMITS", help="Limits of latency, such as ttft=2s,tpot=50ms.")
@click.option(
    "--timeline", type=click.Path(path_type=Path), metavar="FILE.png", help="Also draw what happened over time."
)
@json_option
def serve(
    trace: str | None,
    kind: str | None,
    requests: int,
    seed: int,
    limit: int | None,
    rate: float | None,
    cluster: str,
    policy: str,
    split: str,
    slo: str | None,
    timeline: Path | None,
    as_json: bool,
) -> None:
    """Serve a trace with a simulated cluster, and print latencies, hits and goodput.

    The conductor and the eviction policies are those that serve. Engines follow a roofline model of their GPUs. With
    limits, the conductor refuses requests that would miss them; goodput counts the requests that met both.
    """
    if timeline is not None:
        require_plotting()
    spec, names = read_spec(cluster), _names(policy)
    for name in names:
        policies.make_policy(name, seed)
    source, generated = _source(trace, kind, requests, seed, limit)
    run = list(generated)
    if not run:
        raise InvalidRequest("trace", "must have requests")
    if rate is not None:
        if not rate > 0:
            raise InvalidRequest("rate", f"must be more than 0 (got {rate})")
        run = at_rate(run, rate)
    limits = read_slo(slo) if slo is not None else Slo(math.inf, math.inf)
    reports = [_serve(spec, name, split, limits, seed, run, _picture(timeline, name, names)) for name in names]
    if as_json:
        print_json({"source": source, "cluster": spec, "policies": reports})
        return
    click.echo(
        f"{source}: {len(run):,} requests; {spec.engines} engines of {spec.gpus_of_engine} {spec.gpu}, {spec.model}"
    )
    print_table(*serve_table(reports))


def _serve(
    spec: ClusterSpec, policy: str, split: str, limits: Slo, seed: int, run: list[TraceRequest], picture: Path | None
) -> ServeReport:
    first_token_s, token_s = (limit if limit < math.inf else 0.0 for limit in limits)
    rules = ConductorRules(policy=policy, split=split, first_token_s=first_token_s, token_s=token_s, seed=seed)
    simulation = ServeSimulation(spec, rules)
    with _progress(policy, len(run)) as advance:
        simulation.run(run, advance)
    if picture is not None:
        plot_timeline(simulation.served, picture)
    return report(simulation, policy, *limits)


def _picture(timeline: Path | None, policy: str, names: Sequence[str]) -> Path | None:
    """Return the file for the picture of one run: with several runs, each has its own."""
    return timeline.with_stem(f"{timeline.stem}-{policy}") if timeline is not None and len(names) > 1 else timeline


@contextmanager
def _progress(label: str, length: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal."""
    done = 0
    with click.progressbar(length=length, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:

        def advance(number: int) -> None:
            nonlocal done
            bar.update(number - done)
            done = number

        yield advance
        advance(length)


def serve_table(reports: Sequence[ServeReport]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows, with a row for each run."""
    headers = ["run", "ttft p50", "p90", "p99", "tpot p50", "p90", "gap p99", "good/s", "refused", "hits", "prompts"]
    rows = []
    for each in reports:
        hits, busy = sum(each.hits.values()), sum(each.gpu_s.values())
        rows.append(
            [
                each.policy,
                *(duration_text(each.ttft[name]) for name in ("p50", "p90", "p99")),
                *(duration_text(each.tpot[name]) for name in ("p50", "p90")),
                duration_text(each.gap["p99"]),
                f"{each.goodput:.2f}",
                f"{each.refused / each.requests:.1%}",
                ratio_text(hits, hits + each.computed),
                ratio_text(each.gpu_s["prefill"], busy),
            ]
        )
    return headers, rows


@click.command()
@click.option("--model", type=click.Choice(tuple(MODELS)), default="8b-gqa", show_default=True, help="The model.")
@click.option("--gpu", type=click.Choice(tuple(GPUS)), default="h100", show_default=True, help="The kind of GPU.")
@click.option("--gpus", type=int, default=8, show_default=True, help="How many GPUs there are.")
@click.option("--fabric", type=click.Choice(tuple(LINKS)), default="rdma-400", show_default=True, help="Between hosts.")
@click.option("--slo", default="ttft=2s,tpot=50ms", show_default=True, metavar="LIMITS", help="Both limits.")
@click.option("--trace", metavar="FILE", help="Your traffic, in a format that ``simulate serve`` reads.")
@click.option("--generate", "kind", type=click.Choice(tuple(GENERATORS)), help="Generate a trace of this kind instead.")
@click.option("--requests", type=int, default=PLAN_REQUESTS, show_default=True, help="Use this many requests.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of a generated trace.")
@click.option("--cluster", default="", metavar="SPEC", help="More about the cluster; see docs/scheduling.md.")
@click.option("--budget", type=float, default=0.0, help="For DRAM and NVMe of one host, to search their sizes.")
@click.option("--what-if", "query", metavar="QUERY", help="Answer by formulas, as a page of kvstore web does.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), metavar="FILE.png", help="Also draw the designs.")
@json_option
def plan(
    model: str,
    gpu: str,
    gpus: int,
    fabric: str,
    slo: str,
    trace: str | None,
    kind: str | None,
    requests: int,
    seed: int,
    cluster: str,
    budget: float,
    query: str | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Compare designs of a cluster on equal GPUs, and recommend one.

    Prompts are computed by the engines that answer them, at once or in chunks, or by engines of their own, with and
    without a pool. Without --trace, conversations are generated. With --what-if, nothing is simulated, and the query
    says everything: kvstore web shows it.
    """
    if query is not None:
        _print_what_if(what_if(query), as_json)
        return
    if picture is not None:
        require_plotting()
    of_engine = with_values(read_spec(cluster), {"model": model, "gpu": gpu}).gpus_of_engine
    if gpus < of_engine:
        raise InvalidRequest("gpus", f"must be at least {of_engine}, which one engine needs (got {gpus})")
    spec = with_values(read_spec(cluster), {"model": model, "gpu": gpu, "fabric": fabric, "engines": gpus // of_engine})
    source, generated = _source(trace, kind or (None if trace else "conversations"), requests, seed, requests)
    limits = read_slo(slo)
    with _progress("designs", 9) as advance:
        made = make_plan(
            spec, list(generated), limits, budget=budget, progress=lambda done, of: advance(9 * done // of)
        )
    if picture is not None:
        plot_plan(made, picture)
    if as_json:
        print_json(plan_document(made))
        return
    load = made.load
    click.echo(
        f"{source}: {load.requests:,} requests, mean prompt {load.input_tokens:,.0f} tokens, "
        f"answer {load.output_tokens:,.0f}, {load.hit_ratio:.0%} of the tokens repeated"
    )
    click.echo(f"{gpus} {gpu}, {of_engine} per engine, {fabric}; {made.kv_bytes_per_token:,} bytes of KV per token")
    _print_plan(made)


def _print_what_if(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    rows = [
        [
            each["name"],
            f"{each['prefill']}:{document['engines'] - each['prefill']}" if each["prefill"] else "-",
            f"{each['goodput']:.2f}",
            *("-" if each[name] is None else duration_text(each[name]) for name in ("ttft_mean", "ttft_p90", "tpot")),
            f"{each['hit_ratio']:.0%}",
            each["limit"] or "-",
        ]
        for each in document["designs"]
    ]
    print_table(["design", "ratio", "goodput/s", "ttft", "p90", "tpot", "reused", "used up first"], rows)
    click.echo(f"Recommended: {document['recommended']}. {document['because']}")


def _print_plan(made: ClusterPlan) -> None:
    headers, rows = serve_table([each.run for each in made.best])
    named = [
        [_design_name(each.design), f"{each.rate:.2f}", *row[1:]] for each, row in zip(made.best, rows, strict=True)
    ]
    print_table(["design", "goodput/s", *headers[1:]], named)
    click.echo("")
    links = [
        [
            name,
            duration_text(each["move_s"] or 0),
            duration_text(each["exposed_layerwise_s"] or 0),
            "never" if each["break_even_tokens"] is None else f"{each['break_even_tokens']:,.0f} tokens",
        ]
        for name, each in made.links.items()
    ]
    print_table(["link", "move", "exposed", "pays from"], links)
    click.echo("")
    page_bytes = made.spec.page_bytes
    sizes = ", ".join(f"{share:.0%}: {bytes_text(count * page_bytes)}" for share, count in made.load.curve.items())
    click.echo(f"Memory for a share of the possible hits: {sizes}")
    for each in made.tiers[:3]:
        click.echo(
            f"DRAM {bytes_text(each.dram)}, NVMe {bytes_text(each.nvme)} per host for {each.price:,.0f}: "
            f"hits {each.hit_ratio:.0%}, saves {duration_text(each.saved_s)} per request"
        )
    click.echo("")
    for sentence in (f"Recommended: {made.recommended}.", *made.because, *made.unknown):
        click.echo(sentence)


def _design_name(design: Design) -> str:
    spec = design.spec
    return f"{design.name} {spec.prefill}:{spec.engines - spec.prefill}" if spec.prefill else design.name


def read_slo(text: str) -> Slo:
    """Parse ``ttft=2s,tpot=50ms``.

    Raises:
        InvalidRequest: it has another form.
    """
    pairs = dict(part.partition("=")[::2] for part in text.split(",") if part)
    if set(pairs) != {"ttft", "tpot"}:
        raise InvalidRequest("slo", f"must be ttft=DURATION,tpot=DURATION (got {text!r})")
    try:
        limits = Slo(parse_duration(pairs["ttft"]), parse_duration(pairs["tpot"]))
    except ValueError as error:
        raise InvalidRequest("slo", str(error)) from None
    if min(limits) <= 0:
        raise InvalidRequest("slo", f"must be more than zero (got {text!r})")
    return limits


def plan_document(made: ClusterPlan) -> dict[str, object]:
    """Return a plan as a JSON document."""
    load = {
        each: getattr(made.load, each) for each in ("requests", "rate", "input_tokens", "output_tokens", "hit_ratio")
    }
    return {
        "cluster": made.spec,
        "slo": made.slo._asdict(),
        "workload": {**load, "pages_for_share_of_hits": made.load.curve, "page_bytes": made.spec.page_bytes},
        "kv_bytes_per_token": made.kv_bytes_per_token,
        "prompt_s": made.prompt_s,
        "links": made.links,
        "designs": [
            {"name": each.design.name, "prefill": each.design.spec.prefill, "goodput": each.rate, "run": each.run}
            for each in made.best
        ],
        "tiers": made.tiers[:8],
        "recommended": made.recommended,
        "because": made.because,
        "unknown": made.unknown,
    }


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
