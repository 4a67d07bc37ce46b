"""Stands in for Mooncake's package: ``mooncake.store`` alone, over a node of kvstore."""
