"""Answers: the interface between a conductor and its servers (HTTP, gRPC), which make an ``Ask`` and pass the parts on.

The parts come in this order: ``Routed`` (again if the answer continues at another engine), ``Drawn`` as tokens come,
one ``Answered``. If there is no complete answer, an error of ``kvstore.errors`` is raised instead.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from engine.model.request import Sampling, Usage

PRIORITY_MAX: Final = 100  # the largest distance above or below the other requests of its tenant


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A prompt to answer.

    Attributes:
        model: one of ``models()``.
        tokens: uint32 ``[n]``.
        tenant: the tenant whose share of the engines it takes.
        salt: the root of its pages; None: that of requests without a salt.
        priority: among requests of its tenant, the higher one first.
        first_token_s, token_s: limits for the first token, and between two tokens; 0: the conductor's own rules.
            A request that cannot meet them is refused at once.
        deadline_s: the time after which an unfinished answer fails.
        explain: whether ``Routed`` includes all candidates. It costs time.
        ids: whether the ids of its tokens are wanted: not every engine reports them.
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
    """A model that an engine serves. ``path``: its folder, with tokenizer and chat template; None for a preset."""

    name: str
    path: str | None
    context_tokens: int


class Answers(Protocol):
    """A conductor, as its servers use it. Only on its event loop."""

    def models(self) -> list[ServedModel]:
        """The models that can be asked for now, by name."""

    def answer(self, ask: Ask) -> AsyncGenerator[AnswerPart, None]:
        """Answer it. Closing the generator cancels the work within a second.

        Parts wait for their reader: a slow one holds up only this answer, and a bounded part of it.

        Raises:
            InvalidRequest: names the field.
            TooManyCalls: refused; ``retry_after_s``.
            Unavailable: no engine is there, or too many failed on it.
        """

    async def explain(self, ask: Ask) -> dict[str, Any]:
        """What would be done with this request now. Changes nothing.

        Raises:
            InvalidRequest: names the field.
        """
