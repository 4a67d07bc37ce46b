"""What the tests of the gRPC API share: identities, certificates, requests, and a client that is nothing but stubs."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import struct_pb2

from kvstore import Keys, Layout
from kvstore.pb import store_pb2 as pb
from kvstore.pb import store_pb2_grpc
from kvstore.wire.grpc import digest_of
from tests.helpers.content import SMALL
from tests.helpers.processes import Daemon, Machine

CALL_S = 10.0
CHUNK = 50_000  # no multiple of a page
FAILURES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


def identity(name: str, token: str = "", **more: str) -> str:
    """One table of an identities file, for the token ``<name>-token``."""
    digest = hashlib.sha256((token or f"{name}-token").encode()).hexdigest()
    fields = {"name": f'"{name}"', "token_sha256": f'"{digest}"', "salts": f'["{name}"]'} | more
    return "[[identity]]\n" + "".join(f"{key} = {value}\n" for key, value in fields.items() if value)


TENANTS = (
    identity("a")
    + identity("b")
    + identity("op", salts='["*"]', operator="true")
    + identity("late", salts='["*"]', operator="true", expires="2020-01-01")
)


def by_certificate(name: str, **more: str) -> str:
    """The same, known by the certificate of ``<name>.example`` alone."""
    return identity(name, **{"token_sha256": "", "certificate": f'"{name}.example"', **more})


TENANTS_BY_CERTIFICATE = (
    by_certificate("a")
    + by_certificate("b")
    + by_certificate("op", salts='["*"]', operator="true")
    + by_certificate("late", salts='["*"]', operator="true", expires="2020-01-01")
)


def identities_file(folder: Path, text: str = TENANTS) -> str:
    """Write it as it has to be; its path."""
    path = folder / "identities.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def serve_api(machine: Machine, name: str = "api", **flags: str) -> tuple[Daemon, str]:
    """A daemon with the API on a free port of loopback; and where."""
    daemon = machine.spawn(name, **{"dram": "64MiB", "listen": "127.0.0.1:0", **flags})
    return daemon, address_of(daemon.wait_ready())


def address_of(ready_line: str) -> str:
    """The first gRPC address in a ready line."""
    return ready_line.split("grpc on ")[1].split()[0]


@dataclass
class Certificates:
    """A certificate authority and what it signed: ``server`` for loopback, ``client`` with CN client.example; and one
    with CN NAME.example for each of ``names``. ``addresses``: of ``server`` beside loopback."""

    folder: Path
    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._run("req", "-x509", *self._new("ca"), "-subj", "/CN=test-ca", "-days", "2")
        addresses = ",".join(f"IP:{each}" for each in ("127.0.0.1", *self.addresses))
        for name, subject, extra in (
            ("server", "/CN=server", f"subjectAltName=DNS:localhost,{addresses}"),
            ("client", "/CN=client.example", "subjectAltName=DNS:alias.example"),
            ("other", "/CN=other.example", "subjectAltName=DNS:other.example"),
            *((name, f"/CN={name}.example", f"subjectAltName=DNS:{name}.example") for name in self.names),
        ):
            signer = ["-CA", self.path("ca.pem"), "-CAkey", self.path("ca.key")]
            names = ["-addext", extra, "-addext", "basicConstraints=CA:FALSE"]
            self._run("req", "-x509", *self._new(name), "-subj", subject, "-days", "2", *signer, *names)

    def _new(self, name: str) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        return [*curve, "-keyout", self.path(f"{name}.key"), "-out", self.path(f"{name}.pem")]

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def credentials(self, client: str = "") -> grpc.ChannelCredentials:
        """What a client needs: the authority, and a certificate of its own where one is named."""
        own = (self.read(f"{client}.key"), self.read(f"{client}.pem")) if client else (None, None)
        return grpc.ssl_channel_credentials(self.read("ca.pem"), *own)


class Client:
    """Stubs of one connection, in the name of one token."""

    def __init__(self, address: str, token: str | None = None, credentials: grpc.ChannelCredentials | None = None):
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = (
            grpc.secure_channel(address, credentials, options)
            if credentials is not None
            else grpc.insecure_channel(address, options)
        )
        self.stub = store_pb2_grpc.StoreStub(self.channel)
        self.metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()

    def call(self, name: str, request: Any, timeout_s: float = CALL_S) -> Any:
        """Make a call to its end; a stream of replies becomes a list. Requests may be a list too."""
        request = iter(request) if isinstance(request, list) else request
        reply = getattr(self.stub, name)(request, timeout=timeout_s, metadata=self.metadata)
        return list(reply) if isinstance(reply, Iterator) else reply

    def code(self, name: str, request: Any, timeout_s: float = CALL_S) -> grpc.StatusCode:
        """How a call ends."""
        try:
            self.call(name, request, timeout_s)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def read(self, pages: pb.Pages) -> bytes:
        """The bytes of what is stored of these pages."""
        return b"".join(reply.data for reply in self.call("Read", pb.ReadRequest(pages=pages)))

    def close(self) -> None:
        self.channel.close()


def layout_message(layout: Layout = SMALL) -> pb.Layout:
    """A layout as a request has it."""
    return pb.Layout(**{name: getattr(layout, name) for name in pb.Layout.DESCRIPTOR.fields_by_name})


def pages_message(keys: Keys, layout: Layout = SMALL, salt: str = "", parent: bytes = b"") -> pb.Pages:
    """These pages as a request names them."""
    tokens = keys.tokens.astype("<u4").tobytes()
    return pb.Pages(layout=layout_message(layout), salt=salt, tokens=tokens, parent=parent, whole_pages=True)


def data_messages(data: Any, kind: Callable[..., Any] = pb.WriteRequest, **more: Any) -> list[Any]:
    """``data`` in messages of ``CHUNK`` bytes."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8).tobytes()
    parts = [flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK)]
    return [kind(data=part, data_xxh3=digest_of(part), **more) for part in parts]


def write_messages(pages: pb.Pages, data: Any) -> list[pb.WriteRequest]:
    """A whole Write."""
    return [pb.WriteRequest(begin=pb.WriteBegin(pages=pages)), *data_messages(data)]


def put_messages(key: str, value: bytes, salt: str = "", replace: bool = False) -> list[pb.PutObjectRequest]:
    """A whole PutObject."""
    begin = pb.PutObjectBegin(key=key, salt=salt, size_bytes=len(value), replace=replace)
    data = data_messages(np.frombuffer(value, np.uint8), pb.PutObjectRequest) if value else []
    return [pb.PutObjectRequest(begin=begin), *data]


def struct(**fields: Any) -> struct_pb2.Struct:
    """A document."""
    made = struct_pb2.Struct()
    made.update(fields)
    return made


def reserved_messages(reservation: bytes, rows: Iterable[Any]) -> list[pb.WriteRequest]:
    """A whole Write of pages 0, 1, ... into a reservation, in pieces that cross layers."""
    messages = [pb.WriteRequest(begin=pb.WriteBegin(reservation=reservation))]
    for page, row in enumerate(rows):
        flat = row.tobytes()
        for offset in range(0, len(flat), 5000):
            part = flat[offset : offset + 5000]
            messages.append(pb.WriteRequest(data=part, data_xxh3=digest_of(part), page=page, offset=offset))
    return messages


def serve_with(machine: Machine, settings: str, **flags: str) -> tuple[Daemon, str]:
    """A daemon with these settings in its file."""
    config = machine.logs / "node.toml"
    config.write_text(f"[node]\n{settings}\n")
    return serve_api(machine, config=str(config), **flags)
