"""The shell of an engine: its threads, the performance of instructions, and migrations."""
