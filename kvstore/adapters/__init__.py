"""Adapters connect other systems (hosts) to a store. See ``docs/adapters.md``.

Each module or folder serves one host and imports it. No other package imports an adapter, so only the hosts in use have
to be installed. An adapter uses a store as any client does.
"""
