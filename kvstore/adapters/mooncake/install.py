"""``python -m kvstore.adapters.mooncake.install``: let ``import mooncake.store`` find this adapter.

It writes one file into site-packages, which names a folder of this package; ``--remove`` deletes it. Nothing is written
where Mooncake itself is installed. ``--path`` prints the folder, for PYTHONPATH.

A file of that name that this command did not write, or a link, stays as it is: neither overwritten, nor followed, nor
deleted. All of it happens in the one folder that was opened first, whatever becomes of the path to it.
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
TEXT_BYTES_MAX = 4200  # of a file that is ours: a path and a newline
_END = "/kvstore/adapters/mooncake/shim\n"


@click.command()
@click.option("--remove", is_flag=True, help="Take it back.")
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
                click.echo(f"removed {target}" if _remove(where) else f"{target} is not there")
                return
            if (real := other_mooncake()) is not None:
                raise click.ClickException(f"Mooncake is installed in {real}: uninstall it first, or keep using it")
            _write(where)
    except FileExistsError as error:
        raise click.ClickException(f"{target}: was not written by this command, so it stays ({error})") from error
    except OSError as error:
        raise click.ClickException(f"{target}: {error.strerror}") from error
    click.echo(f"wrote {target}: `import mooncake.store` is kvstore's adapter now; --remove takes it back")


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield where
    finally:
        os.close(where)


def _write(where: int) -> None:
    """Create the file, or leave it where it is there already. Raises OSError, FileExistsError for a foreign one."""
    text = f"{SHIM}\n"
    if (known := _read(where, FILE)) == text:
        return
    if known is not None:
        _remove(where)  # of another version of this package
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(FILE, flags, 0o644, dir_fd=where), "wb") as file:
        file.write(text.encode())


def _remove(where: int) -> bool:
    """Delete the file; False: it is not there. Raises OSError, FileExistsError for a foreign one, which stays."""
    if _read(where, FILE) is None:
        return False
    # Under another name first, so that what is looked at is what is deleted.
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
    """The text of the file, which is ours; None: it is not there. Raises OSError, FileExistsError for a foreign one."""
    try:
        kind = os.stat(name, dir_fd=where, follow_symlinks=False).st_mode
        if not stat.S_ISREG(kind):
            raise FileExistsError("it is not a regular file")
        # It may have become a link or a pipe by now: neither is followed or waited for.
        with open(
            os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=where), "rb"
        ) as file:
            data = file.read(TEXT_BYTES_MAX)
    except FileNotFoundError:
        return None
    text = data.decode(errors="replace")
    if not text.endswith(_END) or not text.startswith("/") or text.count("\n") != 1:
        raise FileExistsError("it has other text")
    return text


def other_mooncake() -> Path | None:
    """Where ``import mooncake`` finds another package than ours."""
    spec = importlib.util.find_spec("mooncake")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    return next((place for place in places if place.resolve() != (SHIM / "mooncake").resolve()), None)


if __name__ == "__main__":
    install()
