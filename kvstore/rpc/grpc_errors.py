"""Errors over gRPC: one table, both directions.

A refused call ends with the status code below, the message as its details, and trailing metadata: ``kvstore-error``
names the class, ``kvstore-field`` the field of InvalidRequest, ``retry-after-ms`` when to try again. A client makes of
them what a local store would have raised. Codes are by name, so that this module needs no gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvstore import errors
from kvstore.errors import InvalidRequest, KVStoreError

ERROR_KEY: Final = "kvstore-error"
FIELD_KEY: Final = "kvstore-field"
RETRY_KEY: Final = "retry-after-ms"
_TOO_LARGE: Final = "message larger than max"
RETRY_AFTER_S: Final = 1.0  # where the error names none: by then leases may have ended, and pages been saved
DETAILS_BYTES_MAX: Final = 1024  # of trailing metadata there may be 8 KiB in all


class NotServed(errors.VersionMismatch):
    """This node does not know that call: a later version does."""


# The nearest class in the table speaks for one that is not in it.
CODES: Final[Mapping[type[KVStoreError], str]] = {
    errors.InvalidRequest: "INVALID_ARGUMENT",
    errors.NodeUnavailable: "UNAVAILABLE",
    errors.DeadlineExceeded: "DEADLINE_EXCEEDED",
    errors.InternalError: "INTERNAL",
    errors.TooManyCalls: "RESOURCE_EXHAUSTED",
    errors.OutOfSpace: "RESOURCE_EXHAUSTED",
    errors.Unavailable: "UNAVAILABLE",
    errors.Unauthenticated: "UNAUTHENTICATED",
    errors.PermissionDenied: "PERMISSION_DENIED",
    errors.LeaseBroken: "ABORTED",
    NotServed: "UNIMPLEMENTED",
    errors.VersionMismatch: "FAILED_PRECONDITION",
    errors.NodeBusy: "ALREADY_EXISTS",
    errors.KVStoreError: "UNKNOWN",
}

# For statuses that gRPC itself, a proxy or a node of another version ended a call with. Others are KVStoreError.
CLASSES: Final[Mapping[str, type[KVStoreError]]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.InvalidRequest,
    "UNAVAILABLE": errors.NodeUnavailable,
    "CANCELLED": errors.NodeUnavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "INTERNAL": errors.InternalError,
    "RESOURCE_EXHAUSTED": errors.TooManyCalls,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "ABORTED": errors.LeaseBroken,
    "FAILED_PRECONDITION": errors.VersionMismatch,
    "UNIMPLEMENTED": errors.VersionMismatch,  # a node of another version does not know the call
    "ALREADY_EXISTS": errors.NodeBusy,
}


def status_of(error: KVStoreError) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Name of the status code, details and trailing metadata that say ``error``."""
    code = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    metadata = [(ERROR_KEY, type(error).__name__)]
    details = str(error)
    if isinstance(error, InvalidRequest):
        metadata.append((FIELD_KEY, _printable(error.field)))
    retry_after_s = getattr(error, "retry_after_s", RETRY_AFTER_S if code == "RESOURCE_EXHAUSTED" else None)
    if retry_after_s is not None:
        metadata.append((RETRY_KEY, str(max(1, int(retry_after_s * 1000)))))
    return code, details.encode(errors="replace")[:DETAILS_BYTES_MAX].decode(errors="ignore"), tuple(metadata)


def error_of(code: str, details: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> KVStoreError:
    """The error that a call's status says. ``code`` is a status code's name."""
    said = {key: value for key, value in metadata if isinstance(value, str)}
    kind = CLASSES.get(code, KVStoreError)
    if code == "RESOURCE_EXHAUSTED" and _TOO_LARGE in details:  # by gRPC itself; to retry would not help
        kind = InvalidRequest
    named = getattr(errors, said.get(ERROR_KEY, ""), None)
    if isinstance(named, type) and issubclass(named, KVStoreError):
        kind = named
    if issubclass(kind, InvalidRequest):
        field = said.get(FIELD_KEY, "request")
        return kind(field, details.removeprefix(f"{field}: "))
    error = kind(details or code)
    retry_ms = said.get(RETRY_KEY, "")
    if retry_ms.isdecimal():
        error.__dict__["retry_after_s"] = int(retry_ms) / 1000
    return error


def from_rpc(error: Any) -> KVStoreError:
    """The error that a client's ``grpc.RpcError`` says."""
    code = error.code() if hasattr(error, "code") else None
    if code is None:
        return KVStoreError(str(error))
    return error_of(code.name, error.details() or "", error.trailing_metadata() or ())


def _printable(field: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in field)[:100]
