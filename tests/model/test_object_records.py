"""What the records of opaque objects say: key, size, pieces and group, in full records and in lean ones."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.objects import (
    KEY_BYTES_MAX,
    MEMBERS_MAX,
    NO_GROUP,
    NONCE_BYTES,
    About,
    HeadRows,
    class_for,
    group_of,
    groups_in,
    key_hash,
    object_root,
    read_row,
)
from kvstore.model.replica import LEAN_IDENTITY_BYTES, OBJECT_WIDTHS, identity_bytes

ROOT, NONCE = object_root("tenant"), bytes(range(NONCE_BYTES))


@pytest.mark.parametrize("name_bytes", [1, 88, 89, 104, 105, 984, 985, KEY_BYTES_MAX])
@pytest.mark.parametrize("count", [0, 1, MEMBERS_MAX])
def test_a_head_says_what_was_put(name_bytes: int, count: int) -> None:
    name, group = b"n" * name_bytes, group_of(ROOT, "g" if count else None, count, 1)
    frame_class = class_for(name, 600_000, 1 << 30, group)
    about = About(name, 600_000, 2, NONCE, group)
    row = about.row(ROOT, frame_class.page_tokens, key_hash(ROOT, name))
    assert len(row) == identity_bytes(frame_class.page_tokens) and frame_class.holds_objects
    assert read_row(row) == (ROOT, about)
    rows = np.frombuffer(row, np.uint8).reshape(1, -1)
    heads = HeadRows(rows, ROOT)
    assert (heads.name(0), heads.value_bytes[0], heads.pieces[0], heads.group(0)) == (name, 600_000, 2, group)
    found = {0: group} if count else {}
    assert groups_in(rows) == groups_in(rows[:, :LEAN_IDENTITY_BYTES]) == found
    pieces = about.piece_keys(ROOT, frame_class.page_tokens)
    assert groups_in(np.frombuffer(pieces.identity_bytes, np.uint8).reshape(2, -1)) == {}, "pieces are not members"


def test_the_class_has_the_narrowest_records_with_room_for_the_key_and_the_group() -> None:
    group = group_of(ROOT, "g", 2, 1)
    widths = [class_for(b"n" * size, 10, 1 << 30, group).page_tokens for size in (88, 89, 984, 985)]
    assert widths == [OBJECT_WIDTHS[0], OBJECT_WIDTHS[1], OBJECT_WIDTHS[1], OBJECT_WIDTHS[2]]
    assert class_for(b"n" * 104, 10, 1 << 30).page_tokens == OBJECT_WIDTHS[0]


def test_groups_differ_by_name_and_salt() -> None:
    groups = [group_of(object_root(salt), name, 4, 2) for salt in ("a", "b") for name in ("g", "h")]
    assert len(set(groups)) == 4 and group_of(ROOT, None, 0, 9) == NO_GROUP


@pytest.mark.parametrize(
    ("group", "count", "keys", "field"),
    [
        ("g", 0, 1, "count"),
        ("g", -1, 1, "count"),
        ("g", MEMBERS_MAX + 1, 1, "count"),
        ("g", True, 1, "count"),
        ("g", 2.0, 1, "count"),
        (None, 2, 1, "count"),
        ("", 2, 1, "group"),
        ("g" * (KEY_BYTES_MAX + 1), 2, 1, "group"),
        (b"g", 2, 1, "group"),
        ("g", 2, 3, "keys"),
    ],
)
def test_a_group_that_cannot_be_is_refused(group: object, count: object, keys: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        group_of(ROOT, group, count, keys)
    assert refused.value.field == field
