"""A node of this machine through shared memory. Reads use its files directly; only writes ask its daemon."""
