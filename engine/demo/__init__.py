"""``kvstore demo``: conversations about this project's documents, answered by real engines over a pool.

A node, an engine that prefills and one that decodes run as processes of their own. First a conductor in front of them
is asked over HTTP, as OpenAI's clients do, and tells where each chat went. Then each prompt is answered twice, with
the pool and without it; the answers must be the same tokens. In the middle the node is killed with -9, and requests go
on being answered. At the end the machine "restarts": nothing runs and shared memory is empty, and what the next turns
of conversations reuse comes from NVMe.
"""

from engine.demo.command import demo

__all__ = ["demo"]
