"""What a daemon tells its pool of itself."""

from __future__ import annotations

import pytest

from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.base import Entry
from kvstore.cluster.membership import reachable
from kvstore.errors import InvalidRequest


def test_an_address_of_nowhere_is_told_to_nobody() -> None:
    """Whoever dials 0.0.0.0 reaches itself."""
    assert reachable(["unix:/run/n.sock", "10.0.0.1:7070", "[fd00::1]:7070"]) == ("10.0.0.1:7070", "[fd00::1]:7070")
    for address in ("0.0.0.0:7070", "[::]:7070"):
        with pytest.raises(InvalidRequest, match="listen"):
            reachable([address])


def test_an_entry_of_another_version_is_skipped_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """The members that wrote it are not known here; what they publish stays as it is."""
    value = schema.ConductorEntry(name="c", process=schema.new_process())
    key, same = schema.key_of("pool", value), schema.encode(value)
    newer = same.replace(b'"v":1', b'"v":9')
    assert newer != same
    assert schema.decode(schema.ConductorEntry, Entry(key, same, 1)) == value
    assert schema.decode(schema.ConductorEntry, Entry(key, newer, 2)) is None
    assert "is skipped: v: must be" in caplog.text
    secret = schema.new_secret()
    assert schema.decode_secret(secret) and schema.decode_secret(secret.replace(b'"v":1', b'"v":9')) is None
