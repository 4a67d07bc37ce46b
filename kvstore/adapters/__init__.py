"""Adapters: other systems' plug points and interfaces, served by a store. See ``docs/adapters.md``.

Each module here is for one host, and imports it. Nothing else of this package imports an adapter, so nobody needs a
host that is not used. An adapter knows a store as every client does.
"""
