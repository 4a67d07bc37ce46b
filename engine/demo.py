"""``kvstore demo``: a node, a writer and a reader on this machine, driven by a request trace, in two acts.

1. DRAM is smaller than the data, so that pages go down to NVMe and come back. Half way the node is killed with -9 and
   started again; the reader goes on meanwhile.
2. The machine restarts: everything in shared memory is gone. What is on NVMe is not.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import kvstore
from engine.demo_peer import MODELS, layout_of
from engine.simulator.generate import conversations
from engine.simulator.trace import read_trace, write_trace
from kvstore.cli.output import bytes_text, json_option, print_json, ratio_text, speed_text
from kvstore.config import parse_size
from kvstore.errors import InvalidRequest, NodeUnavailable

REQUESTS = 14
RATE = 0.03  # requests per second of trace time: so slow that conversations come back within a few requests
SEED = 1
DRAM_PAGES, NVME_PAGES = 384, 1536  # the generated trace stores some 1100
SPARE_BYTES = 64 << 20  # left free in the folder of the NVMe file
FOLDER = "/var/tmp"  # a disk, where /tmp may be memory
ANSWER_S = 60.0
STOP_S = 10.0

HEADERS = ("request", "tokens", "pages", "DRAM", "NVMe", "load", "new", "put", "read", "bytes")
WIDTHS = (7, 6, 5, 5, 5, 10, 5, 10, 10, 5)
MEANING = """\
  DRAM, NVMe   pages of the prompt that the writer found there and loaded, at the speed in `load`
  new, put     pages it made up, and how fast they, and those that were on NVMe only, went into DRAM; where DRAM is
               full, that is as fast as NVMe takes what has to leave
  read, bytes  the prompt read by another process, and whether every byte is what its key says; "part": it was not
               there as a whole, because DRAM cannot hold it"""


class Process:
    """A child that answers lines with JSON lines. Ends with the ``with`` of ``started``."""

    def __init__(self, *arguments: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def line(self, timeout_s: float = ANSWER_S) -> str:
        """Its next line. Raises NodeUnavailable where it ended (it says why itself) or said nothing in time."""
        assert self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], timeout_s)
        if not ready:
            raise NodeUnavailable(f"process {self.child.pid} did not answer within {timeout_s:g} s")
        text = self.child.stdout.readline()
        if not text:
            raise NodeUnavailable(f"process {self.child.pid} ended with {self.child.wait(STOP_S)}")
        return text.strip()

    def ask(self, number: int) -> dict[str, Any]:
        """Its answer about request ``number``."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"{number}\n")
        answer = json.loads(self.line())
        assert isinstance(answer, dict)
        return answer

    def stop(self) -> None:
        """End it, politely first."""
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.child.kill()
        self.child.wait(STOP_S)


@contextmanager
def started(*arguments: str) -> Iterator[Process]:
    """A process that is stopped in any case."""
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.stop()


@click.command()
@click.option("--trace", metavar="FILE", help="A trace in Mooncake's JSONL format.  [default: a generated one]")
@click.option("--requests", type=click.IntRange(1), default=REQUESTS, show_default=True, help="How many of it.")
@click.option("--model", type=click.Choice(tuple(MODELS)), default="qwen2.5-0.5b", show_default=True)
@click.option("--dram", metavar="SIZE", help=f"Capacity of the node's DRAM.  [default: {DRAM_PAGES} pages]")
@click.option("--nvme", metavar="SIZE", help=f"Size of its NVMe file.  [default: room for {NVME_PAGES} pages]")
@click.option("--folder", default=FOLDER, show_default=True, help="Where that file lies; it is removed at the end.")
@json_option
def demo(
    trace: str | None, requests: int, model: str, dram: str | None, nvme: str | None, folder: str, as_json: bool
) -> int:
    """Start a node, a writer and a reader; show what is reused, and from which tier.

    Every prompt's pages are put by one process and read by another; each byte is checked against what its key says.
    The node is killed with -9 half way. At the end its shared memory is emptied, as by a restart of the machine.
    """
    page_bytes = layout_of(model).page_bytes
    dram_bytes = parse_size(dram, "dram") if dram else DRAM_PAGES * page_bytes
    nvme_bytes = parse_size(nvme, "nvme") if nvme else NVME_PAGES * page_bytes * 11 // 10  # headers and tables
    _check_folder(folder, nvme_bytes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the files are removed then, too
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=folder) as place, ExitStack() as stack:
        path = Path(place) / "trace.jsonl"
        source = read_trace(trace, requests) if trace else conversations(requests, rate=RATE, seed=SEED)
        count = write_trace(path, itertools.islice(source, requests))
        if not count:
            raise InvalidRequest("trace", f"{trace} holds no request")
        name = f"demo-{os.getpid()}"
        stack.callback(_purge, name)
        target = f"{Path(place) / 'nvme'}:{nvme_bytes}"
        node = ("--name", name, "--dram", str(dram_bytes), "--nvme", target)
        serve = ("kvstore", "serve", *node, "--log-level", "warning")
        result = Demo(stack, name, serve, path, model, as_json).run(count)
    if as_json:
        print_json(result)
    return 0 if result["bytes_right"] else 1


