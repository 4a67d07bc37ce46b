"""deploy/grafana/kvstore.json and docs/metrics.md speak of the metrics that a real daemon exports, and of all of them.

``python -m tests.observability.test_dashboard`` writes the table of docs/metrics.md anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.pb import store_pb2 as pb
from kvstore.service.operator.metric_table import METRICS
from kvstore.serving.metric_table import table_text
from tests.helpers.api import Client, address_of, pages_message
from tests.helpers.content import SMALL, chain
from tests.helpers.processes import ROOT, Machine, put
from tests.helpers.scraping import Scrape, serve_http

DASHBOARD = ROOT / "deploy" / "grafana" / "kvstore.json"
PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- end -->\n"

UNUSED: dict[str, str] = {}
"""Families without a panel, and why."""

OF_PROMETHEUS = {"instance", "job"}  # labels that it adds
SELECTOR = re.compile(r"(kvstore_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"[^"]*"')
GROUPED = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")
FUNCTIONS = {
    *("sum", "min", "count", "topk", "rate", "increase", "histogram_quantile", "vector"),
    *("by", "on", "or", "group_left", "le"),
}


def panels() -> list[dict[str, Any]]:
    """All but the rows."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def targets() -> Iterator[tuple[str, str, str]]:
    """(title, expression, legend) of every query."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


@pytest.fixture
def scrape(machine: Machine, tmp_path: Path) -> Scrape:
    """Of a daemon that has everything: both tiers, gRPC, tenants with quotas, pages that left."""
    flags = {"nvme": f"{tmp_path}/disk:16MiB", "listen": "127.0.0.1:0", "quota": "a dram=1MiB"}
    daemon, address = serve_http(machine, dram="16MiB", **flags)
    store = machine.connect("m")
    put(store, 1, 8, salt="a")
    store.cache(SMALL, salt="a").get(chain(1, 9, SMALL, "a"))
    store.evict(pages=2)
    client = Client(address_of(daemon.output()))
    client.call("Lookup", pb.LookupRequest(pages=pages_message(chain(1, 1))))
    client.close()
    return Scrape(address)


def families_of(expression: str) -> set[str]:
    """The families whose series an expression selects."""
    names = {about.exported: about.name for about in METRICS}
    names |= {f"{a.name}_{end}": a.name for a in METRICS if a.kind == "histogram" for end in ("bucket", "sum", "count")}
    return {names.get(name, name) for name in re.findall(r"kvstore_\w+", expression)}


def test_every_query_selects_what_is_exported(scrape: Scrape) -> None:
    exported = {family.name for family in scrape.families}
    series = {name for name, _ in scrape.values}
    labels: dict[str, set[str]] = {}
    for name, pairs in scrape.values:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    by_name = {about.exported: {*about.labels} for about in METRICS}
    for title, expression, legend in targets():
        assert families_of(expression) <= exported, f"{title}: {expression}"
        found = SELECTOR.findall(expression)
        assert len(found) == len(re.findall(r"kvstore_\w+", expression)), f"{title}: all are selected by node"
        known: set[str] = {"le"} if "histogram_quantile" in expression else set()
        for name, matchers in found:
            assert 'instance=~"$instance"' in matchers
            theirs = labels[name] if name in series else by_name[name]  # what has not happened has no series yet
            known |= theirs | OF_PROMETHEUS
            assert {*MATCHER.findall(matchers)} <= theirs | OF_PROMETHEUS, f"{title}: {matchers}"
        grouped = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")} - {""}
        assert grouped <= known, f"{title}: {grouped - known}"
        shown = {*re.findall(r"\{\{(\w+)\}\}", legend)}
        assert shown <= grouped, f"{title}: {legend} shows what is summed away"


def test_every_family_is_in_some_panel_or_unused_for_a_reason() -> None:
    used = {name for _, expression, _ in targets() for name in families_of(expression)}
    assert used.isdisjoint(UNUSED) and used | UNUSED.keys() == {about.name for about in METRICS}


def test_queries_are_promql() -> None:
    """As far as can be told without a server: brackets, functions, and what fits which kind of metric."""
    kinds = {about.exported: about.kind for about in METRICS}
    for title, expression, _ in targets():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), f"{title}: {expression}"
        bare = re.sub(r"\{[^}]*\}|\([\w, ]*\)|\[[^\]]*\]", "", GROUPED.sub("", expression))
        words = {word for word in re.findall(r"[a-z_]+", bare) if not word.startswith("kvstore_")}
        assert words <= FUNCTIONS, f"{title}: {words - FUNCTIONS}"
        for name, kind in kinds.items():
            if re.search(rf"\b{name}\{{", expression):
                over_time = re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[", expression) is not None
                assert over_time == (kind == "counter"), f"{title}: {name} is a {kind}"


def test_the_dashboard_is_whole() -> None:
    document = json.loads(DASHBOARD.read_text())
    every = document["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in every]
    taken: set[tuple[int, int]] = set()
    for x, y, w, h in places:
        cells = {(x + i, y + j) for i in range(w) for j in range(h)}
        assert cells.isdisjoint(taken) and x + w <= 24, "panels do not cover each other"
        taken |= cells
    assert {variable["name"] for variable in document["templating"]["list"]} == {"datasource", "instance"}
    for panel in panels():
        assert panel["title"] and panel["description"].endswith((".", "why.")), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}" and panel["fieldConfig"]["defaults"]["unit"]


def test_the_page_has_every_metric() -> None:
    _, begin, rest = PAGE.read_text().partition(BEGIN)
    assert begin, f"{BEGIN} is missing"
    assert rest.partition(END)[0] == table_text(METRICS) + "\n", "run `python -m tests.observability.test_dashboard`"


if __name__ == "__main__":
    before, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table_text(METRICS) + "\n" + END + after.partition(END)[2])
