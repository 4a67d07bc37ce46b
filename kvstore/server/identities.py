"""Identities: who may call a node over gRPC, and for which salts.

A TOML file, readable by its owner only::

    [[identity]]
    name = "team-a"
    token_sha256 = "9f86d0..."       # sha256 of the token, 64 hex digits
    certificate = "team-a.example"   # common or alternative name of the client's certificate; with a token: both needed
    salts = ["team-a", "shared"]     # whose pages it may read and write; ["*"]: all
    operator = false                 # whether it may also evict, list, verify, ...
    expires = 2027-01-31             # the last day (UTC), or a moment; absent: never

The file is read again when it changes and on SIGHUP. If the new file is not valid, that is logged, and the identities
read before stay in force.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.errors import InvalidRequest, PermissionDenied, Unauthenticated

ALL_SALTS: Final = "*"
LOOK_S: Final = 0.5  # the least time between two checks of the file
IDENTITIES_MAX: Final = 4096
FILE_BYTES_MAX: Final = 8 << 20

_HEX = re.compile(r"[0-9a-fA-F]{64}")
_KEYS: Final = ("name", "token_sha256", "certificate", "salts", "operator", "expires")
# The same message whichever part was wrong.
UNKNOWN: Final = "the node does not know this caller: give a valid token or certificate"

log = logging.getLogger("kvstore.api")


@dataclass(frozen=True)
class Identity:
    """A caller. ``expires_s`` is in seconds since the epoch; None if the identity never expires."""

    name: str
    salts: frozenset[str]
    operator: bool = False
    token_digest: bytes | None = field(default=None, repr=False)
    certificate: str | None = None
    expires_s: float | None = None

    def may_use(self, salt: str) -> bool:
        """Return True if the caller owns the pages under ``salt``."""
        return ALL_SALTS in self.salts or salt in self.salts

    def check_salt(self, salt: str) -> None:
        """Raise PermissionDenied unless ``may_use``."""
        if not self.may_use(salt):
            raise PermissionDenied(f"salt {salt!r} is not one of {self.name}'s")

    def check_operator(self) -> None:
        """Raise PermissionDenied unless the caller is an operator."""
        if not self.operator:
            raise PermissionDenied(f"{self.name} is not an operator")


LOCAL: Final = Identity("local", frozenset({ALL_SALTS}), operator=True)
"""A caller that may open the unix socket, or reaches a loopback address that asks for no identity."""


def is_tenant(identity: Identity) -> bool:
    """Return True if the caller is a tenant with limits: neither an operator nor an unnamed caller."""
    return not identity.operator


class Identities:
    """The identities in a file. Without a file every caller is ``LOCAL``. Any thread may call the methods.

    Raises:
        InvalidRequest: the file cannot be read, can be read by other users, or is not valid.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._state: tuple[int, ...] = ()
        self._looked_s = time.monotonic()
        self._identities: frozenset[Identity] = frozenset()
        self._by_digest: dict[bytes | None, list[Identity]] = {}  # None: identities without a token
        if path is not None:
            identities, self._state = _read(path)
            self._keep(identities)

    @property
    def required(self) -> bool:
        """True if callers have to identify themselves."""
        return self.path is not None

    @property
    def by_certificate(self) -> bool:
        """True if some callers are identified by their certificate."""
        return any(identity.certificate is not None for identity in self._identities)

    def find(self, token: str | None, certificates: Iterable[str]) -> Identity:
        """Return the identity of a caller with this token and a certificate with these names.

        Identities are looked up by the token's digest, so the time that takes reveals nothing about tokens.

        Raises:
            Unauthenticated: the caller is unknown, or its identity has expired.
        """
        if self.path is None:
            return LOCAL
        self._look()
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest() if token is not None else None
        names = set(certificates)
        identity = next(
            (i for i in self._by_digest.get(digest, ()) if i.certificate is None or i.certificate in names), None
        )
        if identity is None:
            raise Unauthenticated(UNKNOWN)
        self._check_time(identity)
        return identity

    def check(self, identity: Identity) -> None:
        """Raise Unauthenticated if the identity has expired, or is no longer in the file."""
        if identity is LOCAL:
            return
        self._look()
        if identity not in self._identities:
            raise Unauthenticated(UNKNOWN)
        self._check_time(identity)

    def reload(self) -> None:
        """Read the file now (SIGHUP). If it is not valid, the identities read before stay in force."""
        if self.path is None:
            return
        try:
            identities, self._state = _read(self.path)
        except InvalidRequest as error:
            log.error("%s; the identities read before stay in force", error)
            self._state = _state_of(self.path)
        else:
            self._keep(identities)
            log.info("%d identities read from %s", len(identities), self.path)

    def _keep(self, identities: tuple[Identity, ...]) -> None:
        by_digest: dict[bytes | None, list[Identity]] = {}
        for identity in identities:
            by_digest.setdefault(identity.token_digest, []).append(identity)
        self._identities, self._by_digest = frozenset(identities), by_digest

    def _look(self) -> None:
        now_s = time.monotonic()
        if self.path is not None and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            if _state_of(self.path) != self._state:
                self.reload()

    def _check_time(self, identity: Identity) -> None:
        if identity.expires_s is not None and self._clock() >= identity.expires_s:
            raise Unauthenticated(UNKNOWN)


