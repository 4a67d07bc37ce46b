from google.protobuf import struct_pb2 as _struct_pb2
from kvstore.pb import engine_pb2 as _engine_pb2
from kvstore.pb import store_pb2 as _store_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteRequest(_message.Message):
    __slots__ = ("request", "model", "tenant", "priority", "first_token_ms", "token_ms", "explain")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    request: _engine_pb2.SubmitRequest
    model: str
    tenant: str
    priority: int
    first_token_ms: int
    token_ms: int
    explain: bool
    def __init__(self, request: _Optional[_Union[_engine_pb2.SubmitRequest, _Mapping]] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., first_token_ms: _Optional[int] = ..., token_ms: _Optional[int] = ..., explain: _Optional[bool] = ...) -> None: ...

class RouteReply(_message.Message):
    __slots__ = ("route", "tokens", "finished")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    route: _struct_pb2.Struct
    tokens: _engine_pb2.Tokens
    finished: _engine_pb2.Finished
    def __init__(self, route: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., tokens: _Optional[_Union[_engine_pb2.Tokens, _Mapping]] = ..., finished: _Optional[_Union[_engine_pb2.Finished, _Mapping]] = ...) -> None: ...
