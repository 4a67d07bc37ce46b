"""Decisions of a conductor: where a request's prompt is computed, where it is answered, and when it is refused."""
