"""Dashboards in deploy/grafana and docs/metrics.md speak of the metrics that real daemons export, and of all of them.

``python -m tests.observability.test_dashboard`` writes the table of docs/metrics.md anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.api.metrics import METRICS as ENGINE_METRICS
from engine.conductor.shell.metrics import METRICS as CONDUCTOR_METRICS
from kvstore.node.operator.metrics import METRICS as NODE_METRICS
from kvstore.pb import store_pb2 as pb
from kvstore.server.metrics import MetricInfo, table_text
from tests.helpers.api import Client, address_of, pages_message
from tests.helpers.conductors import serve_conductor
from tests.helpers.content import SMALL, chain
from tests.helpers.engines.processes import prompt, serve_engine
from tests.helpers.processes import ROOT, Machine, put
from tests.helpers.scraping import Scrape, serve_http

DASHBOARDS = ROOT / "deploy" / "grafana"
PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Dashboard:
    """A dashboard, the metrics of the daemons that it is about, and those of them without a panel, and why."""

    file: str
    metrics: Sequence[MetricInfo]
    unused: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """As Grafana reads it."""
        found: dict[str, Any] = json.loads((DASHBOARDS / self.file).read_text())
        return found

    @property
    def panels(self) -> list[dict[str, Any]]:
        """All but the rows."""
        return [panel for panel in self.document["panels"] if panel["type"] != "row"]

    def targets(self) -> Iterator[tuple[str, str, str]]:
        """(title, expression, legend) of every query."""
        for panel in self.panels:
            for target in panel["targets"]:
                yield panel["title"], target["expr"], target["legendFormat"]

    def families_of(self, expression: str) -> set[str]:
        """The families whose series an expression selects."""
        names = {about.exported: about.name for about in self.metrics}
        for about in self.metrics:
            if about.kind == "histogram":
                names |= {f"{about.name}_{end}": about.name for end in ("bucket", "sum", "count")}
        return {names.get(name, name) for name in re.findall(r"kvstore_\w+", expression)}


OF_NODES = Dashboard("kvstore.json", NODE_METRICS)
OF_ENGINES = Dashboard("kvstore-engines.json", ENGINE_METRICS)
OF_CONDUCTORS = Dashboard("kvstore-conductors.json", CONDUCTOR_METRICS)
EVERY = {"nodes": OF_NODES, "engines": OF_ENGINES, "conductors": OF_CONDUCTORS}

OF_PROMETHEUS = {"instance", "job"}  # labels that it adds
SELECTOR = re.compile(r"(kvstore_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"[^"]*"')
GROUPED = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")
FUNCTIONS = {
    *("sum", "min", "max", "count", "topk", "rate", "increase", "histogram_quantile", "vector"),
    *("by", "on", "or", "group_left", "le"),
}


each_one = pytest.mark.parametrize("board", EVERY.values(), ids=EVERY.keys())


def of_node(machine: Machine, tmp_path: Path) -> Scrape:
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


def of_engine(machine: Machine, tmp_path: Path) -> Scrape:
    """Of an engine that has answered."""
    engine = serve_engine(machine, http="127.0.0.1:0")
    with engine.client() as client:
        client.generate(prompt(40), max_tokens=4)
    return Scrape(engine.http)


def of_conductor(machine: Machine, tmp_path: Path) -> Scrape:
    """Of a conductor that nobody has asked anything, and whose engine is not there."""
    return Scrape(serve_conductor(machine, http="127.0.0.1:0", engine="127.0.0.1:1").http)


SCRAPES = {"nodes": of_node, "engines": of_engine, "conductors": of_conductor}


@pytest.mark.parametrize("kind", EVERY)
def test_every_query_selects_what_is_exported(kind: str, machine: Machine, tmp_path: Path) -> None:
    board, scrape = EVERY[kind], SCRAPES[kind](machine, tmp_path)
    exported = {family.name for family in scrape.families}
    series = {name for name, _ in scrape.values}
    labels: dict[str, set[str]] = {}
    for name, pairs in scrape.values:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    by_name = {about.exported: {*about.labels} for about in board.metrics}
    assert exported == {about.name for about in board.metrics}
    for title, expression, legend in board.targets():
        assert board.families_of(expression) <= exported, f"{title}: {expression}"
        found = SELECTOR.findall(expression)
        assert len(found) == len(re.findall(r"kvstore_\w+", expression)), f"{title}: all are selected by node"
        known: set[str] = {"le"} if "histogram_quantile" in expression else set()
        for name, matchers in found:
            assert 'instance=~"$instance"' in matchers
            theirs = (
                labels[name] if name in series else by_name[name.removesuffix("_bucket")]
            )  # what has not happened has no series yet
            known |= theirs | OF_PROMETHEUS
            assert {*MATCHER.findall(matchers)} <= theirs | OF_PROMETHEUS, f"{title}: {matchers}"
        grouped = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")} - {""}
        assert grouped <= known, f"{title}: {grouped - known}"
        shown = {*re.findall(r"\{\{(\w+)\}\}", legend)}
        assert shown <= grouped, f"{title}: {legend} shows what is summed away"


@each_one
def test_every_family_is_in_some_panel_or_unused_for_a_reason(board: Dashboard) -> None:
    used = {name for _, expression, _ in board.targets() for name in board.families_of(expression)}
    assert used.isdisjoint(board.unused) and used | board.unused.keys() == {about.name for about in board.metrics}


@each_one
def test_queries_are_promql(board: Dashboard) -> None:
    """As far as can be told without a server: brackets, functions, and what fits which kind of metric."""
    kinds = {about.exported: about.kind for about in board.metrics}
    for title, expression, _ in board.targets():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), f"{title}: {expression}"
        bare = re.sub(r"\{[^}]*\}|\([\w, ]*\)|\[[^\]]*\]", "", GROUPED.sub("", expression))
        words = {word for word in re.findall(r"[a-z_]+", bare) if not word.startswith("kvstore_")}
        assert words <= FUNCTIONS, f"{title}: {words - FUNCTIONS}"
        for name, kind in kinds.items():
            if re.search(rf"\b{name}\{{", expression):
                over_time = re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[", expression) is not None
                assert over_time == (kind == "counter"), f"{title}: {name} is a {kind}"


@each_one
def test_the_dashboard_is_whole(board: Dashboard) -> None:
    document = board.document
    every = document["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in every]
    taken: set[tuple[int, int]] = set()
    for x, y, w, h in places:
        cells = {(x + i, y + j) for i in range(w) for j in range(h)}
        assert cells.isdisjoint(taken) and x + w <= 24, "panels do not cover each other"
        taken |= cells
    assert {variable["name"] for variable in document["templating"]["list"]} == {"datasource", "instance"}
    for panel in board.panels:
        assert panel["title"] and panel["description"].endswith((".", "why.")), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}" and panel["fieldConfig"]["defaults"]["unit"]


def test_dashboards_are_told_apart() -> None:
    documents = [board.document for board in EVERY.values()]
    assert {path.name for path in DASHBOARDS.iterdir()} == {board.file for board in EVERY.values()}
    assert len({document["uid"] for document in documents}) == len({document["title"] for document in documents}) == 3


def test_the_page_has_every_metric() -> None:
    _, begin, rest = PAGE.read_text().partition(BEGIN)
    assert begin, f"{BEGIN} is missing"
    table = table_text(NODE_METRICS) + "\n"
    assert rest.partition(END)[0] == table, "run `python -m tests.observability.test_dashboard`"


if __name__ == "__main__":
    before, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table_text(NODE_METRICS) + "\n" + END + after.partition(END)[2])
