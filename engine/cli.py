"""The command ``kvstore engine``: runs an engine, or sends a request to a running one.

Without a subcommand, the command starts an engine. The subcommands call the running engine at the address ``--at``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from engine import config as configuration
from engine.config import EngineConfig
from engine.model.request import Role
from kvstore.cli.output import duration_text, json_option, print_json, print_pairs, say
from kvstore.cli.settings import with_settings
from kvstore.errors import InvalidRequest
from kvstore.model.retention import PRIORITY_MAX, Retention

ADMIN_S: Final = 10.0

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group(invoke_without_command=True)
@with_settings(EngineConfig)
@click.pass_context
def engine(context: click.Context, /, path: str | None, as_json: bool, **flags: Any) -> None:
    """Run an engine until SIGTERM, or call a running one.

    The engine prints one line when it serves. Each setting can also be in the file, under [engine], or in the
    environment (KVSTORE_ENGINE_ROLE=decode). docs/engines.md explains the settings.
    """
    if context.invoked_subcommand is not None:
        names = [name for name, value in flags.items() if value is not None]
        if names:
            flag, command = f"--{names[0].replace('_', '-')}", context.invoked_subcommand
            raise InvalidRequest(flag, f"must not be used with {command}, which calls a running engine")
        return
    settings, _ = configuration.load(path, flags=flags)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is in a folder, so nothing is downloaded
    from engine import daemon  # imported here because it loads torch and transformers

    def announce(ready: daemon.Ready) -> None:
        say(as_json, daemon.ready_document(ready), ready.line)

    daemon.serve(settings, announce)


# --- calls to a running engine --------------------------------------------------------------------------------------


def _at(command: _Command) -> _Command:
    return click.option(
        "--at",
        "address",
        metavar="ADDRESS",
        required=True,
        help="The engine: HOST:PORT or unix:PATH. Credentials are in KVSTORE_TOKEN, KVSTORE_TLS_CA and so on.",
    )(command)


def _client(address: str) -> Any:
    from engine.client import EngineClient  # imported here because it loads gRPC

    return EngineClient(address, timeout_s=ADMIN_S)


@engine.command()
@_at
@json_option
def status(address: str, as_json: bool) -> None:
    """Show the configuration, the load and the speed of an engine."""
    with _client(address) as client:
        document = client.status()
    if as_json:
        print_json(document)
    else:
        print_pairs(_flatten(document))


def _flatten(document: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """Return ``{"a.b": 1}`` for ``{"a": {"b": 1}}``."""
    pairs: dict[str, object] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            pairs |= _flatten(value, f"{prefix}{name}.")
        else:
            pairs[prefix + name] = f"{value:.4g}" if isinstance(value, float) else value
    return pairs


@engine.command()
@_at
@json_option
@click.argument("new_role", metavar="ROLE", type=click.Choice([str(role) for role in Role]))
def role(address: str, new_role: str, as_json: bool) -> None:
    """Change the role of an engine, and end a drain. Requests that have begun are not affected."""
    with _client(address) as client:
        client.set_role(new_role)
    say(as_json, {"role": new_role}, f"role {new_role}")


@engine.command()
@_at
@json_option
@click.option(
    "--to", "target", metavar="ADDRESS", help="An engine that continues running answers.  [default: they end here]"
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.001), default=60.0, help="Seconds.  [default: 60]")
def drain(address: str, target: str | None, timeout_s: float, as_json: bool) -> int:
    """Make an engine refuse new requests, and wait for running ones. Exit code 1 if some still run at the end."""
    with _client(address) as client:
        running = client.drain(target, timeout_s)
    text = f"{running} requests still run after {duration_text(timeout_s)}" if running else "drained"
    say(as_json, {"left": running}, text)
    return 1 if running else 0


@engine.command()
@_at
@json_option
@click.option("--to", "target", metavar="ADDRESS", required=True, help="The engine that continues.")
@click.argument("request_id")
def migrate(address: str, target: str, request_id: str, as_json: bool) -> int:
    """Let another engine continue a running request. Exit code 1 if no such request runs."""
    with _client(address) as client:
        found = client.migrate(request_id, target)
    text = f"{target} continues {request_id}" if found else f"no request {request_id} is running"
    say(as_json, {"found": found}, text)
    return 0 if found else 1


@engine.command()
@_at
@json_option
@click.argument("request_id")
def cancel(address: str, request_id: str, as_json: bool) -> int:
    """Cancel a request. Exit code 1 if no such request runs."""
    with _client(address) as client:
        found = client.cancel(request_id)
    say(as_json, {"found": found}, f"cancelled {request_id}" if found else f"no request {request_id} is running")
    return 0 if found else 1


@engine.command()
@_at
@json_option
@click.argument("text")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, help="[default: 64]")
@click.option("--temperature", type=float, default=0.0, help="0: greedy.  [default: 0]")
@click.option("--top-p", type=float, default=1.0, help="[default: 1]")
@click.option("--seed", type=int, default=0, help="[default: 0]")
@click.option("--stop", multiple=True, help="Text at which the answer ends. Can be repeated.")
@click.option(
    "--resume", multiple=True, metavar="ADDRESS", help="An engine that continues if this one fails. Can be repeated."
)
@click.option(
    "--timeout", "deadline_s", type=click.FloatRange(min=0.001), default=300.0, help="Seconds.  [default: 300]"
)
@click.option(
    "--priority",
    type=click.IntRange(-PRIORITY_MAX, PRIORITY_MAX),
    default=0,
    help="Priority of the pages in the pool: pages with -3 are evicted first, pages with 3 last.  [default: 0]",
)
@click.option("--ttl", "ttl_s", type=float, help="Seconds after a page's last use for which the priority is valid.")
def ask(
    address: str,
    text: str,
    as_json: bool,
    resume: tuple[str, ...],
    priority: int,
    ttl_s: float | None,
    **arguments: Any,
) -> None:
    """Ask an engine to continue TEXT, and print the answer while it is generated."""
    if priority or ttl_s is not None:
        arguments["retention"] = Retention(priority, ttl_s)
    with _client(address) as client:
        if as_json:
            answer = client.generate(text, resume=resume, **arguments)
            print_json({**vars(answer), "usage": vars(answer.usage)})
            return
        for event in client.stream(text, resume=resume, **arguments):
            click.echo(event.text, nl=False)
            sys.stdout.flush()
        click.echo()
