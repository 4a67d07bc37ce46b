"""Reading settings: one frozen dataclass from a table of a TOML file, the environment and flags.

Every program has a table of its own in the file (``SECTIONS``), so that one file may serve them all; each refuses names
that nobody knows in its own table, and tables that nobody has. Only `read` touches files.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from kvstore.config.values import Parser
from kvstore.errors import InvalidRequest

SECTIONS = ("node", "engine", "conductor")
"""Tables that a file may have, each read by its own program."""


class Settings(Protocol):
    """A dataclass whose fields are made by ``setting``."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Found = TypeVar("Found", bound=Settings)


@dataclass(frozen=True)
class Declared:
    """What a setting is beside its name, type and default.

    Attributes:
        help: what it means, in one or two sentences: for its flag, the docs and the example.
        metavar: what a value looks like.
        repeats: its flag may be given several times.
        short: another flag with the same meaning.
        default_shown: what help says of the default; None: the default itself.
    """

    parser: Parser
    help: str
    metavar: str = "VALUE"
    repeats: bool = False
    short: str = ""
    default_shown: str | None = None


def setting(default: Any, parser: Parser, help: str, **more: Any) -> Any:
    """A field of a config dataclass that `read` can fill from text. ``more``: of `Declared`."""
    return field(default=default, metadata={"declared": Declared(parser, help, **more)})


def declared(kind: type[Settings]) -> dict[str, Declared]:
    """Every setting, in their order: those that the class itself declares, then those that it has from others."""
    own_first = sorted(fields(kind), key=lambda each: each.name not in kind.__annotations__)
    return {found.name: found.metadata["declared"] for found in own_first}


def parsers_of(kind: type[Settings]) -> dict[str, Parser]:
    """Every setting's parser."""
    return {name: found.parser for name, found in declared(kind).items()}


def parsed(kind: type[Found], raw: Mapping[str, object]) -> Found:
    """The dataclass from values as users write them. Raises `InvalidRequest` for unknown names and bad values."""
    parsers = parsers_of(kind)
    for name in raw:
        if name not in parsers:
            raise InvalidRequest(name, unknown(name, parsers))
    return kind(**{name: parsers[name](value, name) for name, value in raw.items()})


def read(
    kind: type[Found],
    section: str,
    path: str | Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    prefix: str,
    not_ours: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> tuple[Found, dict[str, str]]:
    """The dataclass from flags over environment over file over defaults, and for each setting where it came from.

    Args:
        prefix: of this program's environment variables.
        not_ours: variables with that prefix that are for others, and prefixes of more of them.

    Raises:
        InvalidRequest: names the setting and says where it was read.
    """
    parsers = parsers_of(kind)
    given: dict[str, tuple[object, str]] = {}  # name -> raw value, source; the last one written wins
    if path is not None:
        given.update(_from_file(section, parsers, Path(path)))
    given.update(_from_env(parsers, env, prefix, *not_ours))
    given.update(_from_flags(parsers, flags))
    values = {}
    for name, (raw, source) in given.items():
        try:
            values[name] = parsers[name](raw, name)
        except InvalidRequest as bad:
            raise InvalidRequest(name, f"{bad.reason} (from {source})") from None
    return kind(**values), {name: given[name][1] if name in given else "default" for name in parsers}


def _from_file(section: str, parsers: Mapping[str, Parser], path: Path) -> dict[str, tuple[object, str]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failed:
        raise InvalidRequest("config", f"{path}: {failed.strerror}") from failed
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failed:
        raise InvalidRequest("config", f"{path} is not TOML: {failed}") from failed
    given: dict[str, tuple[object, str]] = {}
    for found, table in document.items():
        if found not in SECTIONS:
            raise InvalidRequest(found, f"{unknown(found, SECTIONS)} (from file {path})")
        if not isinstance(table, dict):
            raise InvalidRequest(found, f"is a table: write [{found}] (from file {path})")
        for name, raw in table.items() if found == section else ():
            if name not in parsers:
                raise InvalidRequest(f"{section}.{name}", f"{unknown(name, parsers)} (from file {path})")
            given[name] = (raw, f"file {path}")
    return given


def _from_env(
    parsers: Mapping[str, Parser],
    env: Mapping[str, str],
    prefix: str,
    names_of_others: tuple[str, ...],
    prefixes_of_others: tuple[str, ...],
) -> dict[str, tuple[object, str]]:
    names = {prefix + name.upper(): name for name in parsers}
    given: dict[str, tuple[object, str]] = {}
    for variable, raw in sorted(env.items()):
        if variable in names:
            given[names[variable]] = (raw, f"env {variable}")
        elif variable.startswith(prefix) and not (
            variable in names_of_others or variable.startswith(prefixes_of_others)
        ):
            raise InvalidRequest(variable, unknown(variable, (*names, *names_of_others[:1])))
    return given


def _from_flags(parsers: Mapping[str, Parser], flags: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    given: dict[str, tuple[object, str]] = {}
    for name, raw in flags.items():
        if name not in parsers:
            raise InvalidRequest(name, unknown(name, parsers))
        if raw is not None:
            given[name] = (raw, f"flag --{name.replace('_', '-')}")
    return given


def unknown(name: str, known: Iterable[str]) -> str:
    """Why a name was refused, and which was meant."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"is not a known setting{f'; did you mean {close[0]}?' if close else ''}"
