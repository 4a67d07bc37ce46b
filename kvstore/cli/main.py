"""The `kvstore` command: finds the subcommand, runs it, and turns every failure into one line and an exit code.

A subcommand is a click command in its own module, which is imported only when the subcommand is called. ``kvstore
--help`` lists names from the table below and from the entry-point group ``kvstore.commands``, with which `engine` adds
its commands. A subcommand returns None or its exit code. It raises `KVStoreError` for problems that the user can fix;
internal errors end with a traceback.

Exit codes: 0 success, 1 failure, 2 an invalid request, 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvstore import about
from kvstore.errors import InvalidRequest, KVStoreError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

ENTRY_POINT_GROUP = "kvstore.commands"

_NUMBER_TYPE = re.compile(r"is not a valid (integer|float)(?: range)?\.")

COMMANDS: Mapping[str, str] = {
    "bench": "kvstore.cli.bench:bench",
    "completion": "kvstore.cli.completion:completion",
    "config": "kvstore.cli.config:config",
    "data": "kvstore.cli.data:data",
    "drain": "kvstore.cli.drain:drain",
    "events": "kvstore.cli.events:events",
    "evict": "kvstore.cli.evict:evict",
    "lookup": "kvstore.cli.lookup:lookup",
    "pages": "kvstore.cli.pages:pages",
    "pin": "kvstore.cli.pin:pin",
    "purge": "kvstore.cli.purge:purge",
    "serve": "kvstore.cli.serve:serve",
    "status": "kvstore.cli.status:status",
    "tiers": "kvstore.cli.tiers:tiers",
    "top": "kvstore.cli.top:top",
    "unpin": "kvstore.cli.pin:unpin",
    "verify": "kvstore.cli.verify:verify",
}

# The table is here so that --help imports no subcommand. It may have commands of entry points. For commands that it
# does not have, the help names the package.
SHORT_HELP: Mapping[str, str] = {
    "bench": "Measure the store against this machine's limits.",
    "completion": "Print the completion script for a shell.",
    "conductor": "Run a conductor, which sends each request where it is answered soonest.",
    "config": "Show the resolved configuration and the source of each value.",
    "data": "Serve the pages of a node on this machine to other nodes.",
    "demo": "Start a node, engines and a conductor, send prompts, show the reuse.",
    "drain": "Move a node's pages to other nodes, and take it out of its pool.",
    "engine": "Run an engine, which prefills or decodes prompts with the pool.",
    "events": "Follow the events of pages: stored, moved, evicted, dropped.",
    "evict": "Evict pages, and report which.",
    "lookup": "Show for each page of a prompt whether it is stored, or why not.",
    "pages": "List stored pages.",
    "pin": "Protect the pages of a prompt from eviction, or list pins.",
    "plan": "Compare designs of a cluster for your traffic, and recommend one.",
    "purge": "Remove files that dead nodes left in shared memory.",
    "route": "Ask a conductor where it would send a prompt, and why.",
    "serve": "Run the node daemon of this machine.",
    "simulate": "Make traces, and run policies and clusters on them.",
    "status": "Show a node's capacity, use and counters.",
    "tiers": "Show contents, hit ratio and evictions of each tier.",
    "top": "Watch a node live: use, hits, operations, tenants, queues.",
    "unpin": "End a pin.",
    "verify": "Check a node's records, index, pages and conservation laws.",
    "web": "Serve web pages: a live view, and a comparison of designs.",
}


def _entry_points() -> Mapping[str, EntryPoint]:
    return about.entry_points(ENTRY_POINT_GROUP)


class LazyGroup(click.Group):
    """A group that imports a subcommand only when it is called.

    `commands_of` maps a name to ``"module:attribute"``. `added` is called once, and returns the entry points of other
    packages, which cannot replace built-in names.
    """

    def __init__(
        self,
        *args: Any,
        commands_of: Mapping[str, str] = COMMANDS,
        added: Callable[[], Mapping[str, EntryPoint]] = _entry_points,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._own = commands_of
        self._find_added = added

    @cached_property
    def _added(self) -> Mapping[str, EntryPoint]:
        return self._find_added()

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the sorted names of all subcommands, without importing any."""
        return sorted({*self._own, *self._added})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand; None for an unknown name. If a package is missing, the error names it."""
        if cmd_name in self._own:
            target = self._own[cmd_name]
        elif cmd_name in self._added:
            target = self._added[cmd_name].value
        else:
            return None
        module_name, _, attribute = target.partition(":")
        try:
            command = getattr(importlib.import_module(module_name), attribute)
        except ModuleNotFoundError as missing:
            raise click.ClickException(
                f"{cmd_name}: needs the Python module {missing.name}, which is not installed"
            ) from missing
        assert isinstance(command, click.Command), f"{target} is not a click command"
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete flags, and names of subcommands. Unlike click's own method it does not import the subcommands."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self._short_help(name)) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands for --help without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._short_help(name)) for name in self.list_commands(ctx)])

    def _short_help(self, name: str) -> str:
        if name in SHORT_HELP:
            return SHORT_HELP[name]
        return f"(added by {self._added[name].module.partition('.')[0]})" if name in self._added else ""


def _version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the version. click's own option only works for installed packages."""
    if asked and not ctx.resilient_parsing:
        click.echo(f"kvstore {about.version()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."
)
def cli() -> None:
    """A KV-cache-centric tiered store for disaggregated LLM serving."""


