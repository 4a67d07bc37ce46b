"""Nouns of the engine, pure: requests, hand-offs, what is observed."""
