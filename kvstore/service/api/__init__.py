"""The gRPC API of a node: ``server`` starts it, the others answer calls. ``kvstore.serving`` lets callers in."""
