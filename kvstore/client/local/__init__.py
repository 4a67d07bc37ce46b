"""The client of a node on this machine. Reads use the node's shared memory and files; only writes need its daemon."""
