"""``kvstore pin`` and ``kvstore unpin``: protect the stored pages of a prompt from eviction, and end that."""

from __future__ import annotations

import time
from typing import Any

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import Duration, bytes_text, duration_text, json_option, print_json, print_table
from kvstore.cli.prompt import NEEDED, SALT_HELP, PromptOptions, prompt_options
from kvstore.errors import InvalidRequest


@click.command()
@node_option
@click.option("--list", "list_pins", is_flag=True, help="List all pins; takes no prompt.")
@click.option(
    "--ttl", "ttl_s", type=Duration(days_max=30), metavar="DURATION", help="Duration of the pin: 30m, 1h, 2d."
)
@click.option("--salt", "--tenant", "salt", metavar="SALT", help=SALT_HELP)
@prompt_options
@json_option
def pin(
    node: str | None, list_pins: bool, ttl_s: float | None, salt: str | None, prompt: PromptOptions, as_json: bool
) -> None:
    """Protect the stored pages of a prompt from eviction for some time, or list pins.

    A pin covers the leading pages of the prompt that are stored now, in DRAM and on NVMe. It outlives the command and
    the daemon, but not a reboot. Pinning the same prompt again changes the end of its pin. All pins together cover at
    most `pins_share_max` of a tier, and those of one tenant three quarters of that.
    """
    has_prompt = prompt.tokens is not None
    if list_pins:
        if has_prompt or ttl_s is not None or salt is not None:
            raise InvalidRequest("--list", "takes no prompt, --ttl or --salt")
        _list(node, as_json)
        return
    if not has_prompt:
        raise InvalidRequest("prompt", f"{NEEDED}; or use --list")
    if ttl_s is None:
        raise InvalidRequest("--ttl", "is needed: a duration such as 30m, 1h or 2d")
    with kvstore.connect(node) as store:
        keys = prompt.find(store, salt).page_keys()
        reply = store.pin(keys, ttl_s)
        name = store.name
    if as_json:
        print_json({"node": name, "asked_pages": len(keys), **reply})
        return
    until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reply["until"]))
    click.echo(
        f"pin {reply['pin']}: {reply['pages']} of {len(keys)} pages ({bytes_text(reply['bytes'])}) until {until}"
    )


def _list(node: str | None, as_json: bool) -> None:
    with kvstore.connect(node) as store:
        reply = store.pins()
        name = store.name
    if as_json:
        print_json({"node": name, **reply})
        return
    if reply["pins"]:
        headers = ("pin", "tenant", "pages", "size", "tiers", "ends in", "last page")
        print_table(headers, [_row(entry) for entry in reply["pins"]])
        click.echo()
    sizes = ", ".join(f"{bytes_text(size)} of {tier}" for tier, size in reply["bytes"].items() if size)
    count = len(reply["pins"])
    click.echo(f"{count} pin{'s' if count != 1 else ''}" + (f", keeping {sizes}" if sizes else ""))


def _row(entry: dict[str, Any]) -> tuple[object, ...]:
    tiers = " ".join(f"{tier}:{pages}" for tier, pages in entry["tiers"].items())
    remaining_s = max(0.0, entry["until"] - time.time())
    size = bytes_text(entry["bytes"])
    return entry["pin"], entry["salt"] or "-", entry["pages"], size, tiers, duration_text(remaining_s), entry["last"]


@click.command()
@click.argument("number", metavar="[ID]", required=False)
@node_option
@click.option("--salt", "--tenant", "salt", metavar="SALT", help=SALT_HELP)
@prompt_options
@json_option
def unpin(node: str | None, number: str | None, salt: str | None, prompt: PromptOptions, as_json: bool) -> None:
    """End a pin: by its ID as `pin --list` shows it, or all pins of a prompt."""
    has_prompt = prompt.tokens is not None
    if has_prompt == (number is not None):
        reason = "cannot be combined with a prompt" if has_prompt else "is needed: the number of a pin, or a prompt"
        raise InvalidRequest("ID", reason)
    if number is not None and (not number.isdecimal() or not 0 < int(number) < 10**19):
        raise InvalidRequest("ID", f"must be the number of a pin (got {number!r})")
    if number is not None and salt is not None:
        raise InvalidRequest("--salt", "needs a prompt")
    with kvstore.connect(node) as store:
        reply = store.unpin(keys=prompt.find(store, salt).page_keys()) if has_prompt else store.unpin(number)
        name = store.name
    if as_json:
        print_json({"node": name, **reply})
        return
    click.echo(f"{reply['unpinned']} pin{'s' if reply['unpinned'] != 1 else ''} ended")
