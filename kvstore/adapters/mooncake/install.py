"""``python -m kvstore.adapters.mooncake.install``: let ``import mooncake.store`` find this adapter.

It writes one file into site-packages, which names a folder of this package; ``--remove`` deletes it. Nothing is written
where Mooncake itself is installed. ``--path`` prints the folder, for PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

import click

SHIM = Path(__file__).parent / "shim"
FILE = "kvstore_mooncake.pth"


@click.command()
@click.option("--remove", is_flag=True, help="Take it back.")
@click.option("--path", is_flag=True, help="Print the folder to put on PYTHONPATH, and change nothing.")
@click.option("--site", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to; site-packages.")
def install(remove: bool, path: bool, site: Path | None) -> None:
    """Let `import mooncake.store` find kvstore's adapter, in this Python environment."""
    target = (site or Path(sysconfig.get_paths()["purelib"])) / FILE
    if path:
        click.echo(SHIM)
    elif remove:
        was_there = target.exists()
        target.unlink(missing_ok=True)
        click.echo(f"removed {target}" if was_there else f"{target} is not there")
    else:
        if (real := other_mooncake()) is not None:
            raise click.ClickException(f"Mooncake is installed in {real}: uninstall it first, or keep using it")
        target.write_text(f"{SHIM}\n")
        click.echo(f"wrote {target}: `import mooncake.store` is kvstore's adapter now; --remove takes it back")


def other_mooncake() -> Path | None:
    """Where ``import mooncake`` finds another package than ours."""
    spec = importlib.util.find_spec("mooncake")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    return next((place for place in places if place.resolve() != (SHIM / "mooncake").resolve()), None)


if __name__ == "__main__":
    install()
