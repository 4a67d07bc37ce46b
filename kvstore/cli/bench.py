"""``kvstore bench``: compares the store with the limits of this machine."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import click

from kvstore.bench.harness import BenchFailed, Kind, NotMeasured, Result, machine
from kvstore.bench.rows import Row, run, select_rows
from kvstore.bench.stage import SCRATCH_DIR, RunSettings
from kvstore.cli.output import bytes_text, duration_text, json_option, print_json, print_table, speed_text
from kvstore.errors import KVStoreError

QUICK_ROUNDS, ROUNDS = 1, 5


@click.command()
@click.argument("names", nargs=-1)
@click.option("--runs", type=click.IntRange(1, 1000), help=f"Rounds of every row.  [default: {ROUNDS}]")
@click.option("--quick", is_flag=True, help="Little data, one round: checks that rows work; the numbers mean nothing.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=SCRATCH_DIR,
    show_default=True,
    help="Folder on a disk for the files of NVMe rows: some GiB, removed at the end.",
)
@click.option("--device", default="cpu", show_default=True, help="Device of the rows' engines: cpu or cuda:N.")
@click.option("--list", "listing", is_flag=True, help="List the rows and their bars; measure nothing.")
@json_option
def bench(
    names: tuple[str, ...], runs: int | None, quick: bool, folder: Path, device: str, listing: bool, as_json: bool
) -> None:
    """Compare the store with the limits of this machine, for the rows NAMES or all rows.

    Limit and store alternate; the report has their medians and ratios. The command starts its own nodes and removes
    them. A missed bar is a result, not a failure; wrong bytes are a failure.
    """
    rows = select_rows(names)
    if listing:
        _list(rows, as_json)
        return
    rounds = runs or (QUICK_ROUNDS if quick else ROUNDS)
    measure(rows, RunSettings(rounds=rounds, quick=quick, dir=folder, device=device), as_json)


def measure(rows: Sequence[Row], settings: RunSettings, as_json: bool) -> None:
    """Measure rows, and print a table or JSON.

    Raises:
        BenchFailed: a row failed. The report was printed.
    """
    signal.signal(signal.SIGTERM, _interrupt)  # so that daemons and their memory are removed
    facts = machine()  # before the rows, to record the load of other programs
    results: list[Result] = []
    failed: dict[str, str] = {}
    absent: dict[str, str] = {}
    for row, outcome in run(rows, settings):
        if isinstance(outcome, NotMeasured):
            absent[row.name] = str(outcome)
        elif isinstance(outcome, KVStoreError):
            failed[row.name] = str(outcome)
        else:
            results += outcome
        outcome_text = absent.get(row.name) or ("failed" if row.name in failed else "measured")
        click.echo(f"{row.name}: {outcome_text}", err=True)
    if as_json:
        lines = [asdict(each) for each in results]
        print_json({"machine": facts, "settings": settings, "rows": lines, "failed": failed, "absent": absent})
    else:
        _print(results, settings.quick)
        for name, reason in absent.items():
            click.echo(f"{name}: not measured, {reason}")
    if failed:
        raise BenchFailed("; ".join(f"{name}: {reason}" for name, reason in failed.items()))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _list(rows: Sequence[Row], as_json: bool) -> None:
    if as_json:
        print_json({"rows": [{"name": row.name, "about": row.about, "bar": row.bar_text} for row in rows]})
    else:
        print_table(("row", "bar", "what"), [(row.name, row.bar_text or "-", row.about) for row in rows])


def _print(results: list[Result], quick: bool) -> None:
    if quick:
        click.echo("quick: little data, few rounds; the numbers mean nothing")
    print_table(("row", "limit", "ours", "ratio", "min..max", "bar", "met"), [_line(result) for result in results])


def _line(result: Result) -> tuple[Any, ...]:
    spread = "-"
    if result.ratio_min is not None and result.ratio_max is not None:
        spread = f"{result.ratio_min:.3g}..{result.ratio_max:.3g}"
    return (
        result.name,
        "-" if result.limit is None else _value(result.kind, result.limit),
        _value(result.kind, result.ours),
        "-" if result.ratio is None else f"{result.ratio:.3g}",
        spread,
        result.bar or "-",
        "-" if result.met is None else "yes" if result.met else "NO",
    )


def _value(kind: Kind, value: float) -> str:
    if kind is Kind.SPEED:
        return speed_text(value)
    if kind is Kind.TIMES:
        return f"{value:.3g}"
    return bytes_text(value) if kind is Kind.COUNT else duration_text(value)
