"""``kvstore demo``: a node, a writer and a reader on this machine, driven by a request trace.

The node is killed with -9 half way and started again; the reader goes on meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

import kvstore
from engine.demo_peer import MODELS, layout_of
from engine.simulator.generate import conversations
from engine.simulator.trace import read_trace, write_trace
from kvstore.cli.output import bytes_text, json_option, print_json, ratio_text, speed_text, table_text
from kvstore.config import parse_size
from kvstore.errors import NodeUnavailable

REQUESTS = 14
RATE = 0.03  # requests per second of trace time: so slow that conversations come back within a few requests
SEED = 1
ANSWER_S = 60.0
STOP_S = 10.0


class Process:
    """A child that answers lines with JSON lines. Ends with the ``with`` of ``started``."""

    def __init__(self, *arguments: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def line(self, timeout_s: float = ANSWER_S) -> str:
        """Its next line. Raises NodeUnavailable where it ended or said nothing in time."""
        assert self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], timeout_s)
        text = self.child.stdout.readline() if ready else ""
        if not text:
            raise NodeUnavailable(f"process {self.child.pid} did not answer within {timeout_s:g} s")
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
@click.option("--requests", default=REQUESTS, show_default=True, help="How many requests of it.")
@click.option("--model", type=click.Choice(tuple(MODELS)), default="qwen2.5-0.5b", show_default=True)
@click.option("--dram", default="1536MiB", show_default=True, help="Capacity of the node.")
@json_option
def demo(trace: str | None, requests: int, model: str, dram: str, as_json: bool) -> int:
    """Start a node, a writer and a reader; show what is reused.

    Every prompt's pages are put by one process and read by another; each byte is checked against what its key says.
    """
    parse_size(dram, "dram")
    name = f"demo-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder, ExitStack() as stack:
        path = Path(folder) / "trace.jsonl"
        source = read_trace(trace, requests) if trace else conversations(requests, rate=RATE, seed=SEED)
        count = write_trace(path, itertools.islice(source, requests))
        serve = ("kvstore", "serve", "--name", name, "--dram", dram)
        stack.callback(_purge, name)
        node = stack.enter_context(started(*serve))
        lines = [node.line()]
        writer, reader = (
            stack.enter_context(started("engine.demo_peer", role, name, str(path), model))
            for role in ("writer", "reader")
        )
        rows: list[dict[str, Any]] = []
        for number in range(count):
            if number == count // 2:
                node, ready, took = _kill_and_restart(stack, node, serve, reader, number)
                lines += [f"killed with -9 before request {number}, serves again after {took:.2f} s", ready]
            rows.append({"request": number, "written": writer.ask(number), "read": reader.ask(number)})
        with kvstore.connect(name) as store:
            stats = store.stats()
    result = _summary(rows, stats, model, lines)
    if as_json:
        print_json(result)
    else:
        _print(result)
    return 0 if result["bytes_right"] else 1


def _kill_and_restart(
    stack: ExitStack, node: Process, serve: tuple[str, ...], reader: Process, number: int
) -> tuple[Process, str, float]:
    """kill -9 the node, read a prompt while it is gone, start it again. Returns (node, its line, seconds without)."""
    os.kill(node.child.pid, signal.SIGKILL)
    node.child.wait(STOP_S)
    began = time.perf_counter()
    if number and not reader.ask(number - 1)["pages"]:
        raise NodeUnavailable("the reader found nothing while the node was down")
    again = stack.enter_context(started(*serve))
    ready = again.line()
    return again, ready, time.perf_counter() - began


def _purge(name: str) -> None:
    subprocess.run([sys.executable, "-m", "kvstore", "purge", name], stdout=subprocess.DEVNULL, timeout=60, check=False)


def _summary(rows: list[dict[str, Any]], stats: dict[str, Any], model: str, lines: list[str]) -> dict[str, Any]:
    read_s = sum(row["read"]["seconds"] for row in rows)
    memcpy_s = sum(row["read"]["memcpy_seconds"] for row in rows)
    return {
        "model": model,
        "page_bytes": layout_of(model).page_bytes,
        "node": lines,
        "requests": rows,
        "pages": sum(row["written"]["pages"] for row in rows),
        "pages_reused": sum(row["written"]["reused_pages"] for row in rows),
        "pages_stored": sum(row["written"]["stored_pages"] for row in rows),
        "pages_read": sum(row["read"]["pages"] for row in rows),
        "bytes_read": sum(row["read"]["bytes"] for row in rows),
        "bytes_right": all(row["read"]["right"] for row in rows),
        "read_to_memcpy": memcpy_s / read_s if read_s else 0.0,
        "tiers": stats["tiers"],
    }


def _print(result: dict[str, Any]) -> None:
    for line in result["node"]:
        click.echo(line)
    click.echo(f"pages of {result['model']}: 64 tokens, {bytes_text(result['page_bytes'])}\n")
    headers = ["request", "tokens", "pages", "reused", "stored", "put", "read", "get", "of memcpy", "bytes"]
    rows = []
    for row in result["requests"]:
        written, read = row["written"], row["read"]
        rows.append(
            [
                row["request"],
                written["tokens"],
                written["pages"],
                written["reused_pages"],
                written["stored_pages"],
                speed_text(written["bytes"] / written["seconds"]) if written["stored_pages"] else "-",
                read["pages"],
                speed_text(read["bytes"] / read["seconds"]) if read["pages"] else "-",
                ratio_text(read["memcpy_seconds"], read["seconds"]),
                "right" if read["right"] else "WRONG",
            ]
        )
    click.echo(table_text(headers, rows))
    dram = result["tiers"]["dram"]
    share = ratio_text(result["pages_reused"], result["pages"])
    click.echo(
        f"\nreused {result['pages_reused']} of {result['pages']} pages ({share}), stored {result['pages_stored']}"
    )
    click.echo(
        f"read {bytes_text(result['bytes_read'])} in another process at {result['read_to_memcpy']:.2f} of memcpy; "
        f"DRAM holds {dram['pages']} pages, {bytes_text(dram['used_bytes'])} of {bytes_text(dram['capacity_bytes'])}"
    )
    click.echo("(a process's first use of a stretch of memory has to map it: `kvstore bench` measures without that)")
