"""The engine: threads, steps, migration, status."""
