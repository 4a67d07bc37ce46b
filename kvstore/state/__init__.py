"""Decisions, pure: events in, instructions out. No I/O, no clock, no threads; time arrives inside events."""