def _check_folder(folder: str, nvme_bytes: int) -> None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise InvalidRequest("folder", f"{folder}: {error.strerror}") from None
    if free < nvme_bytes + SPARE_BYTES:
        needed = f"the NVMe file needs {bytes_text(nvme_bytes)}, {folder} has {bytes_text(free)} free"
        raise InvalidRequest("folder", f"{needed}; another --folder, or a smaller --nvme, will do")


@dataclass
class Demo:
    """One run. What it starts ends with ``stack``."""

    stack: ExitStack
    name: str
    serve: tuple[str, ...]
    trace: Path
    model: str
    quiet: bool

    def run(self, count: int) -> dict[str, Any]:
        """Both acts, told as they happen; returns everything that was measured."""
        page_bytes = layout_of(self.model).page_bytes
        node, line = self._node()
        writer, reader = self._peer("writer"), self._peer("reader")
        self._say(line)
        self._say(f"pages of {self.model}: 64 tokens, {bytes_text(page_bytes)}\n\n{_row(HEADERS)}")
        rows: list[dict[str, Any]] = []
        kill: dict[str, Any] = {}
        for number in range(count):
            if number == count // 2:
                node, kill = self._kill_and_restart(node, reader, number)
            row = {"request": number, "written": writer.ask(number), "read": reader.ask(number)}
            rows.append(row)
            self._say(_cells(row, page_bytes))
        totals = _totals(rows)
        with kvstore.connect(self.name) as store:
            tiers = store.stats()["tiers"]
        self._say(f"\n{MEANING}\n\n{_summary(totals, tiers)}")
        for process in (writer, reader, node):
            process.stop()
        reboot = self._restart_machine(totals, page_bytes)
        right = [row[part]["right"] for row in rows for part in ("written", "read")]
        right += [part["read"]["right"] for part in (kill, reboot) if part]
        acts = {"kill": kill, "reboot": reboot, "tiers": tiers}
        return {"model": self.model, "page_bytes": page_bytes, "requests": rows, **totals, **acts} | {
            "bytes_right": all(right)
        }

    def _kill_and_restart(self, node: Process, reader: Process, number: int) -> tuple[Process, dict[str, Any]]:
        """kill -9 the node, read all prompts so far while it is gone, start it again."""
        os.kill(node.child.pid, signal.SIGKILL)
        node.child.wait(STOP_S)
        reads = [reader.ask(earlier) for earlier in range(number)]
        read = {name: sum(part[name] for part in reads) for name in ("pages", "dram_pages", "nvme_pages")}
        read["right"] = all(part["right"] for part in reads)
        began = time.perf_counter()
        again, line = self._node()
        took = time.perf_counter() - began
        self._say(
            f"-- kill -9 of the node. Without it the reader reads all prompts so far: {_pages(read)}, "
            f"{_right(read['right'])}\n"
            f"-- {took:.2f} s after it is started again: {line}"
        )
        return again, {"seconds": took, "read": read, "node": line}

    def _restart_machine(self, totals: dict[str, int], page_bytes: int) -> dict[str, Any]:
        """What a restart of the machine does: nothing runs, /dev/shm is empty. Then the same node on the same file."""
        _purge(self.name)
        _, line = self._node()
        with kvstore.connect(self.name) as store:
            cache = store.cache(layout_of(self.model), salt="demo")
            found = [cache.lookup(cache.keys(request.tokens())).pages for request in read_trace(self.trace)]
            kept = store.stats()["tiers"]["nvme"]["pages"]
        best = max(range(len(found)), key=found.__getitem__)
        read = self._peer("reader").ask(best)
        share = f"{sum(found)} of {totals['pages']} ({ratio_text(sum(found), totals['pages'])})"
        self._say(
            "\nThe machine restarts: the node is stopped, its shared memory gone; it starts on the same NVMe file.\n"
            f"{line}\n"
            f"{kept} of the {totals['pages_stored']} pages are there; the same requests would find {share} of theirs.\n"
            f"Request {best} once more: {_pages(read)} at {_speed(read['pages'] * page_bytes, read['seconds'])}, "
            f"every byte {_right(read['right'])}"
        )
        return {"node": line, "pages_kept": kept, "pages_found": sum(found), "request": best, "read": read}

    def _node(self) -> tuple[Process, str]:
        node = self.stack.enter_context(started(*self.serve))
        return node, node.line()

    def _peer(self, role: str) -> Process:
        return self.stack.enter_context(started("engine.demo_peer", role, self.name, str(self.trace), self.model))

    def _say(self, text: str) -> None:
        if not self.quiet:
            click.echo(text)


