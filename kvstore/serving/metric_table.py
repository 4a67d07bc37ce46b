"""What a table of metrics consists of. Each daemon has one: the list of all that it exports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class MetricInfo(NamedTuple):
    """One metric: ``kind`` is counter, gauge or histogram; counters are exported as ``name + "_total"``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def exported(self) -> str:
        """The name Prometheus knows; of a histogram the one without ``_bucket``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def about(prefix: str, kind: str, name: str, help: str, *labels: str) -> MetricInfo:
    """The metric ``<prefix>_<name>``."""
    return MetricInfo(f"{prefix}_{name}", kind, labels, help)


def table_text(metrics: Sequence[MetricInfo]) -> str:
    """The metrics as a table of the docs."""
    rows = [f"| `{about.exported}` | {about.kind} | {', '.join(about.labels)} | {about.help} |" for about in metrics]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


SHED_HELP: Final = (
    "Calls refused because too many come, by what there is too little of: time (late: it would have passed), calls or"
    " share (of one tenant) of rpcs_max, buffers, threads (quick, read, wait), other (what is held);"
    " half_open: they gave way because their request had not come."
)

INTERNAL_ERRORS: Final = about(
    "kvstore",
    "counter",
    "internal_errors",
    "Unexpected errors by the place where they ended, see kvstore/boundary.py: a request, a connection, a turn of a"
    " task. Each is in the log with its stack; places of the node's data server begin with data.",
    "place",
)
"""Every daemon has this one, under this name."""

MEMBERSHIP_AGE: Final = about(
    "kvstore",
    "gauge",
    "membership_success_age_seconds",
    "Time since a task that keeps the daemon in its pool last succeeded: watch, session, presence, election,"
    " election_watch, announcing. None of them takes longer than a few seconds while all is well.",
    "task",
)
MEMBERSHIP_FAILURES: Final = about(
    "kvstore", "counter", "membership_failures", "Tries of these tasks that failed, and were made again.", "task"
)
MEMBERSHIP: Final = (MEMBERSHIP_AGE, MEMBERSHIP_FAILURES)
"""Every daemon has these, under these names, where it is in a pool."""
