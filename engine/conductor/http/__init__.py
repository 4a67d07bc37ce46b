"""The OpenAI-compatible HTTP server of a conductor."""
