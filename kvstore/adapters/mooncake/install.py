"""``python -m kvstore.adapters.mooncake.install``: let ``import mooncake.store`` find this adapter.

It writes one file into site-packages that names a folder of this package; ``--remove`` deletes it. It writes nothing if
Mooncake itself is installed. ``--path`` prints the folder, for PYTHONPATH.

A link, or a file of that name that this command did not write, is never overwritten, followed or deleted. All
operations use the folder that was opened first, even if its path changes.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

SHIM = Path(__file__).parent / "shim"
FILE = "kvstore_mooncake.pth"
TEXT_BYTES_MAX = 4200  # of a file that this command wrote: a path and a newline
_END = "/kvstore/adapters/mooncake/shim\n"


@click.command()
@click.option("--remove", is_flag=True, help="Undo the installation.")
@click.option("--path", is_flag=True, help="Print the folder to put on PYTHONPATH, and change nothing.")
@click.option("--site", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to; site-packages.")
def install(remove: bool, path: bool, site: Path | None) -> None:
    """Let `import mooncake.store` find kvstore's adapter, in this Python environment."""
    if path:
        click.echo(SHIM)
        return
    folder = (site or Path(sysconfig.get_paths()["purelib"])).resolve()
    target = folder / FILE
    try:
        with _opened(folder) as where:
            if remove:
                click.echo(f"removed {target}" if _remove(where) else f"{target} does not exist")
                return
            if (real := other_mooncake()) is not None:
                raise click.ClickException(f"Mooncake is installed in {real}: uninstall it first, or keep using it")
            _write(where)
    except FileExistsError as error:
        raise click.ClickException(f"{target}: left unchanged, as another program wrote it ({error})") from error
    except OSError as error:
        raise click.ClickException(f"{target}: {error.strerror}") from error
    click.echo(f"wrote {target}: `import mooncake.store` now imports kvstore's adapter; --remove undoes that")


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield where
    finally:
        os.close(where)


def _write(where: int) -> None:
    """Create the file unless it exists. Raises OSError; FileExistsError if another program wrote it."""
    text = f"{SHIM}\n"
    if (known := _read(where, FILE)) == text:
        return
    if known is not None:
        _remove(where)  # written by another version of this package
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(FILE, flags, 0o644, dir_fd=where), "wb") as file:
        file.write(text.encode())


def _remove(where: int) -> bool:
    """Delete the file; return False if it does not exist. Raises OSError; FileExistsError, without deleting it, if
    another program wrote it."""
    if _read(where, FILE) is None:
        return False
    # Rename it first, so that the file that is checked is the one that is deleted.
    aside = f".{FILE}.{secrets.token_hex(8)}"
    os.rename(FILE, aside, src_dir_fd=where, dst_dir_fd=where)
    try:
        _read(where, aside)
    except FileExistsError:
        os.rename(aside, FILE, src_dir_fd=where, dst_dir_fd=where)
        raise
    os.unlink(aside, dir_fd=where)
    return True


def _read(where: int, name: str) -> str | None:
    """Return the text of the file; None if it does not exist. Raises OSError; FileExistsError if another program wrote
    it."""
    try:
        kind = os.stat(name, dir_fd=where, follow_symlinks=False).st_mode
        if not stat.S_ISREG(kind):
            raise FileExistsError("not a regular file")
        # It may have become a link or a pipe since: do not follow or wait for these.
        with open(
            os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=where), "rb"
        ) as file:
            data = file.read(TEXT_BYTES_MAX)
    except FileNotFoundError:
        return None
    text = data.decode(errors="replace")
    if not text.endswith(_END) or not text.startswith("/") or text.count("\n") != 1:
        raise FileExistsError("unknown contents")
    return text


def other_mooncake() -> Path | None:
    """Return where ``import mooncake`` finds another package than this adapter; None if it does not."""
    spec = importlib.util.find_spec("mooncake")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    return next((place for place in places if place.resolve() != (SHIM / "mooncake").resolve()), None)


if __name__ == "__main__":
    install()
