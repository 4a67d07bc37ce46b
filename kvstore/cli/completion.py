"""``kvstore completion``: prints the script with which a shell completes commands, flags, choices and nodes."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvstore.cli.output import json_option, print_json

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_KVSTORE_COMPLETE"  # click's name for it; if set, the command answers the shell instead of running


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  source <(kvstore completion bash)       in ~/.bashrc
    zsh:   source <(kvstore completion zsh)        in ~/.zshrc, after compinit
    fish:  kvstore completion fish > ~/.config/fish/completions/kvstore.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows {shell}"
    script = kind(ctx.find_root().command, {}, "kvstore", VARIABLE).source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
