"""A node of this machine, through shared memory: its files are read here, only writes ask its daemon."""
