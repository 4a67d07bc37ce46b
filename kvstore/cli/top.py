"""``kvstore top``: a live view of one node, or of all members of a pool."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import Any

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import json_option, print_json
from kvstore.cli.top_frame import document
from kvstore.cli.top_frame import lines as node_lines
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable

Lines = Callable[[dict[str, Any], str, int], list[str]]
"""A frame for people: at which time, and how wide."""

INTERVAL_S = 2.0
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0

# Another screen and no cursor; back. At the top; the rest of a line, of the screen.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


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

    Rates are those of the last interval. Ends with q or Ctrl-C. Where stdout is no terminal, frames follow one another
    (with --json one document per line).
    """
    if math.isnan(interval_s):
        raise InvalidRequest("--interval", "must be seconds, not nan")
    if catalog is not None:
        if node is not None:
            raise InvalidRequest("--node", "is one node; --catalog is about all of a pool")
        _watch_pool(catalog, pool, interval_s, once, as_json)
        return
    with kvstore.connect(node) as store:
        if once:
            before, then = store.stats(), time.monotonic()
            time.sleep(interval_s)
            frame = document(store.stats(), before, time.monotonic() - then)
            print_json(frame) if as_json else click.echo("\n".join(node_lines(frame, _clock(), 0)))
            return
        _show(_frames(store.stats, store.name), node_lines, interval_s, as_json)


def _watch_pool(catalog: str, pool: str, interval_s: float, once: bool, as_json: bool) -> None:
    from kvstore.cli.top_pool import PoolWatch, lines  # only here: it loads gRPC

    with PoolWatch(catalog, pool) as watch:
        first = watch.first()  # a catalog that cannot be had is an error
        if not once:
            _show(itertools.chain([first], watch.frames()), lines, interval_s, as_json)
            return
        time.sleep(interval_s)
        frame = next(watch.frames())
        print_json(frame) if as_json else click.echo("\n".join(lines(frame, _clock(), 0)))


def _show(frames: Iterator[dict[str, Any]], lines: Lines, interval_s: float, as_json: bool) -> None:
    """One frame after the other, until somebody ends it."""
    if as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _print(frames, lines, interval_s, as_json)
    else:
        with _screen() as interrupted:
            _draw(frames, lines, interval_s, interrupted)


def _frames(stats: Callable[[], dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """A frame each time one is asked for; a node that does not answer is looked for on."""
    before, then = None, 0.0
    while True:
        try:
            now, when = stats(), time.monotonic()
        except (NodeUnavailable, DeadlineExceeded) as error:
            before = None
            yield {"name": name, "state": "no answer", "error": str(error)}
            continue
        yield document(now, before, when - then)
        before, then = now if "clients" in now else None, when


def _print(frames: Iterator[dict[str, Any]], lines: Lines, interval_s: float, as_json: bool) -> None:
    for frame in frames:
        click.echo(json.dumps(frame) if as_json else "\n".join([*lines(frame, _clock(), 0), ""]))
        sys.stdout.flush()
        time.sleep(interval_s)


def _draw(frames: Iterator[dict[str, Any]], lines: Lines, interval_s: float, interrupted: threading.Event) -> None:
    """Redraw in place until somebody presses q."""
    due = time.monotonic()
    for frame in frames:
        if interrupted.is_set():
            raise KeyboardInterrupt
        columns, rows = shutil.get_terminal_size()
        text = lines(frame, _clock(), columns)[:rows]
        sys.stdout.write(_HOME + "\r\n".join(line + _CLEAR_LINE for line in text) + _CLEAR_BELOW)
        sys.stdout.flush()
        due = max(due + interval_s, time.monotonic())
        if _asked_to_end(due):
            return


def _asked_to_end(until: float) -> bool:
    """Wait until then for q; what else is typed is nothing to us. Nobody can type any more: that ends it too."""
    while (left_s := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or b"q" in typed.lower():
                return True
    return False


@contextlib.contextmanager
def _screen() -> Iterator[threading.Event]:
    """The terminal as it was comes back, however this ends. Yields what Ctrl-C and SIGTERM set beside interrupting: an
    exception that meets the interpreter in a finalizer is lost there."""
    fd = sys.stdin.fileno()
    was = termios.tcgetattr(fd)
    interrupted = threading.Event()

    def end(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    ended_by = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        tty.setcbreak(fd)
        sys.stdout.write(_ENTER)
        yield interrupted
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, was)
        for number, handler in ended_by.items():
            signal.signal(number, handler)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
