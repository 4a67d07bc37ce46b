"""Hand-offs: the KV of a prompt moves from the engine that computed it to the engine that answers."""
