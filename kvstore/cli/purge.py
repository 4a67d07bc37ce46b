"""``kvstore purge``: removes files that dead nodes left in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvstore.cli.output import json_option, print_json
from kvstore.errors import InvalidRequest
from kvstore.shm.folder import PREFIX, NodeFolder, check_purge, is_own_folder, list_nodes
from kvstore.shm.folder import purge as purge_folder


def shm_dir() -> Path:
    """Return the folder with the nodes of this machine: ``$KVSTORE_SHM_DIR`` or /dev/shm."""
    return Path(os.environ.get("KVSTORE_SHM_DIR", "/dev/shm"))


@click.command()
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Purge every node of yours whose daemon is not running.")
@json_option
def purge(names: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Remove the pages and files of nodes NAMES. A node whose daemon is running is refused."""
    if bool(names) == everything:
        raise InvalidRequest("names", "are needed, or --all")
    for name in names:
        check_purge(NodeFolder(shm_dir(), name).path)
    dead = (name for name, alive in list_nodes(shm_dir()) if not alive)
    purged = names or tuple(name for name in dead if is_own_folder(shm_dir() / f"{PREFIX}{name}"))
    for name in purged:
        purge_folder(shm_dir() / f"{PREFIX}{name}")
    if as_json:
        print_json({"purged": list(purged)})
    else:
        click.echo(f"purged {', '.join(purged)}" if purged else "nothing to purge")
