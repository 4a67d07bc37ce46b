"""Pictures of simulations, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.simulator.compare import require_plotting
from engine.simulator.plan import ClusterPlan
from engine.simulator.serve import Served
from kvstore.errors import InvalidRequest

TIERS = ("hbm", "dram", "nvme", "remote")


def plot_timeline(served: Sequence[Served], path: Path) -> None:
    """Draw a run over time: each first token, the requests that wait and run, and where prefixes were found.

    Raises:
        InvalidRequest: the file cannot be written, or its format is not supported.
    """
    figure, (first, open_now, found) = _figure(3)
    answered = [each for each in served if not each.refused]
    arrived = np.array([each.arrived_s for each in answered])
    first.plot(arrived, [each.ttft_s for each in answered], ".", markersize=3)
    refused = [each.arrived_s for each in served if each.refused]
    first.plot(refused, np.zeros(len(refused)), "x", color="tab:red", markersize=4, label=f"refused: {len(refused)}")
    first.set(ylabel="time to the first token, s")
    first.legend(fontsize="small")
    for label, begin, end in (("waits or is computed", "arrived_s", "first_s"), ("is answered", "first_s", "end_s")):
        times = [(getattr(each, begin), 1) for each in answered] + [(getattr(each, end), -1) for each in answered]
        times.sort()
        open_now.step(
            [when for when, _ in times], np.cumsum([change for _, change in times]), label=label, where="post"
        )
    open_now.set(ylabel="requests")
    open_now.legend(fontsize="small")
    if answered:
        edges = np.linspace(0.0, max(arrived.max(), 1e-3), 41)
        total = np.maximum(1, np.histogram(arrived, edges, weights=[each.input_tokens for each in answered])[0])
        below = np.zeros(len(total))
        for tier in TIERS:
            tokens = np.histogram(arrived, edges, weights=[each.cached.get(tier, 0) for each in answered])[0]
            found.bar(edges[:-1], tokens / total, np.diff(edges), bottom=below, align="edge", label=tier)
            below = below + tokens / total
    found.set(xlabel="time, s", ylabel="found, share of tokens", ylim=(0, 1))
    found.legend(fontsize="small")
    _save(figure, path)


def plot_plan(plan: ClusterPlan, path: Path) -> None:
    """Draw the goodput of each design, and the memory for a share of the possible hits.

    Raises:
        InvalidRequest: the file cannot be written, or its format is not supported.
    """
    figure, (rates, curve) = _figure(2)
    names = [each.design.name for each in plan.best]
    rates.barh(names, [each.rate for each in plan.best])
    rates.invert_yaxis()
    rates.set(xlabel=f"requests/s within {plan.slo.first_token_s:g} s and {plan.slo.token_s * 1e3:g} ms per token")
    sizes = np.unique(np.geomspace(1, max(2, plan.load.pages), 60).astype(int))
    curve.plot(sizes * plan.spec.page_bytes / 2**30, [plan.load.hit_ratio_of(int(size)) for size in sizes])
    curve.axhline(plan.load.hit_ratio, color="grey", linewidth=1, label="without limit")
    curve.set(xscale="log", xlabel="memory for KV, GiB", ylabel="hits, share of tokens", ylim=(0, None))
    curve.legend(fontsize="small")
    _save(figure, path)


def _figure(rows: int) -> tuple[Any, Any]:
    require_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3 * rows), layout="constrained")
    axes = figure.subplots(rows, 1)
    for each in axes:
        each.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidRequest("plot", f"{path}: {error}") from error
