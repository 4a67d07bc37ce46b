"""KV between two engines: prompts computed by one engine for another."""
