"""Prompt options: how lookup, pages, evict, pin and unpin are told which prompt they are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import click

from kvstore.cli import prompt_tokens
from kvstore.cli.prompt_layout import find_layout
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Keys, Tokens

_Command = TypeVar("_Command", bound=Callable[..., Any])

SALT_HELP = "Whose prompt.  [default: the tenant without a name]"


@dataclass(frozen=True)
class PromptOptions:
    """What was said of a prompt; None: not said."""

    tokens: str | None
    file: str | None
    text: str | None
    text_file: str | None
    tokenizer: str | None
    special_tokens: bool
    layout: str | None
    model: str | None
    adapter: str | None

    @property
    def given(self) -> bool:
        """Whether a prompt was named at all. Raises InvalidRequest where half of one was."""
        if self._sources():
            return True
        for field in ("tokenizer", "layout", "model", "adapter"):
            if getattr(self, field) is not None:
                raise InvalidRequest(f"--{field}", "goes with a prompt: --tokens, --file, --text or --text-file")
        return False

    def _sources(self) -> list[str]:
        return [name for name in ("tokens", "file", "text", "text_file") if getattr(self, name) is not None]

    def check(self) -> None:
        """Read the prompt, so that what is wrong with it is said before any node is asked."""
        _ = self._read  # kept: the standard input can be read once

    @cached_property
    def _read(self) -> Tokens:
        """The prompt's token ids. Raises InvalidRequest naming the option."""
        sources = [f"--{name.replace('_', '-')}" for name in self._sources()]
        if not sources:
            raise InvalidRequest("prompt", "give one: --tokens, --file, --text or --text-file")
        if len(sources) > 1:
            raise InvalidRequest(sources[1], f"cannot be said together with {sources[0]}")
        if self.tokenizer is not None and not sources[0].startswith("--text"):
            raise InvalidRequest("--tokenizer", "goes with --text or --text-file")
        if self.tokens is not None:
            return prompt_tokens.from_list(self.tokens)
        if self.file is not None:
            return prompt_tokens.from_file(self.file)
        text = self.text if self.text is not None else prompt_tokens.read_text(str(self.text_file))
        return prompt_tokens.from_text(text, self.tokenizer, self.special_tokens)

    def find(self, store: Store, salt: str | None) -> Prompt:
        """The prompt in that store. Raises InvalidRequest naming the option."""
        tokens = self._read
        cache = store.cache(find_layout(store, self.layout, self.model), salt or "", self.adapter or "")
        return Prompt(cache, tokens, cache.keys(tokens))


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and the keys of its full pages in one cache."""

    cache: PrefixCache
    tokens: Tokens
    keys: Keys

    def some(self) -> Keys:
        """Its keys. Raises InvalidRequest where it fills no page."""
        if not len(self.keys):
            page_tokens = self.cache.layout.page_tokens
            raise InvalidRequest("prompt", f"its {len(self.tokens)} tokens fill no page of {page_tokens}")
        return self.keys


def prompt_options(command: _Command) -> _Command:
    """Add the options; the command receives them as one ``PromptOptions``, ``prompt``."""
    options = (
        click.option("--tokens", metavar="IDS", help="Token ids: 1,2,3 or with ranges 5,7,100-355."),
        click.option(
            "--file", metavar="FILE", help="Token ids from .npy, JSON (a list, or `tokens` of an object), text, or -."
        ),
        click.option("--text", metavar="TEXT", help="A prompt's text; takes --tokenizer."),
        click.option("--text-file", metavar="FILE", help="The same from a file, or -."),
        click.option(
            "--tokenizer", metavar="PATH", help="tokenizer.json or a Hugging Face model's folder; `bytes`: id per byte."
        ),
        click.option(
            "--special-tokens/--no-special-tokens", default=True, help="Those that a tokenizer adds.  [default: added]"
        ),
        click.option(
            "--layout",
            metavar="LAYOUT",
            help="FILE.json, FILE.toml, model=m,layers=2,kv_heads=1,head_dim=64, or a known one's fingerprint.  "
            "[default: the only one that the node has met]",
        ),
        click.option("--model", metavar="NAME", help="The layout that the node has met of this model."),
        click.option("--adapter", metavar="NAME", help="Of pages computed with this adapter."),
    )

    def gathered(*args: Any, **given: Any) -> Any:
        prompt = PromptOptions(**{name: given.pop(name) for name in PromptOptions.__dataclass_fields__})
        return command(*args, prompt=prompt, **given)

    gathered.__doc__, gathered.__name__ = command.__doc__, command.__name__
    gathered.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    decorated: Any = gathered
    for option in reversed(options):
        decorated = option(decorated)
    return decorated
