"""Decisions of an engine, pure: no clock, no threads, no torch. Begin reading at ``engine_state.EngineState``."""
