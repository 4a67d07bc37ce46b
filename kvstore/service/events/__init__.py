"""KV events in vLLM's wire format."""
