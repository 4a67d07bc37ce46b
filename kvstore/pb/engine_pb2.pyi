from google.protobuf import struct_pb2 as _struct_pb2
from kvstore.pb import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "seed", "stop", "max_tokens", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "tokens", "token_ids", "text", "sampling", "salt", "adapter", "generated", "deadline_ms", "prefill", "own_prefill", "handoff", "source", "grain", "no_pool", "allow_lossy", "retention")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    OWN_PREFILL_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GRAIN_FIELD_NUMBER: _ClassVar[int]
    NO_POOL_FIELD_NUMBER: _ClassVar[int]
    ALLOW_LOSSY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    sampling: Sampling
    salt: str
    adapter: str
    generated: int
    deadline_ms: int
    prefill: _containers.RepeatedScalarFieldContainer[str]
    own_prefill: bool
    handoff: str
    source: str
    grain: str
    no_pool: bool
    allow_lossy: bool
    retention: _containers.RepeatedCompositeFieldContainer[_store_pb2.Retention]
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., salt: _Optional[str] = ..., adapter: _Optional[str] = ..., generated: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., prefill: _Optional[_Iterable[str]] = ..., own_prefill: _Optional[bool] = ..., handoff: _Optional[str] = ..., source: _Optional[str] = ..., grain: _Optional[str] = ..., no_pool: _Optional[bool] = ..., allow_lossy: _Optional[bool] = ..., retention: _Optional[_Iterable[_Union[_store_pb2.Retention, _Mapping]]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("accepted", "tokens", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    tokens: Tokens
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: int
    tokens: bytes
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "index", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    index: int
    text: str
    def __init__(self, id: _Optional[int] = ..., index: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "text", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    text: str
    usage: Usage
    def __init__(self, reason: _Optional[str] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "computed_tokens", "prefill_engine", "prefill_cached_tokens", "ttft_ms", "gap_ms", "tpot_ms", "loaded_bytes", "moved_bytes", "written_bytes", "prefill_ms")
    class CachedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PrefillCachedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    GAP_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: _containers.ScalarMap[str, int]
    computed_tokens: int
    prefill_engine: str
    prefill_cached_tokens: _containers.ScalarMap[str, int]
    ttft_ms: float
    gap_ms: float
    tpot_ms: float
    loaded_bytes: int
    moved_bytes: int
    written_bytes: int
    prefill_ms: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[_Mapping[str, int]] = ..., computed_tokens: _Optional[int] = ..., prefill_engine: _Optional[str] = ..., prefill_cached_tokens: _Optional[_Mapping[str, int]] = ..., ttft_ms: _Optional[float] = ..., gap_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., loaded_bytes: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., prefill_ms: _Optional[float] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "layout", "hold_ms")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    request: SubmitRequest
    layout: _store_pb2.Layout
    hold_ms: int
    def __init__(self, request: _Optional[_Union[SubmitRequest, _Mapping]] = ..., layout: _Optional[_Union[_store_pb2.Layout, _Mapping]] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("admitted", "progress", "done")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    progress: Progress
    done: HandOff
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., done: _Optional[_Union[HandOff, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "lossy", "data_port")
    class CachedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: _containers.ScalarMap[str, int]
    lossy: bool
    data_port: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[_Mapping[str, int]] = ..., lossy: _Optional[bool] = ..., data_port: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("tokens", "tokens_per_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    tokens_per_s: float
    def __init__(self, tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class HandOff(_message.Message):
    __slots__ = ("request_id", "pages", "stored", "tail_tokens", "first_token", "generated", "cached_tokens", "computed_tokens", "prefill_ms")
    class CachedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pages: _containers.RepeatedScalarFieldContainer[bytes]
    stored: int
    tail_tokens: int
    first_token: int
    generated: int
    cached_tokens: _containers.ScalarMap[str, int]
    computed_tokens: int
    prefill_ms: float
    def __init__(self, request_id: _Optional[str] = ..., pages: _Optional[_Iterable[bytes]] = ..., stored: _Optional[int] = ..., tail_tokens: _Optional[int] = ..., first_token: _Optional[int] = ..., generated: _Optional[int] = ..., cached_tokens: _Optional[_Mapping[str, int]] = ..., computed_tokens: _Optional[int] = ..., prefill_ms: _Optional[float] = ...) -> None: ...

class RequestId(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role", "revision", "number")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    role: str
    revision: int
    number: int
    def __init__(self, role: _Optional[str] = ..., revision: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("request_id", "target")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target: str
    def __init__(self, request_id: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("target", "timeout_ms")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    target: str
    timeout_ms: int
    def __init__(self, target: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("left",)
    LEFT_FIELD_NUMBER: _ClassVar[int]
    left: int
    def __init__(self, left: _Optional[int] = ...) -> None: ...
