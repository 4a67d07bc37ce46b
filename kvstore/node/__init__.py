"""The node's shell: it performs what ``state`` decides."""
