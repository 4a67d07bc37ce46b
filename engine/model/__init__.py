"""Nouns of the engine, without I/O: requests, hand-offs, pieces of KV, and the observer."""
