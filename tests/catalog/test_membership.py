"""What a daemon tells its pool of itself."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.serving.membership import reachable


def test_an_address_of_nowhere_is_told_to_nobody() -> None:
    """Whoever dials 0.0.0.0 reaches itself."""
    assert reachable(["unix:/run/n.sock", "10.0.0.1:7070", "[fd00::1]:7070"]) == ("10.0.0.1:7070", "[fd00::1]:7070")
    for address in ("0.0.0.0:7070", "[::]:7070"):
        with pytest.raises(InvalidRequest, match="listen"):
            reachable([address])
