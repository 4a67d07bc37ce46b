"""A folder for ``sys.path`` that has ``mooncake.store`` and nothing else. See ``kvstore.adapters.mooncake.install``."""
