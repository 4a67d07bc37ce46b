"""A node: how it starts, performs instructions, and keeps its index, books and event log."""
