"""Wire: between the messages of engine.proto and the nouns of ``engine.model.request``. Both ends use it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from enum import StrEnum
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from engine.model.request import (
    NO_TOKENS,
    Admitted,
    Done,
    Event,
    Failed,
    Finished,
    Grain,
    HandOff,
    PrefillEvent,
    Progress,
    Request,
    Role,
    RoleOrder,
    Sampling,
    Source,
    Timing,
    Token,
    Usage,
)
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.retention import checked
from kvstore.pb import engine_pb2 as pb
from kvstore.wire.grpc import retention_messages, retention_of

SERVICE: Final = "kvstore.v1.Engine"
ID_BYTES_MAX: Final = 128
PREFILLS_MAX: Final = 64  # engines that one request may name

Choice = TypeVar("Choice", bound=StrEnum)
Tokens = npt.NDArray[np.uint32]


# --- requests -------------------------------------------------------------------------------------------------------


def submit_request(request: Request) -> pb.SubmitRequest:
    """The message of a request to an engine. ``request_of`` is the other direction."""
    sampling = request.sampling
    return pb.SubmitRequest(
        request_id=request.id,
        tokens=b"" if request.text else tokens_bytes(request.tokens),
        text=request.text,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop=sampling.stop,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
        ),
        salt=request.salt,
        adapter=request.adapter,
        generated=request.generated,
        deadline_ms=min(max(1, int(request.deadline_s * 1000)), (1 << 32) - 1),
        prefill=request.prefill or (),
        own_prefill=request.prefill is not None and not request.prefill,
        handoff=request.handoff or "",
        source=request.source or "",
        grain=request.grain or "",
        no_pool=not request.use_pool,
        allow_lossy=request.allow_lossy,
        retention=retention_messages(request.retention),
    )


def set_role_request(role: Role | str, order: RoleOrder | None) -> pb.SetRoleRequest:
    """The message that changes a role; ``order``: from a leading conductor; None: from an operator."""
    if order is None:
        return pb.SetRoleRequest(role=role)
    return pb.SetRoleRequest(role=role, revision=order.revision, number=order.number)


def salt_of(message: pb.SubmitRequest, salt: str) -> str:
    """The salt of a request's pages; ``salt`` if it names none."""
    return message.salt if message.HasField("salt") else salt


def request_of(message: pb.SubmitRequest, salt: str, deadline_s: float) -> Request:
    """The request of a message. One with a text has no tokens yet: see ``tokenized``.

    Args:
        salt: for a request that names none.
        deadline_s: the longest time it may take, and the default.

    Raises:
        InvalidRequest: names the field.
    """
    for name, text, limit in (
        ("request_id", message.request_id, ID_BYTES_MAX),
        ("salt", message.salt, 1024),
        ("adapter", message.adapter, 1024),
    ):
        if len(text.encode()) > limit:
            raise InvalidRequest(name, f"has more than {limit} bytes")
    if message.own_prefill and message.prefill:
        raise InvalidRequest("own_prefill", "and prefill exclude each other")
    if len(message.prefill) > PREFILLS_MAX:
        raise InvalidRequest("prefill", f"names more than {PREFILLS_MAX} engines")
    said = message.sampling
    sampling = Sampling(
        max_tokens=said.max_tokens if said.HasField("max_tokens") else Sampling.max_tokens,
        temperature=said.temperature,
        top_p=said.top_p if said.HasField("top_p") else Sampling.top_p,
        seed=said.seed,
        stop=tuple(said.stop),
        ignore_eos=said.ignore_eos,
    )
    request = Request(
        id=message.request_id or uuid.uuid4().hex,
        tokens=NO_TOKENS,
        text=message.text,
        sampling=sampling,
        salt=salt_of(message, salt),
        adapter=message.adapter,
        generated=message.generated,
        deadline_s=min(deadline_s, message.deadline_ms / 1000) if message.deadline_ms else deadline_s,
        prefill=tuple(message.prefill) if message.prefill or message.own_prefill else None,
        handoff=_choice(Timing, "handoff", message.handoff),
        source=_choice(Source, "source", message.source),
        grain=_choice(Grain, "grain", message.grain),
        use_pool=not message.no_pool,
        allow_lossy=message.allow_lossy,
        retention=checked(retention_of(message.retention)),
    )
    tokens = _tokens_of(message)
    return request if tokens is None else tokenized(request, tokens)


