"""Inference engines, the conductor that routes requests to them, and the simulator of request traces."""
