"""Replaces Mooncake's package: only ``mooncake.store``, on a kvstore node."""
