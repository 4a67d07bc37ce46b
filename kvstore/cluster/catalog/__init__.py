"""The catalog of a cluster: its members and its settings. Never one entry per page.

``base`` has the interface, and ``schema`` spells every key and value. ``memory``, ``file`` and ``etcd`` implement the
interface, and one contract suite runs over all three.
"""
