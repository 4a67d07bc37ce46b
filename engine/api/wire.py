"""Conversions between the messages of engine.proto and the nouns of ``engine.model.request``, for both ends."""

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
from kvstore.model.retention import as_ranges
from kvstore.pb import engine_pb2 as pb
from kvstore.wire.grpc import retention_messages, retention_of

SERVICE: Final = "kvstore.v1.Engine"
ID_BYTES_MAX: Final = 128
PREFILLS_MAX: Final = 64  # engines that one request may name

Choice = TypeVar("Choice", bound=StrEnum)
Tokens = npt.NDArray[np.uint32]


# --- requests -------------------------------------------------------------------------------------------------------


def submit_request(request: Request) -> pb.SubmitRequest:
    """Return the message of a request. ``request_of`` is the inverse."""
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
    """Return the message that changes a role. ``order``: the leading conductor's; None from an operator."""
    if order is None:
        return pb.SetRoleRequest(role=role)
    return pb.SetRoleRequest(role=role, revision=order.revision, number=order.number)


def salt_of(message: pb.SubmitRequest, salt: str) -> str:
    """Return the salt of a request; ``salt`` if the message has none."""
    return message.salt if message.HasField("salt") else salt


def request_of(message: pb.SubmitRequest, salt: str, deadline_s: float) -> Request:
    """Return the request of a message. A request whose prompt is a string has no tokens until ``tokenized``.

    Args:
        salt: the default salt.
        deadline_s: the maximum and the default of the request's deadline.

    Raises:
        InvalidRequest: names the field.
    """
    for name, text, limit in (
        ("request_id", message.request_id, ID_BYTES_MAX),
        ("salt", message.salt, 1024),
        ("adapter", message.adapter, 1024),
    ):
        if len(text.encode()) > limit:
            raise InvalidRequest(name, f"must have at most {limit} bytes (got {len(text.encode())})")
    if message.own_prefill and message.prefill:
        raise InvalidRequest("own_prefill", "must not be set if prefill names engines")
    if len(message.prefill) > PREFILLS_MAX:
        raise InvalidRequest("prefill", f"must name at most {PREFILLS_MAX} engines (got {len(message.prefill)})")
    sampling_message = message.sampling
    sampling = Sampling(
        max_tokens=sampling_message.max_tokens if sampling_message.HasField("max_tokens") else Sampling.max_tokens,
        temperature=sampling_message.temperature,
        top_p=sampling_message.top_p if sampling_message.HasField("top_p") else Sampling.top_p,
        seed=sampling_message.seed,
        stop=tuple(sampling_message.stop),
        ignore_eos=sampling_message.ignore_eos,
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
        retention=as_ranges(retention_of(message.retention)),
    )
    tokens = _tokens_of(message)
    return request if tokens is None else tokenized(request, tokens)


def tokenized(request: Request, tokens: Tokens) -> Request:
    """Return the request with these tokens. Raises InvalidRequest if none of them belongs to the prompt."""
    if request.generated >= max(1, len(tokens)):
        raise InvalidRequest("generated", f"must be less than the {len(tokens)} tokens (got {request.generated})")
    return replace(request, tokens=tokens, text="")


def _choice(kind: type[Choice], name: str, value: str) -> Choice | None:
    if not value:
        return None
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequest(name, f"must be one of {', '.join(kind)} (got {value!r})") from None


def _tokens_of(message: pb.SubmitRequest) -> Tokens | None:
    """Return the token ids of a message; None if its prompt is a string.

    Raises:
        InvalidRequest: the message has neither, or both.
    """
    forms = [name for name in ("tokens", "token_ids", "text") if getattr(message, name)]
    if len(forms) != 1:
        reason = "must have one of tokens, token_ids and text"
        raise InvalidRequest("tokens", f"{reason} (got {' and '.join(forms) or 'none'})")
    if message.text:
        return None
    if message.token_ids:
        return np.array(message.token_ids, np.uint32)
    if len(message.tokens) % 4:
        raise InvalidRequest("tokens", f"must be little-endian uint32 (got {len(message.tokens)} bytes)")
    return np.frombuffer(message.tokens, "<u4").astype(np.uint32)


def tokens_bytes(tokens: Tokens) -> bytes:
    """Return token ids as bytes: uint32, little-endian."""
    return np.ascontiguousarray(tokens, "<u4").tobytes()


# --- answers --------------------------------------------------------------------------------------------------------


def replies_of(events: Iterable[Event]) -> Iterator[pb.SubmitReply]:
    """Yield the messages of events, with consecutive tokens in one message. There must be no ``Failed``."""
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
    """Yield the events of a message. The first message, ``accepted``, has none."""
    if reply.WhichOneof("event") == "finished":
        yield Finished(reply.finished.reason, usage_of(reply.finished.usage), reply.finished.text)
    for token in reply.tokens.tokens:
        yield Token(token.id, token.index, token.text)


def usage_of(message: pb.Usage) -> Usage:
    """Return the usage of a message."""
    values = {setting.name: getattr(message, setting.name) for setting in fields(Usage)}
    values |= {name: dict(values[name]) for name in ("cached_tokens", "prefill_cached_tokens")}
    return Usage(**values)


# --- hand-offs ------------------------------------------------------------------------------------------------------


def prefill_reply(event: PrefillEvent, data_port: int) -> pb.PrefillReply:
    """Return the message of an event of a prefill, except ``Failed``, which ends the call.

    Args:
        data_port: the TCP port from which the KV can be pulled.
    """
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
    """Return the event of a message. Raises Unavailable if the kind of the event is unknown."""
    match reply.WhichOneof("event"):
        case "admitted":
            return Admitted(reply.admitted.prompt_tokens, dict(reply.admitted.cached_tokens), reply.admitted.lossy)
        case "progress":
            return Progress(reply.progress.tokens, reply.progress.tokens_per_s)
        case "done":
            values = {setting.name: getattr(reply.done, setting.name) for setting in fields(HandOff)}
            pages, cached = tuple(reply.done.pages), dict(reply.done.cached_tokens)
            return Done(HandOff(**{**values, "pages": pages, "cached_tokens": cached}))
    raise Unavailable("the engine sent an event of a prefill of an unknown kind")
