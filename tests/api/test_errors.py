"""Errors over gRPC: every class of kvstore.errors arrives as itself, and what gRPC says by itself means something."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import grpc.aio
import pytest

from kvstore import errors
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.server.gate import Gate, Threads
from kvstore.server.identities import Identities
from kvstore.wire.grpc import CLASSES, CODES, NotServed, error_of, from_rpc

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVStoreError)]


def made(kind: type[KVStoreError]) -> KVStoreError:
    return kind("tokens", "must not be empty") if issubclass(kind, InvalidRequest) else kind("no luck")


def test_the_table_has_the_whole_tree() -> None:
    """Every class has a code, its own or the nearest parent's, and the tree that people read is the one there is."""
    drawn = set(re.findall(r"[─ ] ([A-Z]\w+)  ", errors.__doc__ or "")) | {"KVStoreError"}
    assert drawn == {kind.__name__ for kind in KINDS}
    assert set(CODES) - {NotServed} <= set(KINDS)
    assert set(KINDS) - set(CODES) == {errors.QuotaExceeded}  # OutOfSpace speaks for it
    for code, kind in CLASSES.items():  # and the way back: what a code alone means is what is sent under it
        senders = [sender for sender, sent in CODES.items() if sent == code]
        assert kind in senders or not senders or code == "UNIMPLEMENTED", code


def test_every_class_passes_the_gate_as_itself() -> None:
    """Over a real connection: what a handler raises is what a caller finds."""

    async def talk() -> None:
        gate = Gate(Identities(None), Threads(), 8, 10.0, 1 << 20)
        by_name = {kind.__name__.encode(): kind for kind in (*KINDS, NotServed)}

        async def serve(message: bytes, context: Any) -> bytes:
            async with gate.admit(context):
                raise made(by_name[message]) if message in by_name else ValueError("a secret")

        server = grpc.aio.server()
        table = {"raise": grpc.unary_unary_rpc_method_handler(serve)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", table),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test/raise")
            for name, kind in by_name.items():
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(name, timeout=60)
                got, sent = from_rpc(refused.value), made(kind)
                assert type(got) is (kind if kind is not NotServed else errors.VersionMismatch)
                assert str(got) == str(sent)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"a bug", timeout=60)
            assert refused.value.code() is grpc.StatusCode.INTERNAL and "secret" not in str(refused.value)
        assert gate.under_way == 0
        await server.stop(None)

    asyncio.run(talk())


def test_metadata_of_strangers_names_no_other_class() -> None:
    got = error_of("UNAVAILABLE", "gone", [("kvstore-error", "annotations"), ("retry-after-ms", "soon")])
    assert type(got) is errors.NodeUnavailable
    assert "retry_after_s" not in vars(got)
