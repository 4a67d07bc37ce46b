"""``kvstore engine``: run an engine, or ask a running one.

Without a subcommand its options start an engine here. The subcommands are about one that runs, ``--at`` its address.
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
    """Run an engine until SIGTERM, or ask one that runs.

    Prints one line when it serves. Each setting may also stand in the file under [engine], or in the environment
    (KVSTORE_ENGINE_ROLE=decode). docs/engines.md explains them.
    """
    if context.invoked_subcommand is not None:
        given = [name for name, value in flags.items() if value is not None]
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            raise InvalidRequest(flag, f"starts an engine; {context.invoked_subcommand} is about one that runs")
        return
    settings, _ = configuration.load(path, flags=flags)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder: nothing is looked up elsewhere
    from engine import daemon  # only here: it loads torch and transformers

    def announce(said: daemon.Ready) -> None:
        say(as_json, daemon.described(said), said.line)

    daemon.serve(settings, announce)


# --- about one that runs --------------------------------------------------------------------------------------------


def _at(command: _Command) -> _Command:
    return click.option(
        "--at",
        "address",
        metavar="ADDRESS",
        required=True,
        help="The engine: HOST:PORT or unix:PATH; credentials by KVSTORE_TOKEN, KVSTORE_TLS_CA and so on.",
    )(command)


def _client(address: str) -> Any:
    from engine.client import EngineClient  # only here: it loads gRPC

    return EngineClient(address, timeout_s=ADMIN_S)


@engine.command()
@_at
@json_option
def status(address: str, as_json: bool) -> None:
    """Show what an engine is, how busy, and how fast."""
    with _client(address) as client:
        found = client.status()
    if as_json:
        print_json(found)
    else:
        print_pairs(_flat(found))


def _flat(document: dict[str, Any], before: str = "") -> dict[str, object]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    pairs: dict[str, object] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            pairs |= _flat(value, f"{before}{name}.")
        else:
            pairs[before + name] = f"{value:.4g}" if isinstance(value, float) else value
    return pairs


@engine.command()
@_at
@json_option
@click.argument("new_role", metavar="ROLE", type=click.Choice([str(role) for role in Role]))
def role(address: str, new_role: str, as_json: bool) -> None:
    """Change what an engine does. What is under way is finished as it began. Ends a drain."""
    with _client(address) as client:
        client.set_role(new_role)
    say(as_json, {"role": new_role}, f"role {new_role}")


@engine.command()
@_at
@json_option
@click.option(
    "--to", "target", metavar="ADDRESS", help="An engine that goes on with what runs.  [default: it ends here]"
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.001), default=60.0, help="Seconds.  [default: 60]")
def drain(address: str, target: str | None, timeout_s: float, as_json: bool) -> int:
    """Make an engine take no new requests, and wait for those that run. Exit code 1 where some still do at the end."""
    with _client(address) as client:
        left = client.drain(target, timeout_s)
    say(as_json, {"left": left}, "drained" if not left else f"{left} still run after {duration_text(timeout_s)}")
    return 1 if left else 0


@engine.command()
@_at
@json_option
@click.option("--to", "target", metavar="ADDRESS", required=True, help="The engine that goes on.")
@click.argument("request_id")
def migrate(address: str, target: str, request_id: str, as_json: bool) -> int:
    """Let another engine go on with a running request. Exit code 1 where there is no such request."""
    with _client(address) as client:
        found = client.migrate(request_id, target)
    say(as_json, {"found": found}, f"{request_id} goes on at {target}" if found else f"no request {request_id} runs")
    return 0 if found else 1


@engine.command()
@_at
@json_option
@click.argument("request_id")
def cancel(address: str, request_id: str, as_json: bool) -> int:
    """End a request. Exit code 1 where there is no such request."""
    with _client(address) as client:
        found = client.cancel(request_id)
    say(as_json, {"found": found}, f"{request_id} was cancelled" if found else f"no request {request_id} runs")
    return 0 if found else 1


@engine.command()
@_at
@json_option
@click.argument("text")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, help="[default: 64]")
@click.option("--temperature", type=float, default=0.0, help="0: greedy.  [default: 0]")
@click.option("--top-p", type=float, default=1.0, help="[default: 1]")
@click.option("--seed", type=int, default=0, help="[default: 0]")
@click.option("--stop", multiple=True, help="Text at which the answer ends; may repeat.")
@click.option(
    "--resume", multiple=True, metavar="ADDRESS", help="An engine that goes on where this one dies; may repeat."
)
@click.option(
    "--timeout", "deadline_s", type=click.FloatRange(min=0.001), default=300.0, help="Seconds.  [default: 300]"
)
@click.option(
    "--priority",
    type=click.IntRange(-PRIORITY_MAX, PRIORITY_MAX),
    default=0,
    help="How long to keep its pages in the pool, from -3 (they leave first) to 3 (they stay).  [default: 0]",
)
@click.option("--ttl", "ttl_s", type=float, help="Seconds after a page's last use in which the priority counts.")
def ask(
    address: str, text: str, as_json: bool, resume: tuple[str, ...], priority: int, ttl_s: float | None, **how: Any
) -> None:
    """Ask an engine to go on with TEXT, and print the answer as it comes."""
    if priority or ttl_s is not None:
        how["retention"] = Retention(priority, ttl_s)
    with _client(address) as client:
        if as_json:
            answer = client.generate(text, resume=resume, **how)
            print_json({**vars(answer), "usage": vars(answer.usage)})
            return
        for event in client.stream(text, resume=resume, **how):
            click.echo(event.text, nl=False)
            sys.stdout.flush()
        click.echo()
