"""``kvstore demo``: its options, and its end in any case."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from engine.compute.presets import PRESETS
from engine.demo.acts import Demo
from engine.demo.fleet import Fleet, FleetPlan
from engine.demo.machine import Interrupts, Machine, MachinePlan
from engine.demo.script import Script, encoder, read_documents, turns
from engine.simulator.generate import conversations
from engine.simulator.trace import read_trace
from kvstore.cli.output import bytes_text, json_option, print_json
from kvstore.config import parse_size
from kvstore.errors import InvalidRequest

MODEL = str(Path(__file__).resolve().parent / "kvstore-docs")  # see its README and ``engine.demo.train``
SHOWN = "the one that comes with it"
REQUESTS = 12
RATE = 0.03  # requests per second of trace time: so slow that conversations come back within a few requests
SEED = 1
DRAM, NVME = "12MiB", "512MiB"  # 56 pages of the default model, and more than 2000 of them
SPARE_BYTES = 64 << 20  # left free in the folder of the NVMe file
FOLDER = "/var/tmp"  # a disk, where /tmp may be memory


@click.command()
@click.option("--model", default=MODEL, show_default=SHOWN, help=f"A model's folder, or {', '.join(PRESETS)}.")
@click.option("--requests", type=click.IntRange(2), default=REQUESTS, show_default=True, help="How many are asked.")
@click.option(
    "--nodes", type=click.IntRange(1, 9), default=1, show_default=True, help="More than one: a pool of nodes."
)
@click.option("--trace", metavar="FILE", help="Conversations as in this trace, in Mooncake's JSONL format, scaled.")
@click.option("--documents", metavar="FOLDER", help="What is asked about: *.md.  [default: kvstore's own]")
@click.option("--dram", metavar="SIZE", default=DRAM, show_default=True, help="Capacity of the node's DRAM.")
@click.option("--nvme", metavar="SIZE", default=NVME, show_default=True, help="Size of its NVMe file.")
@click.option("--folder", default=FOLDER, show_default=True, help="Where that file lies; it is removed at the end.")
@json_option
def demo(
    model: str,
    requests: int,
    nodes: int,
    trace: str | None,
    documents: str | None,
    dram: str,
    nvme: str,
    folder: str,
    as_json: bool,
) -> int:
    """Start a node, a prefill and a decode engine; ask them; show what is reused, and from which tier.

    Several users ask about the same documents, turn by turn. Every prompt is answered with the pool and without it.
    The node is killed with -9 half way. At the end shared memory is emptied, as by a restart of the machine.

    With --nodes 3 there are three nodes in one pool, and an engine on each of two of them. What one has computed the
    other reads, while daemon and data server of that node are killed and started again.

    Exit code 1 where an answer with the pool is not the one without.
    """
    dram_bytes, nvme_bytes = parse_size(dram, "dram"), parse_size(nvme, "nvme")
    _check_model(model)
    _check_folder(folder, nvme_bytes)
    texts = read_documents(Path(documents) if documents else None)
    source = read_trace(trace, requests) if trace else conversations(requests, rate=RATE, seed=SEED)
    asked = turns(source)
    if len(asked) < 2:
        raise InvalidRequest("trace", "has fewer than two requests")

    def say(text: str, nl: bool = True) -> None:
        if not as_json:
            click.echo(text, nl=nl)
            sys.stdout.flush()

    script = Script(texts, encoder(None if model in PRESETS else model))
    interrupts = Interrupts()
    with interrupts.handled(), ExitStack() as stack:
        with interrupts.held():
            # Sockets have short paths only, so they do not lie in a folder that users choose.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=folder)))
        name = f"demo-{os.getpid()}"
        if nodes > 1:
            fleet = Fleet(FleetPlan(name, place, model, nodes, dram_bytes), script, interrupts, say)
            stack.callback(fleet.close)
            result = fleet.run()
        else:
            plan = MachinePlan(name, place, disk / "nvme", model, dram_bytes, nvme_bytes)
            machine = Machine(plan, interrupts)
            stack.callback(machine.close)
            result = Demo(machine, script, say).run(asked)
    if as_json:
        print_json(result)
    return 0 if result["same_answers"] else 1


def _check_model(model: str) -> None:
    """What is no model is said at once, and not when a node and two engines have been started."""
    if model not in PRESETS and not Path(model).is_dir():
        raise InvalidRequest("model", f"{model!r} is no preset and no folder here; presets are {', '.join(PRESETS)}")


def _check_folder(folder: str, nvme_bytes: int) -> None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise InvalidRequest("folder", f"{folder}: {error.strerror}") from None
    if free < nvme_bytes + SPARE_BYTES:
        needed = f"the NVMe file needs {bytes_text(nvme_bytes)}, {folder} has {bytes_text(free)} free"
        raise InvalidRequest("folder", f"{needed}; another --folder, or a smaller --nvme, will do")
