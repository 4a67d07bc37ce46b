"""Board: the columns that a decision reads about the engines of one model; one array operation covers all engines.

What is known of an engine is in its ``FleetEngine``. ``EngineFleet`` copies it here whenever it changes.

Engine speeds are measured, so they are noisy. Among engines that differ by no more than that noise, one would always
look a little faster and attract all requests while the fleet is idle. So ``Paces`` treats an engine within ``NOISE`` of
the median as equal to it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.conductor.state.fleet import FleetEngine
from engine.conductor.state.names import NumberedNames
from engine.model.request import Role

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
"""Indices of engines in a board, or in a selection from it."""
Distances = npt.NDArray[np.int64]
"""0: on one host; 1: in one zone; 2: further."""


NOISE: Final = 0.25  # as a fraction of the measurement


class Paces(NamedTuple):
    """How fast engines are, with noise removed, in columns. See ``FleetEngine``."""

    tokens_per_s: Floats
    scale: Floats
    alone_s: Floats

    @classmethod
    def of(cls, columns: Columns) -> Paces:
        """Paces from the measurements of these engines."""
        return cls(*(_but_for_noise(each) for each in (columns.tokens_per_s, columns.scale, columns.alone_s)))


class Columns:
    """Columns with one entry for each engine. Counts and flags are floats here as well.

    Attributes:
        first_done_s, behind_s, others_waiting, others_running, others_tokens, place_free_s, tokens, scale,
        tokens_per_s, alone_s, egress_free_s: see ``FleetEngine``.
        running: our requests that it answers or will answer.
        open_s: when it may get requests; never while it drains or its role is unsure.
        prefills, answers: what it does. ``silent``: see ``FleetEngine``.
        node, layout, host, zone: numbers; -1: none, or not known.
        page_tokens, kv_bytes, batch_max, chunk_tokens, tokens_max, kv_tokens_max, context_max, lanes, egress, foreign:
            see ``EngineAbout``; infinite where that says 0 for what is not known.
        page_bytes: of a page.
    """

    CHANGING = 16  # the first columns; the others are what the engine says of itself

    def __init__(self, values: Floats) -> None:
        self.values = values
        (
            self.first_done_s,
            self.behind_s,
            self.others_waiting,
            self.others_running,
            self.others_tokens,
            self.place_free_s,
            self.running,
            self.tokens,
            self.scale,
            self.tokens_per_s,
            self.alone_s,
            self.open_s,
            self.silent,
            self.prefills,
            self.answers,
            self.egress_free_s,
            self.node,
            self.layout,
            self.host,
            self.zone,
            self.page_tokens,
            self.kv_bytes,
            self.batch_max,
            self.chunk_tokens,
            self.tokens_max,
            self.kv_tokens_max,
            self.context_max,
            self.lanes,
            self.egress,
            self.page_bytes,
            self.foreign,
        ) = values


class Board:
    """The engines of one model.

    Attributes:
        engines: in the order of their names.
        layouts: of all of them.
        mixed: True when no two of them can hand over to each other.
    """

    def __init__(self, engines: list[FleetEngine], nodes: NumberedNames, where: NumberedNames) -> None:
        self.engines = sorted(engines, key=lambda engine: engine.about.name)
        self.layouts = sorted({engine.about.layout for engine in engines})
        self.mixed = len(self.layouts) > 1 or any(engine.about.foreign for engine in engines)
        self._places = {engine.about.name: place for place, engine in enumerate(self.engines)}
        abouts = [engine.about for engine in self.engines]
        fixed = [
            (
                nodes.number(about.node),
                self.layouts.index(about.layout),
                where.number(about.host),
                where.number(about.zone),
                about.page_tokens,
                about.kv_bytes,
                about.batch_max,
                about.chunk_tokens or math.inf,
                about.tokens_max or math.inf,
                about.kv_tokens_max or math.inf,
                about.context_max or math.inf,
                about.lanes,
                about.egress_bytes_per_s,
                about.page_tokens * about.kv_bytes,
                about.foreign,
            )
            for about in abouts
        ]
        changing = [self._row(engine) for engine in self.engines]
        self._all = np.arange(len(self.engines))
        self.columns = Columns(np.concatenate([np.array(changing).T, np.array(fixed, np.float64).T]))
        self._fits = np.minimum(self.columns.tokens_max, self.columns.context_max)
        self._fits_max = float(self._fits.max())
        places = [(where.number(about.host), where.number(about.zone)) for about in abouts]
        self._apart: dict[tuple[int, int], Distances] = {}  # from the host and zone of engines and of nodes
        self._between = np.array([self.apart(*place) for place in places])
        self._paces: Paces | None = None  # made when it is asked for

    def write(self, engine: FleetEngine) -> None:
        """Copy the current state of an engine into the columns."""
        columns, place = self.columns, self._places[engine.about.name]
        pace = columns.tokens_per_s[place], columns.scale[place], columns.alone_s[place]
        if pace != (engine.tokens_per_s, engine.scale, engine.alone_s):
            self._paces = None
        columns.values[: Columns.CHANGING, place] = self._row(engine)

    @staticmethod
    def _row(engine: FleetEngine) -> tuple[float, ...]:
        return (
            engine.first_done_s,
            engine.behind_s,
            engine.others_waiting,
            engine.others_running,
            engine.others_tokens,
            engine.place_free_s,
            len(engine.ends),
            engine.tokens,
            engine.scale,
            engine.tokens_per_s,
            engine.alone_s,
            math.inf if engine.draining or engine.unsure else engine.avoided_until_s,
            engine.silent,
            engine.role is not Role.DECODE,
            engine.role is not Role.PREFILL,
            engine.egress_free_s,
        )

    def holds(self, tokens: int) -> bool:
        """True when some engine could hold a sequence of this many tokens."""
        return tokens <= self._fits_max

    def usable(self, tokens: int, barred: tuple[str, ...], without: tuple[str, ...], now_s: float) -> Places:
        """Engines that a request of this many tokens can go to now.


        Engines that are ``barred`` are excluded; those to do ``without`` are used only when there is no other.
        """
        columns = self.columns
        fit = (tokens <= self._fits) & (columns.open_s <= now_s)
        if barred:
            fit[[self._places[name] for name in barred if name in self._places]] = False
        good = fit.copy()
        if without:
            good[[self._places[name] for name in without if name in self._places]] = False
        if good.all():
            return self._all
        for choice in (good, fit):
            if (columns.answers[choice] > 0).any():
                return choice.nonzero()[0]
        return fit.nonzero()[0]

    def take(self, at: Places) -> tuple[list[FleetEngine], Columns, Distances]:
        """Select these engines: their columns, and their distances from each other."""
        if at is self._all:
            return self.engines, self.columns, self._between
        engines = [self.engines[place] for place in at.tolist()]
        return engines, Columns(self.columns.values[:, at]), self._between[:, at][at]

    def paces(self, at: Places) -> Paces:
        """How fast these engines are, with noise removed."""
        if self._paces is None:
            self._paces = Paces.of(self.columns)
        return self._paces if at is self._all else Paces(*(each[at] for each in self._paces))

    def apart(self, host: int, zone: int) -> Distances:
        """How far all engines are from this place."""
        if (host, zone) not in self._apart:
            near = np.where((self.columns.zone == zone) & (zone >= 0), 1, 2)
            self._apart[host, zone] = np.where((self.columns.host == host) & (host >= 0), 0, near)
        return self._apart[host, zone]


def ending_by(engines: list[FleetEngine], moments_s: Iterable[float], now_s: float) -> Floats:
    """How many of each engine's requests will end between now and its moment. Requests that should have ended by now
    are assumed to stay: they are late, and sending more because of them would make them later.
    """
    ends = [engine.ends for engine in engines]
    until = np.fromiter(map(bisect_right, ends, moments_s), np.float64, len(engines))
    return until - np.fromiter(map(bisect_right, ends, repeat(now_s)), np.float64, len(engines))


def _but_for_noise(values: Floats) -> Floats:
    """Replace values near the median by the median; 0 means not known."""
    known = np.sort(values[values > 0])
    if not len(known):
        return values.copy()
    middle = known[len(known) // 2]
    return np.where(np.abs(values - middle) <= NOISE * middle, middle, values)
