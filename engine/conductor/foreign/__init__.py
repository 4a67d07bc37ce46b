"""Engines that are not ours: servers that speak OpenAI's API, and tell of their KV blocks as vLLM does."""
