"""Every error a caller can meet.

::

    KVStoreError                  anything this package raises on purpose
    ├── InvalidRequest            the caller's mistake; names the field; nothing was changed; do not retry
    ├── Unavailable               the other end cannot answer now; retry later
    │   ├── NodeUnavailable       no node of that name, or its daemon is down
    │   ├── DeadlineExceeded      it did not answer (or a layer did not arrive) in time
    │   ├── InternalError         the other end failed at this request; its log and its metrics say where
    │   ├── TooManyCalls          the node serves as many remote calls as it may; ``retry_after_s`` says when to retry
    │   └── OutOfSpace            every frame is leased, reserved or younger than what would have to leave
    │       └── QuotaExceeded     the tenant has all it may have; names retry_after_s
    ├── Unauthenticated           the node does not know this caller, or its identity has expired
    ├── PermissionDenied          this caller may not do that, or not under that salt
    ├── LeaseBroken               pages changed under a lease that was overstayed; what was read must be discarded
    ├── VersionMismatch           client and node speak different versions; upgrade one
    └── NodeBusy                  another daemon holds that node name or device

A miss is a value (a shorter ``Match``), never an exception. Our own bugs are ``AssertionError``.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Parent of everything this package raises on purpose."""


class InvalidRequest(KVStoreError, ValueError):
    """The caller's mistake. ``field`` names what was wrong, ``reason`` says why in one line. Nothing was changed."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str]]:
        return type(self), (self.field, self.reason)


class Unavailable(KVStoreError):
    """The other end cannot answer now. Nothing is known to be lost; trying again later is sensible."""


class NodeUnavailable(Unavailable):
    """There is no node of that name on this machine, or its daemon is down."""


class DeadlineExceeded(Unavailable, TimeoutError):
    """No answer within the deadline. A put may or may not have been sealed; a later lookup tells."""


class InternalError(Unavailable):
    """The other end failed at this request for a reason that it does not expect, and goes on serving others.

    What it did before it failed is not known. Its log has the stack, its metrics count the error by place."""


class TooManyCalls(Unavailable):
    """The node serves as many remote calls as it may. Nothing was done; try again after ``retry_after_s`` seconds.

    ``kind``: of what there were too many, for the node's own metrics; it does not travel.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.1, kind: str = "other") -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.kind = kind


class OutOfSpace(Unavailable):
    """No frame could be granted: all are leased, reserved, or hold the ancestors of what is being written."""


class Unauthenticated(KVStoreError):
    """The node does not know this caller: no token or certificate, a wrong one, or an expired one. Nothing was done."""


class PermissionDenied(KVStoreError):
    """This caller may not do that: it is for operators, or for another tenant's salt. Nothing was done."""


class QuotaExceeded(OutOfSpace):
    """Nothing was stored: the tenant has all it may have, in pages that may not leave. ``retry_after_s``: a hint."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LeaseBroken(KVStoreError):
    """Pages changed under a lease that was overstayed. Bytes read through its views must be discarded."""


class VersionMismatch(KVStoreError):
    """Client and node speak different versions of the local protocol or of the file formats."""


class NodeBusy(KVStoreError):
    """Another daemon already holds that node name."""