def _state_of(path: Path) -> tuple[int, ...]:
    try:
        return _state(os.stat(path))
    except OSError:
        return ()


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read(path: Path) -> tuple[tuple[Identity, ...], tuple[int, ...]]:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest("identities", f"{path} is not a file")
            if status.st_mode & 0o077:
                raise InvalidRequest("identities", f"{path} can be read or written by others: chmod 600 {path}")
            if status.st_uid not in (0, os.geteuid()):
                raise InvalidRequest("identities", f"{path} belongs to another user: chown it to the daemon's")
            if status.st_size > FILE_BYTES_MAX:
                raise InvalidRequest(
                    "identities", f"{path} has more than {FILE_BYTES_MAX} bytes (got {status.st_size})"
                )
            document = tomllib.loads(file.read(FILE_BYTES_MAX).decode())
    except OSError as error:
        raise InvalidRequest("identities", f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("identities", f"{path} is not TOML: {error}") from None
    return parse(document, str(path)), _state(status)


def parse(document: dict[str, Any], source: str) -> tuple[Identity, ...]:
    """Parse the identities in a TOML document. Raises InvalidRequest with the name of the invalid entry."""
    entries = document.get("identity", [])
    _require(
        set(document) <= {"identity"},
        f"{source}: must have [[identity]] tables and nothing else",
        sorted(document),
    )
    _require(isinstance(entries, list) and entries != [], f"{source}: must have at least one [[identity]]")
    _require(
        len(entries) <= IDENTITIES_MAX, f"{source}: must have at most {IDENTITIES_MAX} identities (got {len(entries)})"
    )
    identities: list[Identity] = []
    for number, entry in enumerate(entries, 1):
        _require(isinstance(entry, dict), f"{source}: must have [[identity]] with double brackets")
        identities.append(_parse_one(entry, f"{source}, identity {number}"))
    for part, values in (
        ("name", [identity.name for identity in identities]),
        ("token and certificate", [(identity.token_digest, identity.certificate) for identity in identities]),
    ):
        _require(len(set(values)) == len(values), f"{source}: two identities have the same {part}")
    return tuple(identities)


def _parse_one(entry: dict[str, Any], where: str) -> Identity:
    unknown = sorted(set(entry) - set(_KEYS))
    _require(not unknown, f"{where}: {', '.join(unknown)} is not one of {', '.join(_KEYS)}")
    name, token, certificate = entry.get("name"), entry.get("token_sha256"), entry.get("certificate")
    _require(isinstance(name, str) and name != "", f"{where}: name must be text", name)
    where = f"{where} ({name})"
    _require(token is not None or certificate is not None, f"{where}: needs token_sha256 or certificate")
    is_digest = token is None or (isinstance(token, str) and _HEX.fullmatch(token) is not None)
    _require(is_digest, f"{where}: token_sha256 must be 64 hex digits, the output of printf %s TOKEN | sha256sum")
    is_name = certificate is None or (isinstance(certificate, str) and certificate != "")
    _require(is_name, f"{where}: certificate must be a common or alternative name", certificate)
    salts = entry.get("salts")
    _require(
        isinstance(salts, list) and all(isinstance(s, str) for s in salts),
        f"{where}: salts must be a list of texts",
        salts,
    )
    operator = entry.get("operator", False)
    _require(isinstance(operator, bool), f"{where}: operator must be true or false", operator)
    digest = bytes.fromhex(token) if token is not None else None
    return Identity(str(name), frozenset(salts or ()), operator, digest, certificate, _expiry(entry, where))


def _expiry(entry: dict[str, Any], where: str) -> float | None:
    value = entry.get("expires")
    if value is None:
        return None
    if isinstance(value, datetime.datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)).timestamp()
    _require(isinstance(value, datetime.date), f"{where}: expires must be a date, such as 2027-01-31", value)
    after = datetime.datetime.combine(value, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
    return after.timestamp()


def _require(holds: bool, reason: str, *values: object) -> None:
    """Raise InvalidRequest unless ``holds``. The message shows ``values``, the refused values."""
    if not holds:
        got = f" (got {repr(values[0])[:80]})" if values else ""
        raise InvalidRequest("identities", reason + got)
