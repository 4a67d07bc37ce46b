"""The engine's client of the pool: it loads prefixes into frames, and writes pages out of frames."""
