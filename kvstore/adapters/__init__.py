"""Adapters: other systems' plug points and interfaces, served by a store. See ``docs/adapters.md``.

Each module here is for one host, and imports it. Nothing else in this package imports an adapter, so hosts that are not
used need not be installed. An adapter uses a store as any client does.
"""
