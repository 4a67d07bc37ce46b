"""Engines that are not ours: servers that speak OpenAI's API and report their KV blocks as vLLM does."""
