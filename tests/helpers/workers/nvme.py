"""What worker processes do beside ``pages``: ``python -m tests.helpers.workers.nvme VERB JSON``."""

from __future__ import annotations

import contextlib
import random
import time

from kvstore.errors import Unavailable
from tests.helpers.workers import pages as workers
from tests.helpers.workers.pages import Arguments, bytes_of, compare, keys_of, log, opened


def prefetch(a: Arguments) -> None:
    """Have prompts ``first .. first + count`` brought to DRAM in any order, and read them, until SIGTERM."""
    rng = random.Random(a.get("random", 1))
    with opened(a) as (_, cache):
        done = pages = 0
        while not workers._ended:
            keys = keys_of(a, rng.randrange(a["first"], a["first"] + a["count"]), a["pages"])
            with contextlib.suppress(Unavailable):
                cache.prefetch(keys, timeout_s=0.2)
            match = cache.get(keys)
            if match.pages:
                assert match.data is not None
                compare(match.data, bytes_of(a, keys)[: match.pages], "after a prefetch")
            done, pages = done + 1, pages + match.pages
            if done % 20 == 1:
                log("prefetched", prefetches=done, pages=pages)
            time.sleep(a.get("pause_s", 0.0))


if __name__ == "__main__":
    workers.VERBS["prefetch"] = prefetch
    workers.main()
