"""``kvstore demo``: conversations about this project's documents, answered by real engines over a pool.

A node, an engine that prefills, one that decodes and a conductor run as processes of their own. The conductor is asked
over HTTP first, as OpenAI's clients do. Then each prompt is answered twice by the engines, with the pool and without
it, and both answers must be the same tokens. In the middle the node is killed with -9. At the end the machine
"restarts": nothing runs and shared memory is empty, and what the next turns reuse comes from NVMe.
"""

from engine.demo.command import demo

__all__ = ["demo"]
