"""Asks: turns one HTTP request into requests to the conductor."""

from __future__ import annotations

from dataclasses import replace

from engine.conductor.door.errors import invalid
from engine.conductor.door.wanted import CHAT_TOKENS, SEED_MAX, Wanted
from engine.conductor.shell.answers import Ask, ServedModel
from engine.text.chat import Tokens
from kvstore.server.identities import ALL_SALTS, Identity


def salt_of(caller: Identity, wanted: Wanted) -> str | None:
    """The salt of its pages: the one that the request names, else the one of the key. Raises PermissionDenied."""
    if wanted.salt is not None:
        caller.check_salt(wanted.salt)
        return wanted.salt
    if ALL_SALTS in caller.salts:
        return None
    if len(caller.salts) == 1:
        return next(iter(caller.salts))
    if caller.name in caller.salts:
        return caller.name
    raise invalid("kvstore.salt", "is missing: this key may use several or no salts", "missing_required_parameter")


def asks_of(
    id: str, wanted: Wanted, model: ServedModel, prompts: list[Tokens], tenant: str, salt: str | None
) -> list[Ask]:
    """One request for each answer. Raises Refusal if a prompt and its answer exceed the model's context."""
    asks: list[Ask] = []
    for tokens in prompts:
        room = model.context_tokens - len(tokens)
        max_tokens = wanted.max_tokens if wanted.max_tokens is not None else max(1, min(room, CHAT_TOKENS))
        if max_tokens > room:
            count = f"{len(tokens)} tokens" if room >= 0 else f"more than {model.context_tokens} tokens"
            what = f"{count} and {max_tokens} more are beyond the context of {model.context_tokens}"
            param = "messages" if wanted.is_chat else "prompt"
            raise invalid(param, what, "context_length_exceeded")
        for number in range(wanted.n):
            seed = (wanted.sampling.seed + number) % (SEED_MAX + 1)
            asks.append(
                Ask(
                    request_id=f"{id}-{len(asks)}",
                    model=model.name,
                    tokens=tokens,
                    sampling=replace(wanted.sampling, max_tokens=max_tokens, seed=seed),
                    tenant=tenant,
                    salt=salt,
                    adapter=wanted.adapter,
                    priority=wanted.priority,
                    first_token_s=wanted.first_token_s,
                    token_s=wanted.token_s,
                    deadline_s=wanted.deadline_s,
                    explain=wanted.explain,
                    ids=False,
                )
            )
    return asks
