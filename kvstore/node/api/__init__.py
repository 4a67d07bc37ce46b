"""The gRPC API of a node. ``server`` starts it, the other modules answer calls; ``kvstore.server`` has the gate."""
