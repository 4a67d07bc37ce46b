"""Errors in the form of OpenAI's API.

Each error has an HTTP status, and a document that names the parameter::

    {"error": {"message": "...", "type": "invalid_request_error", "param": "top_p", "code": "invalid_value"}}
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from kvstore.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVStoreError,
    OutOfSpace,
    PermissionDenied,
    TooManyCalls,
    Unauthenticated,
)

INVALID, KEY, DENIED = "invalid_request_error", "authentication_error", "permission_error"
LIMITED, SERVER = "rate_limit_error", "server_error"
RENAMED = {"sampling.": "", "tokens": "prompt"}  # the start of a field's name -> the client's name for it
RETRYABLE: Final = frozenset((408, 429, 503))  # a repeated request may succeed later, or at another conductor


class Refusal(Exception):
    """An error reply to a client.

    OpenAI's clients retry twice after every status of 500 or higher, unless ``x-should-retry`` is "false". So this
    header is "false" if the request missed its deadline or hit an internal error: a retry would fail in the same way.

    Attributes:
        status: the HTTP status.
        headers: headers of the reply. ``Retry-After`` has whole seconds. OpenAI's clients prefer ``retry-after-ms``.
        document: the JSON document of the reply.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.headers["x-should-retry"] = "true" if status in RETRYABLE else "false"
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
            self.headers["retry-after-ms"] = str(max(1, math.ceil(1e3 * retry_after_s)))
        self.document: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def body(self) -> bytes:
        """The document as JSON."""
        return json.dumps(self.document).encode()


def invalid(param: str | None, message: str, code: str = "invalid_value") -> Refusal:
    """Return the refusal for an invalid parameter. ``param`` is None if no single parameter is the cause."""
    return Refusal(400, INVALID, message if param is None else f"{param}: {message}", param=param, code=code)


def refusal_of(error: KVStoreError) -> Refusal:
    """Return the refusal for an error of this package."""
    match error:
        case InvalidRequest():
            param = error.field
            for inner, outer in RENAMED.items():
                param = param.replace(inner, outer, 1) if param.startswith(inner) else param
            code = "context_length_exceeded" if "context" in error.reason else "invalid_value"
            return invalid(param, error.reason, code)
        case Unauthenticated():
            return Refusal(401, KEY, "send a valid API key: Authorization: Bearer KEY", code="invalid_api_key")
        case PermissionDenied():
            return Refusal(403, DENIED, str(error), code="permission_denied")
        case TooManyCalls():
            return Refusal(429, LIMITED, str(error), code="overloaded", retry_after_s=error.retry_after_s)
        case OutOfSpace():
            return Refusal(503, SERVER, str(error), code="out_of_space", retry_after_s=1.0)
        case InternalError():
            return internal()
        case DeadlineExceeded():
            return Refusal(504, SERVER, str(error), code="deadline_exceeded")
    return Refusal(503, SERVER, str(error), code="unavailable", retry_after_s=1.0)


def internal() -> Refusal:
    """Return the refusal for an internal error. Only the log has its details."""
    return Refusal(500, SERVER, "internal error; the log of the server has the details", code="internal_error")