def main(args: Sequence[str] | None = None) -> None:
    """Run `kvstore` with `args`, by default the arguments of the process, and exit with its code."""
    sys.exit(run(cli, args))


def run(command: click.Command, args: Sequence[str] | None = None) -> int:
    """Run `command` and return its exit code. A failure is one line on stderr, ``kvstore: <field>: <reason>``."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC's C code writes its own lines
    try:
        result = command.main(args, prog_name="kvstore", standalone_mode=False)
        sys.stdout.flush()  # here, because a closed pipe is handled below
    except click.exceptions.NoArgsIsHelpError as asked:
        click.echo(asked.format_message(), err=True)
        return EXIT_USAGE
    except (click.ClickException, KVStoreError) as failed:
        click.echo(f"kvstore: {_one_line(failed)}", err=True)
        return EXIT_USAGE if isinstance(failed, click.UsageError | InvalidRequest) else EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_FAILED
    except OSError as failed:
        if failed.filename is None:
            raise
        click.echo(f"kvstore: {failed.filename}: {failed.strerror}", err=True)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _one_line(failed: click.ClickException | KVStoreError) -> str:
    """Return ``<field>: <reason>`` on one line. For click's usage errors the field is the option or argument as the
    user typed it."""
    match failed:
        case click.NoSuchOption():
            text = f"{failed.option_name}: no such option{_did_you_mean(failed.possibilities)}"
        case click.exceptions.NoSuchCommand():
            # click suggests only commands that are loaded, and these are not.
            group = failed.ctx.command if failed.ctx else None
            known = group.list_commands(failed.ctx) if failed.ctx and isinstance(group, click.Group) else []
            text = (
                f"{failed.command_name}: no such command{_did_you_mean(get_close_matches(failed.command_name, known))}"
            )
        case click.MissingParameter():
            text = f"{_parameter(failed)}: is missing"
        case click.BadParameter():
            text = f"{_parameter(failed)}: {_plain(failed.message)}"
        case click.BadOptionUsage():
            text = f"{failed.option_name}: {failed.message}"
        case click.UsageError():
            text = f"{failed.ctx.info_name if failed.ctx else 'arguments'}: {failed.format_message()}"
        case click.ClickException():
            text = failed.format_message()
        case _:
            text = str(failed)
    return " ".join(text.split())


def _plain(message: str) -> str:
    """Replace click's names of number types with words."""
    return _NUMBER_TYPE.sub(lambda match: f"is not a {'whole ' if match[1] == 'integer' else ''}number", message)


def _did_you_mean(possibilities: Sequence[str] | None) -> str:
    return f"; did you mean {possibilities[0]}?" if possibilities else ""


def _parameter(failed: click.BadParameter) -> str:
    if failed.param is not None:
        options = [option for option in failed.param.opts if option.startswith("--")]
        return options[0] if options else failed.param.human_readable_name
    hint = failed.param_hint or "arguments"
    return hint if isinstance(hint, str) else " / ".join(hint)


def _silence_stdout() -> None:
    """Redirect stdout to nowhere, because the interpreter's flush at exit would report the closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
