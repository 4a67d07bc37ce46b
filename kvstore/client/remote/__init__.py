"""A node reached over gRPC, for machines and containers that share no memory with it: ``connect("kv://host:port")``."""
