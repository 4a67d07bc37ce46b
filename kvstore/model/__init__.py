"""Nouns, without I/O: the shape of a page (layout), its key (prefix), and its place (replica)."""
