"""``kvstore demo``: conversations about this project's documents, answered by real engines over a pool.

The demo starts a node, a prefill engine, a decode engine and a conductor as separate processes. First it sends chats to
the conductor over HTTP, like a client of OpenAI. Then the engines answer each prompt twice, with the pool and without
it, and both answers must have the same tokens. Half way, the node is killed with -9. At the end, the restart of a
machine is simulated: all processes end, shared memory is emptied, and the next turns reuse pages from NVMe.
"""

from engine.demo.command import demo

__all__ = ["demo"]
