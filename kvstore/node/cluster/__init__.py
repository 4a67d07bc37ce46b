"""A node as a member of a pool: it serves its pages to other nodes and keeps its part of the directory."""
