"""Decisions of an engine, pure: no clock, no threads, no torch. ``engine_state.EngineState`` is where to begin."""
