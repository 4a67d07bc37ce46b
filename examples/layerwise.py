"""Layer-wise hand-off: a decode process reads each layer of a prompt while a prefill process still computes the next.

    .venv/bin/python examples/layerwise.py

The pages become visible to lookups when all of their layers are written. A reader that waits for them does not wait
for that: it gets every layer as soon as it is there.
"""

import multiprocessing
import time
from multiprocessing.synchronize import Event

import numpy as np

import kvstore

LAYOUT = kvstore.Layout(model="example", layers=8, kv_heads=2, head_dim=64, page_tokens=64)
TOKENS = np.arange(256)  # 4 full pages
COMPUTE_S = 0.05  # what one layer takes on the device of this example
WAIT_S = 60


def decode(node: str, ready: Event) -> None:
    """Follow the prompt layer by layer."""
    with kvstore.connect(node) as store:
        cache = store.cache(LAYOUT)
        keys = cache.keys(TOKENS)  # all four pages; a prompt as tokens would leave out the page of its last token
        reader = cache.reader(keys, timeout_s=WAIT_S)
        out = kvstore.empty((len(keys), LAYOUT.layer_bytes))
        ready.set()
        for layer in range(LAYOUT.layers):
            reader.read_layer(layer, out)  # returns when this layer of every page is written
            assert (out == layer).all()
            print(f"decode: layer {layer} at {time.monotonic():.2f} s, complete pages: {cache.lookup(keys).pages}")


def main() -> None:
    """Compute and write one layer after the other."""
    with kvstore.open(dram="64MiB") as store:
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        decoder = spawn.Process(target=decode, args=(store.name, ready))
        decoder.start()
        ready.wait(WAIT_S)  # only so that the output shows both at work; a late reader finds the same layers
        cache = store.cache(LAYOUT)
        keys = cache.keys(TOKENS)
        # Leaving the block seals the pages. An exception inside of it, or the death of this process, revokes them.
        with cache.writer(keys) as writer:
            for layer in range(LAYOUT.layers):
                time.sleep(COMPUTE_S)
                writer.write_layer(layer, np.full((len(keys), LAYOUT.layer_bytes), layer, np.uint8))
                print(f"prefill: layer {layer} at {time.monotonic():.2f} s")
        print(f"prefill: {writer.sealed} pages sealed")
        decoder.join(WAIT_S)
        if decoder.exitcode is None:
            decoder.kill()
        if decoder.exitcode != 0:
            raise SystemExit(f"decode: did not succeed (exit code {decoder.exitcode})")


if __name__ == "__main__":
    main()
