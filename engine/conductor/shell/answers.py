"""Answers: the seam between a conductor and its doors (HTTP, gRPC). A door makes an ``Ask`` and passes the parts on.

A part each, in this order: ``Routed`` (again where the answer goes on at another engine), ``Drawn`` as tokens come, one
``Answered``. Where there is no whole answer, an error of ``kvstore.errors`` is raised in their place.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from engine.model.request import Sampling, Usage

PRIORITY_MAX: Final = 100  # of a request, above or below the others of its tenant


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A prompt to be answered.

    Attributes:
        model: one of ``models()``.
        tokens: uint32 ``[n]``.
        tenant: whose share of the engines it takes.
        salt: the root of its pages; None: the one that requests without a salt have.
        priority: among requests of its tenant, the higher one first.
        first_token_s, token_s: until the first token, and between two of them, at most; 0: the conductor's own rules.
            A request that cannot meet them is refused at once.
        deadline_s: within which it is answered or fails.
        explain: whether ``Routed`` tells all candidates. It costs time.
        ids: whether the ids of its tokens are wanted: not every engine tells them.
    """

    request_id: str
    model: str
    tokens: npt.NDArray[np.uint32]
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = ""
    salt: str | None = None
    adapter: str = ""
    priority: int = 0
    first_token_s: float = 0.0
    token_s: float = 0.0
    deadline_s: float = 300.0
    explain: bool = False
    ids: bool = True


@dataclass(frozen=True)
class Routed:
    """Where the request goes, and why: what ``kvstore route --explain`` prints."""

    document: dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """More tokens of the answer. ``text``: what is certain by now; it may be empty. No ``ids``: they are not known."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Answered:
    """The end. ``reason``: "stop", "eos", "length", "cancelled". ``text``: what was still held back."""

    reason: str
    text: str
    usage: Usage


AnswerPart = Routed | Drawn | Answered


@dataclass(frozen=True)
class ServedModel:
    """A model that some engine has. ``path``: its folder, with tokenizer and chat template; None for a preset."""

    name: str
    path: str | None
    context_tokens: int


class Answers(Protocol):
    """A conductor, as its doors see it. Used on its event loop alone."""

    def models(self) -> list[ServedModel]:
        """What can be asked for now, by name."""

    def answer(self, ask: Ask) -> AsyncGenerator[AnswerPart, None]:
        """Answer it. Closing the generator cancels the work within a second.

        Parts wait for their reader: one that takes nothing holds up this answer alone, and a bounded part of it.

        Raises:
            InvalidRequest: it names the field.
            TooManyCalls: refused; ``retry_after_s``.
            Unavailable: no engine is there, or too many failed on it.
        """

    async def explain(self, ask: Ask) -> dict[str, Any]:
        """What would be done with it now. Changes nothing.

        Raises:
            InvalidRequest: it names the field.
        """
