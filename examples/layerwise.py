"""A layer-wise hand-off: a decode process reads each layer of a prompt while a prefill process computes the next one.

    .venv/bin/python examples/layerwise.py

Lookups find the pages only when all of their layers are written. A reader need not wait for that: it gets each layer as
soon as that layer is written.
"""

import multiprocessing
import time
from multiprocessing.synchronize import Event

import numpy as np

import kvstore

LAYOUT = kvstore.Layout(model="example", layers=8, kv_heads=2, head_dim=64, page_tokens=64)
TOKENS = np.arange(256)  # 4 full pages
COMPUTE_S = 0.05  # the time to compute one layer, which this example simulates
WAIT_S = 60


def decode(node: str, ready: Event) -> None:
    """Read the prompt's KV layer by layer, while it is written."""
    with kvstore.connect(node) as store:
        cache = store.cache(LAYOUT)
        keys = cache.keys(TOKENS)  # names all four pages; tokens would leave out the page of the last one
        reader = cache.reader(keys, timeout_s=WAIT_S)
        out = kvstore.empty((len(keys), LAYOUT.layer_bytes))
        ready.set()
        for layer in range(LAYOUT.layers):
            reader.read_layer(layer, out)  # returns once this layer is written in every page
            assert (out == layer).all()
            print(f"decode: layer {layer} at {time.monotonic():.2f} s, complete pages: {cache.lookup(keys).pages}")


def main() -> None:
    """Compute and write one layer after the other, while the other process reads them."""
    with kvstore.open(dram="64MiB") as store:
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        decoder = spawn.Process(target=decode, args=(store.name, ready))
        decoder.start()
        ready.wait(WAIT_S)  # so that the output shows both at work; a reader that is late gets the same layers
        cache = store.cache(LAYOUT)
        keys = cache.keys(TOKENS)
        # The end of the block seals the pages. An exception inside it, or the death of this process, revokes them.
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
