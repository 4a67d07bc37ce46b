"""Back ends: engines of other systems that speak OpenAI's API, and may report their KV blocks as vLLM does."""
