"""Where a kv:// address leads and with which credentials; data messages against protobuf's own."""

from __future__ import annotations

import pytest

import kvstore
from kvstore.client.remote.endpoint import CallerCredentials, endpoint, is_remote
from kvstore.errors import InvalidRequest
from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import OBJECT_DATA_FIELD, digest_of, fields, pack_data, pack_integer

CLEAR = CallerCredentials()


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("kv://host:7070", "dns:///host:7070"),
        ("kv://127.0.0.1:1", "dns:///127.0.0.1:1"),
        ("kv://[::1]:7070/", "ipv6:[::1]:7070"),
        ("kv+unix:///run/kv.sock", "unix:/run/kv.sock"),
    ],
)
def test_targets(address: str, target: str) -> None:
    assert is_remote(address)
    found = endpoint(address, CLEAR, {})
    assert (found.target, found.token, found.tls) == (target, "", False)


@pytest.mark.parametrize(
    "address",
    [
        *("kv://", "kv://host", "kv://:7", "kv://host:x", "kv://host:70000", "kv://host:1/path", "kv://u:p@host:1"),
        *("kv://host:1?a=b", "kv://ho st:1", "kv+unix://", "kv+unix://relative", f"kv+unix:///{'x' * 200}"),
    ],
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(InvalidRequest, match="^address: "):
        kvstore.connect(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "[::1]", "localhost"])
def test_a_token_goes_in_clear_on_this_machine_only(host: str) -> None:
    given = CallerCredentials(token="secret")
    assert endpoint(f"kv://{host}:1", given, {}).token == "secret"
    assert endpoint("kv+unix:///s", given, {}).token == "secret"
    for away in ("10.0.0.1", "example.org", "localhost.example.org", "[fe80::1]", "0.0.0.0"):
        with pytest.raises(InvalidRequest, match="^token: would be sent unencrypted"):
            endpoint(f"kv://{away}:1", given, {})
        with pytest.raises(InvalidRequest, match="^token: would be sent unencrypted"):
            endpoint(f"kv://{away}:1", CLEAR, {"KVSTORE_TOKEN": "secret"})


@pytest.mark.parametrize(
    ("given", "env", "field"),
    [
        (CallerCredentials(token=""), {}, "token"),
        (CallerCredentials(token="a b"), {}, "token"),
        (CallerCredentials(token="a\nb"), {}, "token"),
        (CallerCredentials(token="é"), {}, "token"),
        (CallerCredentials(token="x" * 5000), {}, "token"),
        (CLEAR, {"KVSTORE_TOKEN_FILE": "/nowhere"}, "KVSTORE_TOKEN_FILE"),
        (CLEAR, {"KVSTORE_TLS_CA": "/nowhere"}, "KVSTORE_TLS_CA"),
        (CallerCredentials(tls_ca="/nowhere"), {}, "tls_ca"),
        (CallerCredentials(tls_ca=""), {}, "tls_ca"),
        (CallerCredentials(tls_cert=__file__), {}, "tls_key"),
        (CallerCredentials(tls_key=__file__), {}, "tls_cert"),
    ],
)
def test_bad_credentials(given: CallerCredentials, env: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        endpoint("kv://127.0.0.1:1", given, env)
    assert caught.value.field == field
    assert given.token is None or not given.token or given.token not in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 3_000_000])
def test_data_messages_are_protobuf(size: int) -> None:
    data = bytes(i * 7 & 0xFF for i in range(size))
    packed = pack_data(
        memoryview(data), other_fields=pack_integer(4, 300) + pack_integer(5, 1 << 40) + pack_integer(4, 0)
    )
    message = pb.WriteRequest.FromString(packed)
    assert (message.data, message.data_xxh3, message.page, message.offset) == (data, digest_of(data), 300, 1 << 40)
    reply = pb.GetObjectReply.FromString(pack_data(data, OBJECT_DATA_FIELD))
    assert (reply.data, reply.data_xxh3) == (data, digest_of(data))
    message.begin.pages.salt = "s"
    found = {
        number: view if view is not None else integer for number, integer, view in fields(message.SerializeToString())
    }
    assert found.get(2, b"") == data and found[3] == digest_of(data) and (found[4], found[5]) == (300, 1 << 40)


def test_damaged_messages_are_no_messages() -> None:
    whole = pb.ReadReply(
        match=pb.LookupReply(pages=3, keys=[b"k" * 16]), data=b"data" * 9, data_xxh3=5
    ).SerializeToString()
    for stop in range(1, len(whole)):
        part = whole[:stop]
        try:
            names = [field.number for field in fields(part)]
        except ValueError:
            continue
        assert names in ([1], [1, 2])  # it ends where a field does
    for bad in (b"\x0b", b"\x80", b"\xff" * 11, b"\x12\xff\xff\xff\x7fx"):
        with pytest.raises(ValueError, match="byte"):
            list(fields(bad))
