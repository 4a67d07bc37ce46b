"""The gRPC API of a node: ``server`` starts it, the others answer calls. ``kvstore.server`` lets callers in."""
