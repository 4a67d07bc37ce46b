"""A checkout that was never installed: the same commands, rows and versions as an installation has."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvstore

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Checkout:
    """Python with everything that is installed here but this package, run in another folder.

    Attributes:
        python: the command; ``environment``: what it needs to find the packages and the checkout.
    """

    def __init__(self, site: Path) -> None:
        self.python = [sys.executable, "-S"]
        root = site / "checkout"  # without what an installation leaves in the folder
        root.mkdir()
        for name in ("engine", "kvstore", "pyproject.toml"):
            (root / name).symlink_to(ROOT / name)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(site)])}
        self._site = site
        for folder in {Path(path) for path in sys.path if path.endswith("site-packages")}:
            for entry in folder.iterdir():
                if "kvstore" not in entry.name and not (site / entry.name).exists():
                    (site / entry.name).symlink_to(entry)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments to its end."""
        command, variables = [*self.python, *arguments], self.environment | environment
        return subprocess.run(command, cwd=self._site, env=variables, capture_output=True, text=True, timeout=120)

    def bench(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script of rows, which has to find the checkout on its own."""
        return self.run(str(ROOT / "bench" / "run.py"), *arguments, PYTHONPATH=str(self._site))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("site"))


def test_version_is_that_of_the_project_file(checkout: Checkout) -> None:
    code = "import kvstore; from importlib import metadata; print(kvstore.__version__); metadata.version('kvstore')"
    done = checkout.run("-c", code)
    assert done.stdout == f"{PROJECT['version']}\n" and "PackageNotFoundError" in done.stderr
    assert kvstore.__version__ == PROJECT["version"], "installed, it is the same"
    done = checkout.run("-m", "kvstore", "--version")
    assert (done.returncode, done.stdout) == (0, f"kvstore {PROJECT['version']}\n"), done.stderr


def test_every_command_of_the_engine_is_found(checkout: Checkout) -> None:
    done = checkout.run("-m", "kvstore", "--help")
    assert all(f"  {name} " in done.stdout for name in PROJECT["entry-points"]["kvstore.commands"]), done.stdout
    done = checkout.run("-m", "kvstore", "engine", "--help")
    assert done.returncode == 0 and "--device" in done.stdout, done.stderr


def test_rows_of_the_engine_are_found_by_the_script_of_bench(checkout: Checkout) -> None:
    done = checkout.bench("--list")
    assert done.returncode == 0 and "reuse_dram" in done.stdout and "decode_step_1" in done.stdout, done.stderr


def test_daemon_starts_and_logs_its_version(checkout: Checkout, tmp_path: Path) -> None:
    command = [*checkout.python, "-m", "kvstore", "serve", "--dram", "4MiB", "--shm-dir", str(tmp_path)]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": checkout.environment}
    with subprocess.Popen([*command, "--log-format", "json"], **settings) as node:  # type: ignore[call-overload]
        ready = node.stdout.readline()
        node.terminate()
        errors = node.communicate(timeout=60)[1]
    assert " ready: " in ready and node.returncode == 0, errors
    assert f'"version": "{PROJECT["version"]}"' in errors, errors
