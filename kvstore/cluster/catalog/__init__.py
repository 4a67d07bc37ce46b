"""What a cluster agrees on: who is there, and what is wanted. Never one entry per page.

``base`` has the interface, ``schema`` spells every key and value. ``memory``, ``file`` and ``etcd`` implement it, and
one contract suite runs over all three. ``presence`` keeps entries published as long as their process lives.
"""
