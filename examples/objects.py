"""Opaque objects: any bytes under a name, stored in the same memory as pages, with the same guarantees.

.venv/bin/python examples/objects.py
"""

import numpy as np

import kvstore


def main() -> None:
    """Call every verb for objects once."""
    with kvstore.open(dram="64MiB") as store:
        weights = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
        assert store.put("adapters/7", weights)  # True: the value is stored
        assert not store.put("adapters/7", b"other")  # False: a value stays until it is replaced or deleted
        print(f"adapters/7: {store.size('adapters/7')} bytes")

        out = np.empty_like(weights)
        assert store.get("adapters/7", out=out) == weights.nbytes  # fills the caller's buffer and returns the length
        assert (out == weights).all()
        assert store.get("adapters/8") is None  # a miss is a value, never an exception

        # One call for many objects. A value may be a list of buffers, which are stored one after the other.
        stored = store.put_many(["a", "b"], [[b"head", b"tail"], b"whole"])
        print(f"a, b: stored {stored}, a is {bytes(store.get('a'))!r}")

        assert store.get("a", salt="tenant-b") is None  # a salt separates tenants
        assert store.put("a", b"new", replace=True)
        assert bytes(store.get("a")) == b"new"
        print(f"deleted: {store.delete(['a', 'b', 'c'])} of 3")  # c was never stored


if __name__ == "__main__":
    main()
