"""``python -m kvstore.adapters.mooncake.install`` makes ``import mooncake.store`` find this adapter.

The command writes one ``.pth`` file into site-packages, which adds the folder ``shim`` to the import path. ``--remove``
deletes the file. ``--path`` prints the folder, for PYTHONPATH, and writes nothing. If Mooncake itself is installed, the
command refuses.

The command never follows, overwrites or deletes a link, nor a file of that name that it did not write. It opens
site-packages once, and all its operations are relative to that descriptor, even if the path changes.
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
TEXT_BYTES_MAX = 4200  # the longest text that this command writes: a path and a newline
_TEXT_END = "/kvstore/adapters/mooncake/shim\n"


@click.command()
@click.option("--remove", is_flag=True, help="Undo the installation.")
@click.option("--path", is_flag=True, help="Print the folder to put on PYTHONPATH, and change nothing.")
@click.option("--site", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to; site-packages.")
def install(remove: bool, path: bool, site: Path | None) -> None:
    """Make `import mooncake.store` find kvstore's adapter, in this Python environment."""
    if path:
        click.echo(SHIM)
        return
    folder = (site or Path(sysconfig.get_paths()["purelib"])).resolve()
    target = folder / FILE
    try:
        with _open_folder(folder) as folder_fd:
            if remove:
                click.echo(f"removed {target}" if _remove(folder_fd) else f"{target} does not exist")
                return
            if (installed := other_mooncake()) is not None:
                raise click.ClickException(
                    f"Mooncake is installed in {installed}: uninstall it first, or keep using it"
                )
            _write(folder_fd)
    except FileExistsError as error:
        raise click.ClickException(f"{target}: left unchanged, as another program wrote it ({error})") from error
    except OSError as error:
        raise click.ClickException(f"{target}: {error.strerror}") from error
    click.echo(f"wrote {target}: `import mooncake.store` now imports kvstore's adapter; --remove undoes that")


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Open a folder, yield its descriptor, and close it."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def _write(folder_fd: int) -> None:
    """Create the file, or replace one that another version of this package wrote.

    Raises:
        FileExistsError: another program wrote the file. It stays as it is.
        OSError: the file cannot be written.
    """
    text = f"{SHIM}\n"
    if (current_text := _read(folder_fd, FILE)) == text:
        return
    if current_text is not None:
        _remove(folder_fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(FILE, flags, 0o644, dir_fd=folder_fd), "wb") as file:
        file.write(text.encode())


def _remove(folder_fd: int) -> bool:
    """Delete the file. Return False if it does not exist.

    Raises:
        FileExistsError: another program wrote the file. It stays as it is.
        OSError: the file cannot be deleted.
    """
    if _read(folder_fd, FILE) is None:
        return False
    # Rename the file first: another program can no longer replace it between the check and the deletion.
    new_name = f".{FILE}.{secrets.token_hex(8)}"
    os.rename(FILE, new_name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    try:
        _read(folder_fd, new_name)
    except FileExistsError:
        os.rename(new_name, FILE, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        raise
    os.unlink(new_name, dir_fd=folder_fd)
    return True


def _read(folder_fd: int, name: str) -> str | None:
    """Return the text of a file that this command wrote; None if the file does not exist.

    Raises:
        FileExistsError: another program wrote the file.
        OSError: the file cannot be read.
    """
    try:
        mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode):
            raise FileExistsError("not a regular file")
        # The file may have been replaced by a link or a pipe since: do not follow a link or wait for a pipe.
        with open(
            os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd), "rb"
        ) as file:
            data = file.read(TEXT_BYTES_MAX)
    except FileNotFoundError:
        return None
    text = data.decode(errors="replace")
    if not text.endswith(_TEXT_END) or not text.startswith("/") or text.count("\n") != 1:
        raise FileExistsError("unknown contents")
    return text


def other_mooncake() -> Path | None:
    """Return the folder of the package that ``import mooncake`` finds, unless that package is this adapter. Return
    None if ``import mooncake`` finds no other package."""
    spec = importlib.util.find_spec("mooncake")
    paths = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or [spec.origin or ""]]
    return next((path for path in paths if path.resolve() != (SHIM / "mooncake").resolve()), None)


if __name__ == "__main__":
    install()
