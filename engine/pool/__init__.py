"""KV between an engine, the store and its peers."""
