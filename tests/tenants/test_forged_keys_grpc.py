"""Forged keys over gRPC, between identities; ``test_forged_keys`` has the same in shared memory."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from kvstore import Keys
from kvstore.model.objects import key_hash, object_root
from kvstore.model.prefix import root_key
from kvstore.pb import store_pb2 as pb
from tests.helpers.api import Client, identities_file, pages_message, put_messages, serve_api, write_messages
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.forging import tokens_for
from tests.helpers.processes import Machine, check_laws

PAGES = 3


def forged(wanted: list[bytes], salt: str) -> Keys:
    """A chain of that salt whose links are these."""
    root = root_key(SMALL, salt)
    parts = [tokens_for(link, before) for link, before in zip(wanted, [root, *wanted[:-1]], strict=True)]
    keys = Keys.of(np.concatenate(parts), SMALL.page_tokens, root)
    assert keys.links == wanted
    return keys


def test_a_tenant_who_forges_links_learns_and_prevents_nothing(machine: Machine) -> None:
    _, address = serve_api(machine, identities=identities_file(machine.logs))
    a, b, local = Client(address, "a-token"), Client(address, "b-token"), machine.connect("api")
    victim, later = chain(1, PAGES, SMALL, "a"), chain(2, PAGES, SMALL, "a")
    ours = pages_message(victim, salt="a")
    thief, early = (pages_message(forged(keys.links, "b"), salt="b") for keys in (victim, later))

    def told() -> list[object]:
        lease = b.call("Lease", pb.LeaseRequest(pages=thief))
        replies: list[object] = [lease.pages, lease.reason]
        replies += [b.call(name, pb.LookupRequest(pages=thief)) for name in ("Lookup", "Prefetch")]
        replies += b.call("Read", pb.ReadRequest(pages=thief))
        for name, request in (("Pin", pb.PinRequest(prompt=thief, ttl_s=9)), ("Unpin", pb.UnpinRequest(prompt=thief))):
            with pytest.raises(grpc.RpcError) as refused:
                b.call(name, request)
            replies.append(refused.value.details())
        return replies

    before = told()
    assert a.call("Write", iter(write_messages(ours, contents(victim)))).new_pages == PAGES
    a.call("Pin", pb.PinRequest(prompt=ours, ttl_s=60))
    assert told() == before, "whether a has stored it"
    assert [pin["salt"] for pin in local.pins()["pins"]] == ["a"]
    a.call("Unpin", pb.UnpinRequest(prompt=ours))

    # What is going to be put can be known: a system prompt, say.
    assert b.call("Write", iter(write_messages(early, contents(later)))).new_pages == PAGES
    reply = a.call("Write", iter(write_messages(pages_message(later, salt="a"), contents(later))))
    assert (reply.new_pages, reply.pages) == (PAGES, PAGES)
    assert a.read(pages_message(later, salt="a")) == contents(later).tobytes()

    for number in range(64):
        head = key_hash(object_root("a"), f"o{number}".encode())
        try:
            squatter = forged([head], "b")
        except AssertionError:
            continue  # no page of 16 tokens has that link
        b.call("Write", iter(write_messages(pages_message(squatter, salt="b"), contents(squatter))))
        assert a.call("PutObject", iter(put_messages(f"o{number}", b"value", salt="a"))).stored
        break
    check_laws(local)
    for client in (a, b):
        client.close()


def test_callers_are_told_links_and_may_go_on_from_them(machine: Machine) -> None:
    """As programs of any version do, which hash by themselves or take what a reply says."""
    _, address = serve_api(machine)
    client, keys = Client(address), chain(1, PAGES)
    assert client.call("Write", iter(write_messages(pages_message(keys[:1]), contents(keys[:1])))).pages == 1
    told = client.call("Lookup", pb.LookupRequest(pages=pages_message(keys[:1]))).keys
    assert list(told) == keys.links[:1]
    rest = pages_message(keys[1:], parent=told[0])
    assert client.call("Write", iter(write_messages(rest, contents(keys[1:])))).new_pages == PAGES - 1
    found = client.call("Lookup", pb.LookupRequest(pages=rest))
    assert (found.pages, list(found.keys)) == (PAGES - 1, keys.links[1:])
    tag = machine.connect("api").in_pool(keys).tag
    assert tag and not any(tag in bytes(link) for link in found.keys)
    client.close()
