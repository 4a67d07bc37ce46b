"""A client that knows nothing but the reflection service: what the API says of itself is enough to use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import xxhash
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvstore import Keys, Layout
from kvstore.model.prefix import as_tokens, root_key
from kvstore.pb import store_pb2 as pb
from tests.helpers import api
from tests.helpers.content import contents, prompt
from tests.helpers.processes import Machine

SERVICE = "kvstore.v1.Store"


class Reflected:
    """Messages and methods as the node describes them."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        database = ProtoReflectionDescriptorDatabase(self._channel)
        assert SERVICE in database.get_services()
        self._pool = descriptor_pool.DescriptorPool(database)
        self._service = self._pool.FindServiceByName(SERVICE)

    def make(self, name: str, **fields: Any) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"kvstore.v1.{name}"))(**fields)

    def data(self, name: str, data: bytes, size: int = 10_000) -> list[Any]:
        """These bytes in messages that cross pages, each with its digest."""
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        return [self.make(name, data=part, data_xxh3=xxhash.xxh3_64_intdigest(part)) for part in parts]

    def call(self, name: str, *requests: Any) -> Any:
        method = self._service.methods_by_name[name]
        reply = message_factory.GetMessageClass(method.output_type)
        kind = "_".join(
            "stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)
        )
        made = getattr(self._channel, kind)(
            f"/{SERVICE}/{name}", lambda request: request.SerializeToString(), reply.FromString
        )
        given = iter(requests) if method.client_streaming else requests[0]
        found = made(given, timeout=60)
        return list(found) if isinstance(found, Iterator) else found


def test_a_client_by_reflection_alone(machine: Machine) -> None:
    _, address = api.serve_api(machine)
    node = Reflected(address)
    layout = node.make("Layout", model="any", layers=2, kv_heads=2, head_dim=64, page_tokens=16)
    tokens = prompt(3, 5, Layout(model="any", layers=2, page_tokens=16, head_dim=1))
    pages = node.make("Pages", layout=layout, tokens=tokens.tobytes(), salt="s")
    ours = Layout(model="any", layers=2, kv_heads=2, head_dim=64, page_tokens=16)
    keys = Keys.of(as_tokens(tokens), 16, root_key(ours, "s"))
    data = contents(keys, ours).tobytes()
    begin = node.make("WriteRequest", begin=node.make("WriteBegin", pages=pages))
    written = node.call("Write", begin, *node.data("WriteRequest", data))
    assert (written.new_pages, written.pages) == (5, 5)
    found = node.call("Lookup", node.make("LookupRequest", pages=pages))
    assert (found.pages, found.tokens, list(found.keys)) == (5, 80, keys.hashes)
    replies = node.call("Read", node.make("ReadRequest", pages=pages))
    assert replies[0].match.pages == 5
    assert b"".join(reply.data for reply in replies) == data
    assert all(reply.data_xxh3 == xxhash.xxh3_64_intdigest(reply.data) for reply in replies[1:])
    with pytest.raises(grpc.RpcError) as refused:  # errors say what to do without knowing our classes
        node.call("Lookup", node.make("LookupRequest"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.value.trailing_metadata())["kvstore-field"] == "pages.layout"
    # A program on this machine finds the same pages.
    store = machine.connect("api")
    assert store.cache(ours, salt="s").get(keys).data.tobytes() == data


def test_descriptors_are_those_of_the_repository(machine: Machine) -> None:
    """The proto that is served is the one that is shipped."""
    _, address = api.serve_api(machine)
    database = ProtoReflectionDescriptorDatabase(grpc.insecure_channel(address))
    served = database.FindFileContainingSymbol(SERVICE)
    shipped = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(shipped)
    assert served == shipped
