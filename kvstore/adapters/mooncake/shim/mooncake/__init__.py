"""A replacement for Mooncake's package, with only ``mooncake.store``, backed by a kvstore node."""
