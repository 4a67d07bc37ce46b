from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AboutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AboutReply(_message.Message):
    __slots__ = ("name", "version", "identity", "operator", "salts", "extent_bytes", "message_bytes_max", "ranks_max", "object_bytes_max")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    SALTS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    RANKS_MAX_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    identity: str
    operator: bool
    salts: _containers.RepeatedScalarFieldContainer[str]
    extent_bytes: int
    message_bytes_max: int
    ranks_max: int
    object_bytes_max: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., identity: _Optional[str] = ..., operator: _Optional[bool] = ..., salts: _Optional[_Iterable[str]] = ..., extent_bytes: _Optional[int] = ..., message_bytes_max: _Optional[int] = ..., ranks_max: _Optional[int] = ..., object_bytes_max: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("model", "layers", "kv_heads", "head_dim", "dtype", "page_tokens", "revision", "weights_digest", "mla_latent", "mla_rope", "attention", "window", "rope", "group")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MLA_LATENT_FIELD_NUMBER: _ClassVar[int]
    MLA_ROPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int
    revision: str
    weights_digest: str
    mla_latent: int
    mla_rope: int
    attention: str
    window: int
    rope: str
    group: str
    def __init__(self, model: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., page_tokens: _Optional[int] = ..., revision: _Optional[str] = ..., weights_digest: _Optional[str] = ..., mla_latent: _Optional[int] = ..., mla_rope: _Optional[int] = ..., attention: _Optional[str] = ..., window: _Optional[int] = ..., rope: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class Pages(_message.Message):
    __slots__ = ("layout", "salt", "adapter", "tokens", "extras", "parent", "whole_pages", "retention", "replicas")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    salt: str
    adapter: str
    tokens: bytes
    extras: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    whole_pages: bool
    retention: _containers.RepeatedCompositeFieldContainer[Retention]
    replicas: int
    def __init__(self, layout: _Optional[_Union[Layout, _Mapping]] = ..., salt: _Optional[str] = ..., adapter: _Optional[str] = ..., tokens: _Optional[bytes] = ..., extras: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ..., whole_pages: _Optional[bool] = ..., retention: _Optional[_Iterable[_Union[Retention, _Mapping]]] = ..., replicas: _Optional[int] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("priority", "ttl_s", "start", "stop")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    priority: int
    ttl_s: float
    start: int
    stop: int
    def __init__(self, priority: _Optional[int] = ..., ttl_s: _Optional[float] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: Pages
    def __init__(self, pages: _Optional[_Union[Pages, _Mapping]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("pages", "tokens", "nvme_pages", "reason", "keys")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NVME_PAGES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    pages: int
    tokens: int
    nvme_pages: int
    reason: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, pages: _Optional[int] = ..., tokens: _Optional[int] = ..., nvme_pages: _Optional[int] = ..., reason: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("pages", "verify", "rank", "ranks", "stage", "stages")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    pages: Pages
    verify: bool
    rank: int
    ranks: int
    stage: int
    stages: int
    def __init__(self, pages: _Optional[_Union[Pages, _Mapping]] = ..., verify: _Optional[bool] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("match", "data", "data_xxh3")
    MATCH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATA_XXH3_FIELD_NUMBER: _ClassVar[int]
    match: LookupReply
    data: bytes
    data_xxh3: int
    def __init__(self, match: _Optional[_Union[LookupReply, _Mapping]] = ..., data: _Optional[bytes] = ..., data_xxh3: _Optional[int] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("begin", "data", "data_xxh3", "page", "offset")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATA_XXH3_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    begin: WriteBegin
    data: bytes
    data_xxh3: int
    page: int
    offset: int
    def __init__(self, begin: _Optional[_Union[WriteBegin, _Mapping]] = ..., data: _Optional[bytes] = ..., data_xxh3: _Optional[int] = ..., page: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class WriteBegin(_message.Message):
    __slots__ = ("pages", "reservation")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    pages: Pages
    reservation: bytes
    def __init__(self, pages: _Optional[_Union[Pages, _Mapping]] = ..., reservation: _Optional[bytes] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("new_pages", "pages")
    NEW_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    new_pages: int
    pages: int
    def __init__(self, new_pages: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("pages", "write_group", "rank", "ranks", "ttl_ms", "stage", "stages")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WRITE_GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    pages: Pages
    write_group: str
    rank: int
    ranks: int
    ttl_ms: int
    stage: int
    stages: int
    def __init__(self, pages: _Optional[_Union[Pages, _Mapping]] = ..., write_group: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation", "wanted")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    reservation: bytes
    wanted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation: _Optional[bytes] = ..., wanted: _Optional[_Iterable[int]] = ...) -> None: ...

class ReservationRequest(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: bytes
    def __init__(self, reservation: _Optional[bytes] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("pages", "ttl_ms")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    pages: Pages
    ttl_ms: int
    def __init__(self, pages: _Optional[_Union[Pages, _Mapping]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease", "pages", "ttl_ms", "reason")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    pages: int
    ttl_ms: int
    reason: str
    def __init__(self, lease: _Optional[bytes] = ..., pages: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease", "ttl_ms")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    ttl_ms: int
    def __init__(self, lease: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    def __init__(self, lease: _Optional[bytes] = ...) -> None: ...

class PutObjectRequest(_message.Message):
    __slots__ = ("begin", "data", "data_xxh3")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATA_XXH3_FIELD_NUMBER: _ClassVar[int]
    begin: PutObjectBegin
    data: bytes
    data_xxh3: int
    def __init__(self, begin: _Optional[_Union[PutObjectBegin, _Mapping]] = ..., data: _Optional[bytes] = ..., data_xxh3: _Optional[int] = ...) -> None: ...

class PutObjectBegin(_message.Message):
    __slots__ = ("key", "salt", "size_bytes", "replace", "group", "count")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    key: str
    salt: str
    size_bytes: int
    replace: bool
    group: str
    count: int
    def __init__(self, key: _Optional[str] = ..., salt: _Optional[str] = ..., size_bytes: _Optional[int] = ..., replace: _Optional[bool] = ..., group: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class PutObjectReply(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    def __init__(self, stored: _Optional[bool] = ...) -> None: ...

class GetObjectRequest(_message.Message):
    __slots__ = ("key", "salt", "local")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    key: str
    salt: str
    local: bool
    def __init__(self, key: _Optional[str] = ..., salt: _Optional[str] = ..., local: _Optional[bool] = ...) -> None: ...

class GetObjectReply(_message.Message):
    __slots__ = ("found", "size_bytes", "data", "data_xxh3", "grouped")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATA_XXH3_FIELD_NUMBER: _ClassVar[int]
    GROUPED_FIELD_NUMBER: _ClassVar[int]
    found: bool
    size_bytes: int
    data: bytes
    data_xxh3: int
    grouped: bool
    def __init__(self, found: _Optional[bool] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., data_xxh3: _Optional[int] = ..., grouped: _Optional[bool] = ...) -> None: ...

class ObjectKeys(_message.Message):
    __slots__ = ("keys", "salt", "local")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    salt: str
    local: bool
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., salt: _Optional[str] = ..., local: _Optional[bool] = ...) -> None: ...

class ObjectsFound(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, found: _Optional[_Iterable[bool]] = ...) -> None: ...

class ObjectsRemoved(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class ClearObjectsRequest(_message.Message):
    __slots__ = ("prefix", "salt", "local")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    salt: str
    local: bool
    def __init__(self, prefix: _Optional[str] = ..., salt: _Optional[str] = ..., local: _Optional[bool] = ...) -> None: ...

class PagesRequest(_message.Message):
    __slots__ = ("limit", "tier", "salt", "after", "order", "age_s", "prompt")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    tier: str
    salt: str
    after: str
    order: str
    age_s: float
    prompt: Pages
    def __init__(self, limit: _Optional[int] = ..., tier: _Optional[str] = ..., salt: _Optional[str] = ..., after: _Optional[str] = ..., order: _Optional[str] = ..., age_s: _Optional[float] = ..., prompt: _Optional[_Union[Pages, _Mapping]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("tier", "pages", "bytes", "percent", "age_s", "salt", "prompt", "dry_run")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    tier: str
    pages: int
    bytes: int
    percent: float
    age_s: float
    salt: str
    prompt: Pages
    dry_run: bool
    def __init__(self, tier: _Optional[str] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., percent: _Optional[float] = ..., age_s: _Optional[float] = ..., salt: _Optional[str] = ..., prompt: _Optional[_Union[Pages, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("prompt", "ttl_s")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    prompt: Pages
    ttl_s: float
    def __init__(self, prompt: _Optional[_Union[Pages, _Mapping]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin", "prompt")
    PIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    pin: str
    prompt: Pages
    def __init__(self, pin: _Optional[str] = ..., prompt: _Optional[_Union[Pages, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class PageBatch(_message.Message):
    __slots__ = ("stream", "number", "fingerprints", "marks", "whole")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    number: int
    fingerprints: bytes
    marks: bytes
    whole: bool
    def __init__(self, stream: _Optional[int] = ..., number: _Optional[int] = ..., fingerprints: _Optional[bytes] = ..., marks: _Optional[bytes] = ..., whole: _Optional[bool] = ...) -> None: ...
