"""deploy/kvstore.example.toml, docs/config.md and ``kvstore config`` tell of every setting, truly, and of no other.

``python -m tests.cli.test_config_example`` regenerates the example and the table of docs/config.md.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import click
from click.testing import CliRunner

from kvstore import config as configuration
from kvstore.cli.config import config, plain
from kvstore.cli.main import cli
from kvstore.cli.settings import value_text
from kvstore.config import NodeConfig
from kvstore.config.reading import declarations, parsers_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "kvstore.example.toml"
PAGE = ROOT / "docs" / "config.md"
SETTINGS = list(declarations(NodeConfig))
BEGIN, END = "<!-- settings -->\n", "<!-- end -->\n"
COMMENTED = re.compile(r"# ([a-z_]+) = (.+)")


def texts(config: NodeConfig) -> dict[str, str]:
    """Every setting's value as a file has it."""
    return {name: value_text(parser, getattr(config, name)) for name, parser in parsers_of(NodeConfig).items()}


def table() -> str:
    """The table of docs/config.md."""
    default = texts(NodeConfig())
    rows = [
        f"| `{name}` | `{default[name]}` | {setting.help.replace('|', chr(92) + '|')} |"
        for name, setting in declarations(NodeConfig).items()
    ]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows]) + "\n"


def example() -> str:
    """The example: what it is, then each setting with its default; one that has none is commented out."""
    text = EXAMPLE.read_text().partition("[node]")[0] + "[node]\n"
    for name, setting in declarations(NodeConfig).items():
        value = texts(NodeConfig())[name]
        given = f'"/etc/kvstore/{name}.pem"' if setting.metavar == "FILE" else '"127.0.0.1:7071"'
        about = textwrap.fill(setting.help, 120, initial_indent="# ", subsequent_indent="# ")
        text += f"\n{about}\n{f'# {name} = {given}' if value == 'none' else f'{name} = {value}'}\n"
    return text


# --- the example ----------------------------------------------------------------------------------------------------


def test_the_example_loads_and_is_the_default() -> None:
    assert configuration.load(EXAMPLE, env={}).node == NodeConfig()


def test_the_example_has_every_setting_once_and_no_other() -> None:
    text = EXAMPLE.read_text()
    active = list(tomllib.loads(text)["node"])
    commented = [found[1] for found in map(COMMENTED.fullmatch, text.splitlines()) if found]
    assert sorted(active + commented) == sorted(SETTINGS)
    assert {name for name in SETTINGS if getattr(NodeConfig(), name) is None} == set(commented)


def test_what_is_commented_out_loads_when_it_is_not() -> None:
    text = "\n".join(COMMENTED.sub(r"\1 = \2", line) for line in EXAMPLE.read_text().splitlines())
    values = tomllib.loads(text)["node"]
    assert sorted(values) == sorted(SETTINGS)
    configuration.node_config(**values)


# --- docs/config.md -------------------------------------------------------------------------------------------------


def test_the_page_has_every_setting_with_its_default() -> None:
    _, begin, rest = PAGE.read_text().partition(BEGIN)
    assert begin, f"{BEGIN} is missing"
    assert rest.partition(END)[0] == table(), "run `python -m tests.cli.test_config_example`"


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_tells_values_and_sources(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[node]\ndram = "1GiB"\nname = "file"\nquotas = ["a dram=1MiB"]\n')
    flags = ["--config", str(path), "--name", "flag", "--json"]
    result = CliRunner().invoke(config, flags, env={"KVSTORE_LOG_LEVEL": "debug"})
    assert result.exit_code == 0, result.output
    node = json.loads(result.output)["node"]
    assert list(node) == SETTINGS
    assert node["dram"] == {"value": 1 << 30, "source": f"file {path}"}
    assert node["name"] == {"value": "flag", "source": "flag --name"}
    assert node["log_level"] == {"value": "debug", "source": "env KVSTORE_LOG_LEVEL"}
    assert node["quotas"] == {"value": ["a dram=1MiB"], "source": f"file {path}"}
    assert node["http"] == {"value": None, "source": "default"}


def test_what_the_command_shows_can_be_read_again() -> None:
    found = configuration.load(
        env={}, flags={"nvme": '/tmp/with "quotes"\\and\ttab:1GiB', "dram": "4097", "listen": "127.0.0.1:1,unix:/a"}
    ).node
    shown = {name: text for name, text in texts(found).items() if getattr(found, name) is not None}
    text = "\n".join(f"{name} = {value}" for name, value in shown.items())
    assert configuration.node_config(**tomllib.loads(text)) == found
    json.dumps({name: plain(getattr(found, name)) for name in SETTINGS})


def test_serve_and_config_have_a_flag_for_every_setting_and_say_its_default() -> None:
    for command in ("serve", "config"):
        found = cli.get_command(cli.make_context("kvstore", [command]), command)
        assert found is not None
        options = {option.name: option for option in found.params if isinstance(option, click.Option)}
        assert options.keys() == {*SETTINGS, "path", "as_json"} | {name for name in options if name == "help"}
        for name in SETTINGS:
            assert f"--{name.replace('_', '-')}" in options[name].opts
            default = texts(NodeConfig())[name].strip('"')
            said = str(options[name].help).partition("[default: ")[2].rstrip("]")
            assert said == {"": "none", "[]": "none", "false": "off"}.get(default, default), name


# --- the unit -------------------------------------------------------------------------------------------------------


def test_the_unit_starts_a_command_there_is() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy" / "kvstore.service")
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/kvstore") and command == "serve"
    serve = cli.get_command(cli.make_context("kvstore", ["serve"]), "serve")
    assert serve is not None
    assert serve.make_context("serve", arguments).params["path"] == "/etc/kvstore/kvstore.toml"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
    EXAMPLE.write_text(example())
