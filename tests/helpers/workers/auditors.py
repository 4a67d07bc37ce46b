"""Worker verbs that hold the store to its word: ``python -m tests.helpers.workers.auditors VERB JSON``.

What was accepted must be found, in DRAM or on NVMe: a page that is in neither tier is logged as ``missing``. All verbs
of ``workers.pages`` are here as well.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from kvstore import PrefixCache
from kvstore.errors import Unavailable
from tests.helpers.content import LAYOUTS
from tests.helpers.nvme.files import WINDOW
from tests.helpers.workers import pages as workers
from tests.helpers.workers.pages import VERBS, Arguments, again, bytes_of, compare, keys_of, log, opened


def put_prompt(a: Arguments, cache: PrefixCache, seed: int, pages: int, parts: int) -> int:
    """One prompt in ``parts`` turns; returns how many of its pages were accepted, by what the puts themselves say."""
    accepted = 0
    for part in range(1, parts + 1):
        keys = keys_of(a, seed, max(1, pages * part // parts))
        data = bytes_of(a, keys)
        accepted += again(lambda keys=keys, data=data: cache.put(keys, data))
    log("put", seed=seed, pages=accepted)
    return accepted


def must_find(a: Arguments, cache: PrefixCache, seed: int, pages: int, what: str) -> None:
    """That many pages of the prompt are there, in whatever tier, and right."""
    if not pages:
        return
    keys = keys_of(a, seed, pages)
    seen = cache.lookup(keys).pages
    match = cache.get(keys)
    if match.pages:
        assert match.data is not None
        compare(match.data, bytes_of(a, keys)[: match.pages], f"{what} of prompt {seed}")
    if match.pages != pages or seen != pages:
        log("missing", seed=seed, pages=pages, found=match.pages, seen=seen, reason=match.reason, what=what)


def accepted(a: Arguments) -> None:
    """Put prompts ``first .. first + count``; after every put look for it, and for one that was put before."""
    rng = random.Random(a["first"])
    with opened(a) as (_, cache):
        known: list[tuple[int, int]] = []
        for seed in range(a["first"], a["first"] + a["count"]):
            known.append((seed, put_prompt(a, cache, seed, a["pages"], a.get("parts", 1))))
            must_find(a, cache, *known[-1], "what was just put")
            must_find(a, cache, *rng.choice(known), "what was put before")
            if workers._ended:
                return


def audit(a: Arguments) -> None:
    """Look for what the writers whose logs these are were promised, at random moments, until SIGTERM."""
    rng, done = random.Random(a.get("random", 1)), 0
    paths = [Path(path) for path in a["logs"]]
    with opened(a) as (_, cache):
        while not workers._ended:
            puts = [line for path in paths for line in path.read_text().split("\n")[:-1] if '"put"' in line]
            known = {event["seed"]: event["pages"] for event in map(json.loads, rng.sample(puts, min(20, len(puts))))}
            for seed, pages in known.items():
                must_find(a, cache, seed, pages, "an audit")
                done += 1
            log("audited", prompts=done)
            time.sleep(rng.random() * 0.02)


def follow_puts(a: Arguments) -> None:
    """Read, in every way, what writers put lately, until SIGTERM; whatever is found must be right."""
    rng, pages = random.Random(a.get("random", 1)), 0
    paths = [Path(path) for path in a["logs"]]
    with opened(a) as (_, cache):
        while not workers._ended:
            puts = [json.loads(line) for line in rng.choice(paths).read_text().split("\n")[-100:-1] if '"put"' in line]
            for event in rng.sample(puts, min(20, len(puts))):
                pages += workers.read_once(a, cache, rng, event["seed"], max(1, event["pages"]))
            log("followed", pages=pages)


def prefetching(a: Arguments) -> None:
    """Have prompts brought to DRAM, at random, until SIGTERM."""
    rng = random.Random(a.get("random", 1))
    with opened(a) as (_, cache):
        while not workers._ended:
            keys = keys_of(a, rng.randrange(a["first"], a["first"] + a["count"]), a["pages"])
            try:
                pages = again(lambda keys=keys: cache.prefetch(keys, timeout_s=0.5)).pages
                log("prefetched", pages=pages)
            except Unavailable as error:
                log("unavailable", error=str(error))


VERBS |= {verb.__name__: verb for verb in (accepted, audit, follow_puts, prefetching)}
LAYOUTS["window"] = WINDOW


if __name__ == "__main__":
    workers.main()
