"""Inference engines, the conductor that routes requests to them, and the simulator that replays traces.

Nothing is imported here: every part is imported by whoever needs it.
"""
