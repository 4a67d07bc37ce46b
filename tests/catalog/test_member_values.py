"""What a member knows of the others is decoded once per change, and not once per question."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.base import Entry
from kvstore.cluster.catalog.schema import DataEntry, NodeEntry
from kvstore.cluster.membership import Membership


def entry(number: int, revision: int, host: str = "") -> Entry:
    node = NodeEntry(name=f"n{number}", process="1", incarnation="2", host=host)
    return Entry(schema.key_of("p", node), schema.encode(node), revision, 1)


def test_only_entries_that_changed_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    decode: Any = schema.decode
    monkeypatch.setattr(schema, "decode", lambda kind, each: (decoded.append(each.key), decode(kind, each))[1])
    members = Membership.__new__(Membership)  # without its thread
    members._config, members._values = SimpleNamespace(pool="p"), {}  # type: ignore[assignment]
    entries = {each.key: each for each in (entry(number, number + 1) for number in range(9))}
    bad = Entry(schema.folder("p", NodeEntry) + "bad", b"{", 20, 1)
    members._members = {**entries, bad.key: bad}
    nodes = members.nodes()
    assert [each.name for each in nodes] == [f"n{number}" for number in range(9)] and len(decoded) == 10

    decoded.clear()
    server = DataEntry(name="n1.0", process="1", node="n1", incarnation="2")
    other = Entry(schema.key_of("p", server), schema.encode(server), 30, 1)
    members._members = {**members._members, other.key: other}
    assert members.nodes() is nodes and decoded == [], "nothing about nodes has changed"
    assert [each.name for each in members.data_servers()] == ["n1.0"]

    decoded.clear()
    moved, new = entry(3, 40, "elsewhere"), entry(10, 41)
    members._members = {**entries, moved.key: moved, new.key: new}
    del members._members[entry(5, 0).key]
    assert sorted(decoded) == [] and members.node("n3") == schema.decode(NodeEntry, moved)
    assert sorted({*decoded}) == sorted({moved.key, new.key}), "and the invalid entry is gone"
    assert members.node("n5") is None and members.node("n10") is not None and len(members.nodes()) == 9
