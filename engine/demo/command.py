"""The command ``kvstore demo``: its options, the checks before the start, and the exit code."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from engine.compute.presets import PRESETS
from engine.demo.acts import Demo, encoder, read_documents
from engine.demo.machine import Interrupts, Machine, MachinePlan
from kvstore.cli.output import bytes_text, json_option, print_json
from kvstore.config import parse_size
from kvstore.errors import InvalidRequest

MODEL: Final = Path(__file__).resolve().parent / "kvstore-docs"
DRAM, NVME = "12MiB", "512MiB"  # 56 pages and more than 2000 pages of the default model
SPARE_BYTES: Final = 64 << 20  # must stay free in the folder of the NVMe file
FOLDER: Final = "/var/tmp"  # on a disk; /tmp may be in memory


@click.command()
@click.option(
    "--model",
    default=str(MODEL),
    show_default="the model that is part of kvstore",
    help=f"A model's folder, or {', '.join(PRESETS)}.",
)
@click.option("--documents", metavar="FOLDER", help="A folder with documents (*.md).  [default: kvstore's own]")
@click.option("--dram", metavar="SIZE", default=DRAM, show_default=True, help="Capacity of the node's DRAM.")
@click.option("--nvme", metavar="SIZE", default=NVME, show_default=True, help="Size of the node's NVMe file.")
@click.option(
    "--folder", default=FOLDER, show_default=True, help="Folder for the NVMe file. The file is removed at the end."
)
@json_option
def demo(model: str, documents: str | None, dram: str, nvme: str, folder: str, as_json: bool) -> int:
    """Start a node, two engines and a conductor, and show which tokens of conversations are reused from which tier.

    Several users ask about the same documents, turn by turn. Every prompt is answered with the pool and without it.
    Half way, the node is killed with -9. At the end, shared memory is emptied, as by a restart of the machine.

    The exit code is 1 if an answer with the pool differs from the answer without it.
    """
    dram_bytes, nvme_bytes = parse_size(dram, "dram"), parse_size(nvme, "nvme")
    if model not in PRESETS and not Path(model).is_dir():
        raise InvalidRequest("model", f"must be a folder, or one of {', '.join(PRESETS)} (got {model!r})")
    _check_folder(folder, nvme_bytes)
    texts = read_documents(Path(documents) if documents else None)

    def say(text: str, nl: bool = True) -> None:
        if not as_json:
            click.echo(text, nl=nl)
            sys.stdout.flush()

    interrupts = Interrupts()
    with interrupts.handled(), ExitStack() as stack:
        with interrupts.deferred():
            # The path of a socket must be short, so sockets are not in the folder that the user chose.
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=folder)))
        plan = MachinePlan(f"demo-{os.getpid()}", work_dir, disk / "nvme", model, dram_bytes, nvme_bytes)
        machine = Machine(plan, interrupts)
        stack.callback(machine.close)
        result = Demo(machine, texts, encoder(None if model in PRESETS else model), say).run()
    if as_json:
        print_json(result)
    return 0 if result["same_answers"] else 1


def _check_folder(folder: str, nvme_bytes: int) -> None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise InvalidRequest("folder", f"{folder}: {error.strerror}") from None
    if free < nvme_bytes + SPARE_BYTES:
        needed = f"must have {bytes_text(nvme_bytes + SPARE_BYTES)} free for the NVMe file (got {bytes_text(free)})"
        raise InvalidRequest("folder", f"{needed}; use another --folder or a smaller --nvme")
