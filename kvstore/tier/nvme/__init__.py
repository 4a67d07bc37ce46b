"""The NVMe tier: disks, the tables and headers written to them, and their extents."""
