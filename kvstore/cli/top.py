"""``kvstore top``: a live view of one node, or of all members of a pool."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import json_option, print_json
from kvstore.cli.top_frame import document
from kvstore.cli.top_frame import lines as node_lines
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable

Lines = Callable[[dict[str, Any], str], list[str]]
"""A frame for people; the text is the time of day."""

INTERVAL_S = 2.0
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0


@click.command()
@node_option
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(INTERVAL_S_MIN, INTERVAL_S_MAX),
    default=INTERVAL_S,
    show_default=True,
    help="Seconds between two frames.",
)
@click.option("--once", is_flag=True, help="Print one frame, whose rates are those of one interval, and end.")
@click.option("--catalog", metavar="URL", help="Watch a whole pool instead: file:PATH, etcd://HOST:PORT,...")
@click.option("--pool", default="default", show_default=True, help="Which pool of that catalog.")
@json_option
def top(node: str | None, interval_s: float, once: bool, catalog: str | None, pool: str, as_json: bool) -> None:
    """Watch a node: capacity, hits, operations and their latencies, what leaves and moves, tenants, clients, queues.

    With --catalog, all nodes, engines and conductors of a pool, a line each.

    Rates are those of the last interval. Ends with q or Ctrl-C. Where stdout is not a terminal, frames are printed one
    after the other (with --json one document per line).
    """
    if math.isnan(interval_s):
        raise InvalidRequest("--interval", "must be seconds, not nan")
    if catalog is not None:
        if node is not None:
            raise InvalidRequest("--node", "is one node; --catalog is about all of a pool")
        from kvstore.cli.top_pool import PoolWatch, lines  # only here: it loads gRPC

        with PoolWatch(catalog, pool) as watch:
            _show(watch.frames(), lines, interval_s, once, as_json)
        return
    with kvstore.connect(node) as store:
        _show(_frames(store.stats, store.name), node_lines, interval_s, once, as_json)


def _frames(stats: Callable[[], dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """A frame each time one is asked for. A node that stops answering is asked again."""
    before, then = stats(), time.monotonic()
    yield document(before, None, 0.0)
    last = before if "clients" in before else None
    while True:
        try:
            now, when = stats(), time.monotonic()
        except (NodeUnavailable, DeadlineExceeded) as error:
            last = None
            yield {"name": name, "state": "no answer", "error": str(error)}
            continue
        yield document(now, last, when - then)
        last, then = now if "clients" in now else None, when


def _show(frames: Iterator[dict[str, Any]], lines: Lines, interval_s: float, once: bool, as_json: bool) -> None:
    """One frame with rates, or one after the other until the user ends it."""
    if once:
        next(frames)
        time.sleep(interval_s)
        frame = next(frames)
        print_json(frame) if as_json else click.echo("\n".join(lines(frame, _clock())))
    elif as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        for frame in frames:
            click.echo(json.dumps(frame) if as_json else "\n".join([*lines(frame, _clock()), ""]))
            sys.stdout.flush()
            time.sleep(interval_s)
    else:
        first = next(frames)  # a node or a catalog that does not answer is an error on the terminal as it was
        with _keys() as interrupted, Live(console=Console(), screen=True, auto_refresh=False) as live:
            _draw(first, frames, lines, interval_s, live, interrupted)


def _draw(
    frame: dict[str, Any],
    frames: Iterator[dict[str, Any]],
    lines: Lines,
    interval_s: float,
    live: Live,
    interrupted: threading.Event,
) -> None:
    """Redraw in place until q is pressed, or the terminal is gone."""
    due = time.monotonic()
    while not interrupted.is_set():
        live.update(Text("\n".join(lines(frame, _clock())), no_wrap=True, overflow="crop"), refresh=True)
        due = max(due + interval_s, time.monotonic())
        while (remaining_s := due - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], remaining_s)[0]:
                typed = os.read(sys.stdin.fileno(), 64)
                if not typed or b"q" in typed.lower():
                    return
        frame = next(frames)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _keys() -> Iterator[threading.Event]:
    """Keys arrive one by one inside, and SIGTERM interrupts as Ctrl-C does. Both also set the event that is yielded: an
    exception that meets the interpreter in a finalizer is lost there."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    interrupted = threading.Event()

    def end(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        tty.setcbreak(fd)
        yield interrupted
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
