"""The OpenAI-compatible HTTP door of a conductor."""
