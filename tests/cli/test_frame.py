"""The frame of the command line: lazy subcommands, one-line failures, exit codes, and what output looks like."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import numpy as np
import pytest

from kvstore.cli import output
from kvstore.cli.main import COMMANDS, ENTRY_POINT_GROUP, LazyGroup, cli, run
from kvstore.errors import InvalidRequest, NodeUnavailable


def fail_with(error: BaseException) -> click.Command:
    @click.command()
    @click.option("--size", type=int, required=False)
    @click.argument("names", nargs=-1)
    def command(size: int | None, names: tuple[str, ...]) -> None:
        raise error

    return command


def stderr_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, "one line"
    return captured.err.rstrip("\n")


# --- Failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InvalidRequest("dram", "must be more than zero"), 2, "kvstore: dram: must be more than zero"),
        (NodeUnavailable("node: none\nis here"), 1, "kvstore: node: none is here"),
        (click.ClickException("demo: needs torch"), 1, "kvstore: demo: needs torch"),
        (PermissionError(13, "Permission denied", "/x/y"), 1, "kvstore: /x/y: Permission denied"),
    ],
)
def test_failure_is_one_line(error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fail_with(error), []) == code
    assert stderr_of(capsys) == line


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--size", "big"], "kvstore: --size: 'big' is not a whole number"),
        (["--sise", "1"], "kvstore: --sise: no such option; did you mean --size?"),
        (["--size"], "kvstore: --size: Option '--size' requires an argument."),
    ],
)
def test_usage_is_one_line(args: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fail_with(AssertionError("never called")), args) == 2
    assert stderr_of(capsys) == line


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_ctrl_c(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fail_with(error), []) == 130


@pytest.mark.parametrize("error", [AssertionError("ours"), ZeroDivisionError(), OSError(5, "no file named")])
def test_our_own_bugs_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(fail_with(error), [])


def test_exit_codes() -> None:
    @click.command()
    @click.option("--how", default="return")
    @click.pass_context
    def command(ctx: click.Context, how: str) -> int | None:
        if how == "exit":
            ctx.exit(3)
        return 4 if how == "number" else None

    assert run(command, []) == 0
    assert run(command, ["--how", "number"]) == 4
    assert run(command, ["--how", "exit"]) == 3


def test_reader_that_has_gone_is_quiet() -> None:
    script = "import sys\nfrom kvstore.cli import main as m\nimport click\n" + (
        "@click.command()\ndef many():\n    for i in range(100_000): click.echo(i)\nsys.exit(m.run(many, []))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) != 0


# --- Subcommands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LazyGroup:
    """A group of four subcommands: two of its own, one that an entry point adds, one that lacks a module."""
    for name in ("first", "second", "third"):
        source = f"import click\n@click.command()\ndef {name}():\n    click.echo('{name} ran')\n"
        (tmp_path / f"frame_{name}.py").write_text(source)
    (tmp_path / "frame_lacking.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first", "second", "third"):
        monkeypatch.delitem(sys.modules, f"frame_{name}", raising=False)
    added = {
        "third": EntryPoint("third", "frame_third:third", ENTRY_POINT_GROUP),
        "lacking": EntryPoint("lacking", "frame_lacking:lacking", ENTRY_POINT_GROUP),
        "first": EntryPoint("first", "frame_third:third", ENTRY_POINT_GROUP),
    }
    own = {"second": "frame_second:second", "first": "frame_first:first"}
    return LazyGroup(name="kvstore", commands_of=own, added=lambda: added)


def loaded() -> set[str]:
    return {"frame_first", "frame_second", "frame_third", "frame_lacking"} & set(sys.modules)


def test_help_lists_all_and_imports_none(commands: LazyGroup, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(commands, ["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].split()
    assert [word for word in listed if word in ("first", "second", "third", "lacking")] == sorted(
        ["first", "second", "third", "lacking"]
    )
    assert "frame_third)" in listed, "says who added it"
    assert loaded() == set()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_our_own_table_is_true(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.name == name
    assert any("--json" in parameter.opts for parameter in command.params), "every subcommand has --json"


def test_help_and_version_are_quick_to_import() -> None:
    script = """
import sys
from kvstore.cli.main import cli, run
assert run(cli, ["--help"]) == run(cli, ["--version"]) == 0
print("IMPORTED", *sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said, _, modules = done.stdout.partition("IMPORTED")
    assert "kvstore 0." in said
    commands = {target.partition(":")[0] for target in COMMANDS.values()}
    assert {"torch", "numpy", "lmdb", "grpc", "engine", *commands} & set(modules.split()) == set()


# --- Output --------------------------------------------------------------------------------------------------------


def test_json_takes_what_we_measure(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass
    class Row:
        key: bytes
        ratio: float

    output.print_json(
        {"rows": [Row(b"\x01\xff", 0.5)], "n": np.int64(3), "p": np.arange(2), "path": Path("/x"), "s": {2, 1}}
    )
    assert json.loads(capsys.readouterr().out) == {
        "rows": [{"key": "01ff", "ratio": 0.5}],
        "n": 3,
        "p": [0, 1],
        "path": "/x",
        "s": [1, 2],
    }
