"""The errors that kvstore raises on purpose.

::

    KVStoreError                  the parent of all others
    ├── InvalidRequest            a mistake of the caller; names the field; nothing was changed; do not retry
    ├── Unavailable               the other end cannot answer now; retry later
    │   ├── NodeUnavailable       the node does not exist, or its daemon is down
    │   ├── DeadlineExceeded      the other end did not answer in time, or a layer did not arrive in time
    │   ├── InternalError         a bug at the other end; its log has the stack
    │   ├── TooManyCalls          the node has reached its limit of calls; retry after ``retry_after_s``
    │   └── OutOfSpace            no frame is free, and no page can be evicted
    │       └── QuotaExceeded     the tenant has reached its quota; retry after ``retry_after_s``
    ├── Unauthenticated           the node does not know this caller, or its identity has expired
    ├── PermissionDenied          the caller may not make this call, or not under this salt
    ├── LeaseBroken               a lease was used after its deadline, and its pages changed; discard what was read
    ├── VersionMismatch           client and node have different versions; upgrade one
    └── NodeBusy                  another daemon uses the node name or the device

A miss is a value (a shorter ``Match``), never an exception. Our own bugs are ``AssertionError``.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """The parent of all errors that this package raises on purpose."""


class InvalidRequest(KVStoreError, ValueError):
    """A mistake of the caller. Nothing was changed.

    Attributes:
        field: the argument or setting that is invalid.
        reason: why, in one line.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str]]:
        return type(self), (self.field, self.reason)


class Unavailable(KVStoreError):
    """The other end cannot answer now. Retry later."""


class NodeUnavailable(Unavailable):
    """The node does not exist, or its daemon is down."""


class DeadlineExceeded(Unavailable, TimeoutError):
    """There was no answer within the deadline. A put may or may not have been sealed; a later lookup shows which."""


class InternalError(Unavailable):
    """This request failed because of a bug at the other end, which continues to serve other requests.

    The request may have been done in part. The other end's log has the stack, and its metrics count the error.
    """


class TooManyCalls(Unavailable):
    """The node has reached its limit of concurrent calls. Nothing was done.

    Attributes:
        retry_after_s: seconds after which to retry.
        kind: the limit that was reached, for the node's own metrics. Clients do not receive it.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.1, kind: str = "other") -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.kind = kind


class OutOfSpace(Unavailable):
    """No frame could be granted: all frames are leased or reserved, or contain ancestors of the new pages."""


class Unauthenticated(KVStoreError):
    """The node does not accept the caller's token or certificate: it is missing, wrong or expired. Nothing was done."""


class PermissionDenied(KVStoreError):
    """The caller may not make this call: only operators may, or the salt is another tenant's. Nothing was done."""


class QuotaExceeded(OutOfSpace):
    """The tenant has reached its quota with pages that cannot be evicted now. Nothing was stored.

    Attributes:
        retry_after_s: a hint, in seconds, when to retry.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LeaseBroken(KVStoreError):
    """A lease was used after its deadline, and its pages have changed. Discard all bytes that were read through it."""


class VersionMismatch(KVStoreError):
    """Client and node have different versions of a protocol or a file format."""


class NodeBusy(KVStoreError):
    """Another daemon uses the node name or the device."""
