"""Many nodes: the catalog, membership, the directory of pages, and the transports that move pages between nodes."""
