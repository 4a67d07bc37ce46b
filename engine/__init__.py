"""Inference engines, the conductor that routes requests to them, and the simulator that replays traces.

Nothing is imported here: each user imports the part it needs.
"""
