"""Answers: what the servers of a conductor (HTTP, gRPC) use of it. They make a ``Request`` and pass the parts on.

The parts come in this order: ``Routed`` (again if the answer continues at another engine), ``Drawn`` as tokens come,
one ``Answered``. If there is no complete answer, an error of ``kvstore.errors`` is raised instead.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from engine.model.request import Request, Usage


@dataclass(frozen=True)
class Routed:
    """Where the request goes, and why: what ``kvstore route --explain`` prints."""

    document: dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """More tokens of the answer. ``text``: the part that is certain by now, maybe empty. No ``ids``: they are not
    known.
    """

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Answered:
    """The end. ``reason``: "stop", "eos", "length", "cancelled". ``text``: the rest that was held back."""

    reason: str
    text: str
    usage: Usage


AnswerPart = Routed | Drawn | Answered


@dataclass(frozen=True)
class ServedModel:
    """A model that an engine serves.

    Attributes:
        path: its folder, with tokenizer and chat template; None for a preset.
        foreign: True if only engines of others serve it.
    """

    name: str
    path: str | None
    context_tokens: int
    foreign: bool = False


class Answers(Protocol):
    """A conductor, as its servers use it. Only on its event loop."""

    def models(self) -> list[ServedModel]:
        """The models that can be asked for now, by name."""

    def answer(self, request: Request) -> AsyncGenerator[AnswerPart, None]:
        """Answer it. Closing the generator cancels the work within a second.

        Parts wait for their reader: a slow one holds up only this answer, and a bounded part of it.

        Raises:
            InvalidRequest: names the field.
            TooManyCalls: refused; ``retry_after_s``.
            Unavailable: no engine is there, or too many failed on it.
        """

    async def explain(self, request: Request) -> dict[str, Any]:
        """What would be done with this request now. Changes nothing.

        Raises:
            InvalidRequest: names the field.
        """