def tokenized(request: Request, tokens: Tokens) -> Request:
    """The request with these tokens as its prompt. Raises InvalidRequest if all of them were generated."""
    if request.generated >= max(1, len(tokens)):
        raise InvalidRequest("generated", f"{request.generated} of {len(tokens)} tokens: a prompt has at least one")
    return replace(request, tokens=tokens, text="")


def _choice(kind: type[Choice], name: str, value: str) -> Choice | None:
    if not value:
        return None
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequest(name, f"{value!r} is not one of {', '.join(kind)}") from None


def _tokens_of(message: pb.SubmitRequest) -> Tokens | None:
    """The token ids of a message; None if it has text. Raises InvalidRequest if it has neither, or both."""
    given = [name for name in ("tokens", "token_ids", "text") if getattr(message, name)]
    if len(given) != 1:
        raise InvalidRequest("tokens", f"{' and '.join(given)} exclude each other" if given else "an empty prompt")
    if message.text:
        return None
    if message.token_ids:
        return np.array(message.token_ids, np.uint32)
    if len(message.tokens) % 4:
        raise InvalidRequest("tokens", f"must be little-endian uint32 (got {len(message.tokens)} bytes)")
    return np.frombuffer(message.tokens, "<u4").astype(np.uint32)


def tokens_bytes(tokens: Tokens) -> bytes:
    """Token ids in the form in which they are sent."""
    return np.ascontiguousarray(tokens, "<u4").tobytes()


# --- answers --------------------------------------------------------------------------------------------------------


def replies_of(events: Iterable[Event]) -> Iterator[pb.SubmitReply]:
    """Events as messages, tokens that follow each other in one. None of them may be ``Failed``."""
    tokens: list[pb.Token] = []
    for event in events:
        if isinstance(event, Token):
            tokens.append(pb.Token(id=event.id, index=event.index, text=event.text))
            continue
        assert isinstance(event, Finished), event
        if tokens:
            yield pb.SubmitReply(tokens=pb.Tokens(tokens=tokens))
            tokens = []
        yield pb.SubmitReply(
            finished=pb.Finished(reason=event.reason, text=event.text, usage=pb.Usage(**asdict(event.usage)))
        )
    if tokens:
        yield pb.SubmitReply(tokens=pb.Tokens(tokens=tokens))


def events_of(reply: pb.SubmitReply) -> Iterator[Event]:
    """The events in a message; none in the first one, which says that the request was accepted."""
    if reply.WhichOneof("event") == "finished":
        yield Finished(reply.finished.reason, usage_of(reply.finished.usage), reply.finished.text)
    for token in reply.tokens.tokens:
        yield Token(token.id, token.index, token.text)


def usage_of(message: pb.Usage) -> Usage:
    """The usage in a message."""
    values = {setting.name: getattr(message, setting.name) for setting in fields(Usage)}
    values |= {name: dict(values[name]) for name in ("cached_tokens", "prefill_cached_tokens")}
    return Usage(**values)


# --- hand-offs ------------------------------------------------------------------------------------------------------


def prefill_reply(event: PrefillEvent, data_port: int) -> pb.PrefillReply:
    """An event of a prefill as a message. Not ``Failed``: that ends the call. ``data_port``: where it can be pulled."""
    match event:
        case Admitted():
            return pb.PrefillReply(admitted=pb.Admitted(**asdict(event), data_port=data_port))
        case Progress():
            return pb.PrefillReply(progress=pb.Progress(tokens=event.tokens, tokens_per_s=event.tokens_per_s))
        case Done():
            return pb.PrefillReply(done=pb.HandOff(**asdict(event.handoff)))
        case Failed():
            raise AssertionError("a failure is not sent as a message")


def prefill_event(reply: pb.PrefillReply) -> PrefillEvent:
    """The event in a message. Raises Unavailable if this version knows none in it."""
    match reply.WhichOneof("event"):
        case "admitted":
            return Admitted(reply.admitted.prompt_tokens, dict(reply.admitted.cached_tokens), reply.admitted.lossy)
        case "progress":
            return Progress(reply.progress.tokens, reply.progress.tokens_per_s)
        case "done":
            values = {setting.name: getattr(reply.done, setting.name) for setting in fields(HandOff)}
            pages, cached = tuple(reply.done.pages), dict(reply.done.cached_tokens)
            return Done(HandOff(**{**values, "pages": pages, "cached_tokens": cached}))
    raise Unavailable("the engine sent an unknown event of a prefill")
