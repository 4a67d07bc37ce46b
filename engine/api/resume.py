"""ResumableAnswer: one answer, which other engines continue if an engine fails.

The next engine receives the tokens drawn so far as part of the prompt. Token ``i`` depends only on the seed, ``i`` and
the logits, so an engine with the same model draws the same tokens.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np

from engine.api.wire import Tokens, events_of, submit_request
from engine.model.request import NO_TOKENS, Finished, Grain, Request, Sampling, Source, Timing, Token, Usage
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, Unavailable
from kvstore.model.retention import as_ranges
from kvstore.pb import engine_pb2 as pb

Prompt = str | Sequence[int] | Tokens

ARGUMENTS: Final = frozenset(  # fields of ``Request`` that a user may set
    ("id", "salt", "adapter", "deadline_s", "prefill", "handoff", "source", "grain", "use_pool", "allow_lossy",
     "retention")
)  # fmt: skip


class AnsweringEngine(Protocol):
    """The calls to an engine that an answer needs. ``EngineClient`` implements them."""

    address: str

    def replies(self, message: pb.SubmitRequest, deadline_s: float) -> Iterator[pb.SubmitReply]:
        """Return the replies to a request."""
        ...

    def connect_to(self, address: str) -> AnsweringEngine:
        """Return a client of another engine, with the same credentials."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def user_request(prompt: Prompt, **arguments: Any) -> Request:
    """Turn a user's arguments into a request. Raises InvalidRequest if an argument is unknown or not valid."""
    sampling = {name: arguments.pop(name) for name in Sampling.__dataclass_fields__ if name in arguments}
    unknown = sorted(arguments.keys() - ARGUMENTS)
    if unknown:
        raise InvalidRequest(unknown[0], "unknown argument")
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    for name, kind in (("handoff", Timing), ("source", Source), ("grain", Grain)):
        if isinstance(value := arguments.get(name), str):
            if value not in list(kind):
                raise InvalidRequest(name, f"must be one of {', '.join(kind)} (got {value!r})")
            arguments[name] = kind(value)
    if arguments.get("prefill") is not None:
        arguments["prefill"] = tuple(arguments["prefill"])
    if "retention" in arguments:
        arguments["retention"] = as_ranges(arguments["retention"])
    fields = {"id": uuid.uuid4().hex, **arguments, "tokens": _tokens(prompt), "sampling": Sampling(**sampling)}
    return Request(**fields, text=prompt if isinstance(prompt, str) else "")


def _tokens(prompt: Prompt) -> Tokens:
    if isinstance(prompt, str):
        return NO_TOKENS
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequest("tokens", "must be text, or a list of token ids")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 32:
        raise InvalidRequest("tokens", f"must be token ids, in 0..{(1 << 32) - 1} (got {ids.min()} to {ids.max()})")
    return ids.astype(np.uint32)


@dataclass
class ResumableAnswer:
    """One answer.

    Attributes:
        client: the first engine.
        others: addresses of engines that may continue the answer, in this order.
        engines: addresses of the engines that have worked on the answer, in order.
    """

    client: AnsweringEngine
    request: Request
    others: tuple[str, ...]
    engines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ids: list[int] = []
        self._started_s = self._first_s = self._second_s = 0.0
        self._ended = False

    def events(self) -> Generator[Token | Finished, None, None]:
        """Yield the events of the answer. ``EngineClient.stream`` names the errors."""
        self._started_s = time.monotonic()
        failures: dict[str, KVStoreError] = {}
        for address in (self.client.address, *self.others):
            client = self.client if not self.engines else self.client.connect_to(address)
            self.engines.append(address)
            try:
                yield from self._events_from(client)
                return
            except DeadlineExceeded:
                raise
            except Unavailable as error:
                if self._ended:  # the caller has the complete answer
                    return
                if not self.others:
                    raise
                failures[address] = error
            finally:
                if client is not self.client:
                    client.close()
        reasons = "; ".join(f"{address}: {error}" for address, error in failures.items())
        raise NodeUnavailable(f"all engines failed; the answer has {len(self._ids)} tokens so far ({reasons})")

    def _events_from(self, client: AnsweringEngine) -> Iterator[Token | Finished]:
        request = self.request
        remaining_s = self._started_s + request.deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no complete answer within {request.deadline_s:g} s")
        if 0 < request.sampling.max_tokens <= len(self._ids):  # all tokens were received, and only the end was lost
            yield Finished("length", self._total_usage(Usage(prompt_tokens=len(request.tokens))))
            return
        for reply in client.replies(self._message(remaining_s), remaining_s):
            if reply.accepted.tokens:  # the engine has tokenized the text
                tokens = np.frombuffer(reply.accepted.tokens, "<u4").astype(np.uint32)
                self.request = replace(request, tokens=tokens, text="")
            for event in events_of(reply):
                match event:
                    case Token():
                        self._record(event)
                        yield event
                    case Finished():
                        self._ended = True
                        was_resumed = len(self.engines) > 1
                        yield replace(event, usage=self._total_usage(event.usage)) if was_resumed else event
        if not self._ended:
            raise NodeUnavailable(f"{client.address} closed the stream before the end of the answer")

    def _message(self, remaining_s: float) -> pb.SubmitRequest:
        """Return the message to the next engine. Raises InvalidRequest if a value does not fit its field."""
        tokens = np.append(self.request.tokens, np.array(self._ids, np.uint32))
        request = replace(self.request, tokens=tokens, generated=len(self._ids), deadline_s=remaining_s)
        try:
            return submit_request(request)
        except (TypeError, ValueError) as error:
            raise InvalidRequest("request", str(error)) from None

    def _record(self, token: Token) -> None:
        now_s = time.monotonic()
        if not self._ids:
            self._first_s = now_s
        elif len(self._ids) == 1:
            self._second_s = now_s
        self._ids.append(token.id)

    def _total_usage(self, usage: Usage) -> Usage:
        """Return the usage of the last engine, with the number of tokens and the times of the whole answer."""
        return replace(
            usage,
            completion_tokens=len(self._ids),
            ttft_ms=1e3 * max(0.0, self._first_s - self._started_s),
            gap_ms=1e3 * max(0.0, self._second_s - self._first_s),
        )
