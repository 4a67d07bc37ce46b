"""A node as a member of a pool: its pages are served to other nodes, and its part of the directory is kept."""
