"""Two processes share pages: one stores the KV cache of a prompt, and the other one finds and reads it.

    .venv/bin/python examples/two_processes.py

This process opens a node of its own. The second process connects to that node by name, and reads the pages from shared
memory without a message. The node ends with this process. For a node that outlives its programs, run a daemon:
`kvstore serve --name n0 --dram 8GiB`.
"""

import multiprocessing

import numpy as np

import kvstore

LAYOUT = kvstore.Layout(model="example", layers=4, kv_heads=2, head_dim=64, page_tokens=64)
TOKENS = np.arange(1000)  # 15 full pages; the last 40 tokens do not fill a page
EXIT_S = 60


def read(node: str, expected: int) -> None:
    """Find and read the pages of the prompt."""
    with kvstore.connect(node) as store:
        cache = store.cache(LAYOUT, salt="tenant-a")
        out = kvstore.empty((15, LAYOUT.page_bytes))
        match = cache.get(TOKENS, out=out)  # every page is proven by key and token ids before it counts
        print(f"reader: {match.pages} pages, {match.tokens} tokens, from {[tier.name for tier in match.tiers]}")
        assert match.pages == 15 and int(out.sum(dtype=np.int64)) == expected

        # Another salt is another tenant. Equal tokens under it have nothing in common with these pages.
        assert store.cache(LAYOUT, salt="tenant-b").lookup(TOKENS).pages == 0


def main() -> None:
    """Store the pages, and start another process that reads them."""
    with kvstore.open(dram="64MiB") as store:
        pages = np.random.default_rng(0).integers(0, 256, (15, LAYOUT.page_bytes), np.uint8)
        new = store.cache(LAYOUT, salt="tenant-a").put(TOKENS, pages)
        print(f"writer: {new} pages stored in node {store.name}")

        # "spawn" starts a fresh interpreter: a forked child could not use this process's store.
        reader = multiprocessing.get_context("spawn").Process(
            target=read, args=(store.name, int(pages.sum(dtype=np.int64)))
        )
        reader.start()
        reader.join(EXIT_S)
        if reader.exitcode is None:
            reader.kill()
        if reader.exitcode != 0:
            raise SystemExit(f"reader: did not succeed (exit code {reader.exitcode})")


if __name__ == "__main__":
    main()
