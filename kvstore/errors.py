"""The errors that kvstore raises on purpose.

::

    KVStoreError                  the parent of all others
    ├── InvalidRequest            a mistake of the caller; names the field; nothing was changed; do not retry
    ├── Unavailable               the other end cannot answer now; retry later
    │   ├── NodeUnavailable       there is no such node, or its daemon is down
    │   ├── DeadlineExceeded      the other end did not answer, or a layer did not arrive, in time
    │   ├── InternalError         a bug at the other end; its log and its metrics say where
    │   ├── TooManyCalls          the node serves as many calls as it may; ``retry_after_s`` says when to retry
    │   └── OutOfSpace            no frame is free, and no page may be evicted
    │       └── QuotaExceeded     the tenant has all that its quota allows; ``retry_after_s`` says when to retry
    ├── Unauthenticated           the node does not know this caller, or its identity has expired
    ├── PermissionDenied          this caller may not do that, or not under that salt
    ├── LeaseBroken               a lease was used after its deadline, and its pages changed; discard what was read
    ├── VersionMismatch           client and node have different versions; upgrade one
    └── NodeBusy                  another daemon has that node name or device

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
    """The other end cannot answer now. Nothing is known to be lost. Try again later."""


class NodeUnavailable(Unavailable):
    """There is no such node, or its daemon is down."""


class DeadlineExceeded(Unavailable, TimeoutError):
    """There was no answer within the deadline. A put may have been sealed or not; a later lookup shows it."""


class InternalError(Unavailable):
    """This request met a bug at the other end, which continues to serve other requests.

    It is unknown how much of the request was done. The other end's log has the stack, and its metrics count the error.
    """


class TooManyCalls(Unavailable):
    """The node serves as many calls as it may. Nothing was done.

    Attributes:
        retry_after_s: try again after this time.
        kind: the resource that was used up, for the node's own metrics. Clients do not receive it.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.1, kind: str = "other") -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.kind = kind


class OutOfSpace(Unavailable):
    """No frame could be granted: all are leased or reserved, or hold ancestors of the new pages."""


class Unauthenticated(KVStoreError):
    """The node does not know this caller: no token or certificate, a wrong one, or an expired one. Nothing was done."""


class PermissionDenied(KVStoreError):
    """This caller may not do that: only operators may, or the salt is another tenant's. Nothing was done."""


class QuotaExceeded(OutOfSpace):
    """Nothing was stored: the tenant has all that its quota allows, in pages that cannot be evicted now.

    Attributes:
        retry_after_s: a hint when to try again.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LeaseBroken(KVStoreError):
    """A lease was used after its deadline, and its pages changed. Bytes read through its views must be discarded."""


class VersionMismatch(KVStoreError):
    """Client and node have different versions of a protocol or a file format."""


class NodeBusy(KVStoreError):
    """Another daemon has that node name or device."""
