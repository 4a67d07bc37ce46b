"""Nouns, pure: what a page is (layout), what it is called (prefix), and where it is stored (replica)."""
