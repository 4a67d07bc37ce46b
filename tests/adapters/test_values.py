"""Values of hosts that expect no exceptions, in an embedded store."""

from __future__ import annotations

import kvstore
from kvstore.adapters.values import Values


def test_values_of_several_ranks_are_found_together() -> None:
    with kvstore.open(dram="32MiB") as store:
        values = Values(store)
        pages = [f"page {i}" for i in range(4)]
        ranks = [[f"{page}@{rank}" for page in pages] for rank in range(2)]
        buffers = [[bytes([i]) * 100, bytes([i]) * 5000] for i in range(4)]
        assert values.put(ranks[0], buffers, "t", pages, 2) == [True] * 4
        assert values.contains(ranks[0], "t") == [False] * 4
        outs = [[bytearray(100), bytearray(5000)] for _ in pages]
        assert values.get(ranks[0], outs, "t") == [False] * 4
        assert values.put([*ranks[1][:2], ranks[1][0]], [*buffers[:2], buffers[0]], "t", [*pages[:2], pages[0]], 2)
        assert values.contains([*ranks[0], *ranks[1]], "t") == [True, True, False, False] * 2
        assert values.get(ranks[0], outs, "t") == [True, True, False, False]
        assert values.put(ranks[1], buffers, "t", pages, 3) == [True, True, False, False], "another count: not stored"
