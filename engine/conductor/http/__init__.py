"""HTTP: OpenAI's API in front of a conductor."""
