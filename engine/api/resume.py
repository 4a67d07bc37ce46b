"""ResumableAnswer: one answer, from as many engines as it takes.

The tokens drawn so far are sent along as part of the prompt. Token ``i`` depends only on the seed, ``i`` and the
logits, so another engine with the same model continues as the first one would have.
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
from kvstore.model.retention import checked
from kvstore.pb import engine_pb2 as pb

Prompt = str | Sequence[int] | Tokens

ARGUMENTS: Final = frozenset(  # fields of a request that a user may give
    ("id", "salt", "adapter", "deadline_s", "prefill", "handoff", "source", "grain", "use_pool", "allow_lossy",
     "retention")
)  # fmt: skip


class AnsweringEngine(Protocol):
    """An engine, as an answer uses it. ``EngineClient`` is one."""

    address: str

    def replies(self, message: pb.SubmitRequest, deadline_s: float) -> Iterator[pb.SubmitReply]:
        """The replies to a request."""
        ...

    def connect_to(self, address: str) -> AnsweringEngine:
        """Another one."""
        ...

    def close(self) -> None:
        """Stop using the engine."""
        ...


def user_request(prompt: Prompt, **how: Any) -> Request:
    """The request of a user's arguments. Raises InvalidRequest for unknown ones."""
    sampling = {name: how.pop(name) for name in Sampling.__dataclass_fields__ if name in how}
    unknown = sorted(how.keys() - ARGUMENTS)
    if unknown:
        raise InvalidRequest(unknown[0], "unknown argument")
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    for name, kind in (("handoff", Timing), ("source", Source), ("grain", Grain)):
        if isinstance(how.get(name), str):
            if how[name] not in list(kind):
                raise InvalidRequest(name, f"{how[name]!r} is not one of {', '.join(kind)}")
            how[name] = kind(how[name])
    if how.get("prefill") is not None:
        how["prefill"] = tuple(how["prefill"])
    if "retention" in how:
        how["retention"] = checked(how["retention"])
    text = prompt if isinstance(prompt, str) else ""
    how = {"id": uuid.uuid4().hex, **how, "tokens": _tokens(prompt), "text": text, "sampling": Sampling(**sampling)}
    return Request(**how)


def _tokens(prompt: Prompt) -> Tokens:
    if isinstance(prompt, str):
        return NO_TOKENS
    found = np.asarray(prompt)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise InvalidRequest("tokens", "must be text, or a list of token ids")
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < 1 << 32:
        raise InvalidRequest("tokens", f"{found.min()} to {found.max()} are not token ids")
    return found.astype(np.uint32)


@dataclass
class ResumableAnswer:
    """One answer. ``engines``: the engines that worked on it, in order."""

    client: AnsweringEngine
    request: Request
    others: tuple[str, ...]
    engines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ids: list[int] = []
        self._begun_s = self._first_s = self._second_s = 0.0
        self._ended = False

    def events(self) -> Generator[Token | Finished, None, None]:
        """See ``EngineClient.stream``."""
        self._begun_s = time.monotonic()
        failures: dict[str, KVStoreError] = {}
        for address in (self.client.address, *self.others):
            client = self.client if not self.engines else self.client.connect_to(address)
            self.engines.append(address)
            try:
                yield from self._from(client)
                return
            except DeadlineExceeded:
                raise
            except Unavailable as error:
                if self._ended:  # the caller has everything
                    return
                if not self.others:
                    raise
                failures[address] = error
            finally:
                if client is not self.client:
                    client.close()
        said = "; ".join(f"{address}: {error}" for address, error in failures.items())
        raise NodeUnavailable(f"no engine is left to continue after {len(self._ids)} tokens ({said})")

    def _from(self, client: AnsweringEngine) -> Iterator[Token | Finished]:
        request = self.request
        left_s = self._begun_s + request.deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"no whole answer within {request.deadline_s:g} s")
        if 0 < request.sampling.max_tokens <= len(self._ids):  # only the end was lost
            yield Finished("length", self._resumed(Usage(prompt_tokens=len(request.tokens))))
            return
        for reply in client.replies(self._message(left_s), left_s):
            if reply.accepted.tokens:  # the tokens of the text
                tokens = np.frombuffer(reply.accepted.tokens, "<u4").astype(np.uint32)
                self.request = replace(request, tokens=tokens, text="")
            for event in events_of(reply):
                match event:
                    case Token():
                        self._count(event)
                        yield event
                    case Finished():
                        self._ended = True
                        yield replace(event, usage=self._resumed(event.usage)) if len(self.engines) > 1 else event
        if not self._ended:
            raise NodeUnavailable(f"{client.address} closed the stream before the end of the answer")

    def _message(self, left_s: float) -> pb.SubmitRequest:
        """The message to send now. Raises InvalidRequest if the request does not fit into a message."""
        tokens = np.append(self.request.tokens, np.array(self._ids, np.uint32))
        now = replace(self.request, tokens=tokens, generated=len(self._ids), deadline_s=left_s)
        try:
            return submit_request(now)
        except (TypeError, ValueError) as error:
            raise InvalidRequest("request", str(error)) from None

    def _count(self, token: Token) -> None:
        now_s = time.monotonic()
        if not self._ids:
            self._first_s = now_s
        elif len(self._ids) == 1:
            self._second_s = now_s
        self._ids.append(token.id)

    def _resumed(self, usage: Usage) -> Usage:
        """The usage of the last engine, with times as measured here."""
        return replace(
            usage,
            completion_tokens=len(self._ids),
            ttft_ms=1e3 * max(0.0, self._first_s - self._begun_s),
            gap_ms=1e3 * max(0.0, self._second_s - self._first_s),
        )
