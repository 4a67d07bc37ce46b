"""Folders and devices of nodes that do not run: read and judged as they lie."""