def _purge(name: str) -> None:
    subprocess.run([sys.executable, "-m", "kvstore", "purge", name], stdout=subprocess.DEVNULL, timeout=60, check=False)


def _totals(rows: list[dict[str, Any]]) -> dict[str, int]:
    written, read = [row["written"] for row in rows], [row["read"] for row in rows]
    return {
        "pages": sum(part["pages"] for part in written),
        "pages_reused_dram": sum(part["dram_pages"] for part in written),
        "pages_reused_nvme": sum(part["nvme_pages"] for part in written),
        "pages_stored": sum(part["stored_pages"] for part in written),
        "pages_read": sum(part["pages"] for part in read),
    }


def _summary(totals: dict[str, int], tiers: dict[str, Any]) -> str:
    dram, nvme = totals["pages_reused_dram"], totals["pages_reused_nvme"]
    holds = (
        f"{about['pages']} pages in {bytes_text(about['capacity_bytes'])} {tier}"
        for tier, about in (("DRAM", tiers["dram"]), ("NVMe", tiers["nvme"]))
    )
    return (
        f"reused {dram + nvme} of {totals['pages']} pages ({ratio_text(dram + nvme, totals['pages'])}): "
        f"{dram} from DRAM, {nvme} from NVMe; new {totals['pages_stored']}\n"
        f"now there are {' and '.join(holds)} (a page may be in both)"
    )


def _cells(row: dict[str, Any], page_bytes: int) -> str:
    written, read = row["written"], row["read"]
    loaded = written["dram_pages"] + written["nvme_pages"]
    cells = (
        row["request"],
        written["tokens"],
        written["pages"],
        written["dram_pages"],
        written["nvme_pages"],
        _speed(loaded * page_bytes, written["load_seconds"]),
        written["stored_pages"],
        _speed((written["pages"] - written["dram_pages"]) * page_bytes, written["put_seconds"]),
        _speed(read["pages"] * page_bytes, read["seconds"]),
        _right(written["right"] and read["right"], read["pages"] == written["pages"]),
    )
    return _row(cells)


def _row(cells: Sequence[object]) -> str:
    return "  ".join(str(cell).rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def _pages(read: dict[str, Any]) -> str:
    """``224 pages (120 DRAM, 104 NVMe)``."""
    return f"{read['pages']} pages ({read['dram_pages']} DRAM, {read['nvme_pages']} NVMe)"


def _speed(size_bytes: int, seconds: float) -> str:
    return speed_text(size_bytes / seconds) if size_bytes else "-"


def _right(right: bool, whole: bool = True) -> str:
    return ("right" if whole else "part") if right else "WRONG"
