"""A folder for ``sys.path``: it has ``mooncake.store``, and nothing else. See ``kvstore.adapters.mooncake.install``."""
