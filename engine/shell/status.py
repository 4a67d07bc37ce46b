"""Status: what an engine says of itself."""

from __future__ import annotations

from typing import Any, Protocol

from engine.compute.models import Model
from engine.compute.speeds import Speeds
from engine.memory.arena import Arena
from engine.model.request import Role
from engine.moving.store_side import Pool
from engine.shell.prefill import Prefills
from engine.shell.sequence import State
from kvstore.model.layout import Layout


class Described(Protocol):
    """What is looked at of an engine."""

    role: Role
    draining: bool
    model: Model
    layout: Layout
    arena: Arena
    pool: Pool
    prefills: Prefills
    speeds: Speeds


def describe(engine: Described, states: list[State], side_steps: int) -> dict[str, Any]:
    """The document of ``Engine.status``."""
    pool, speeds = engine.pool, engine.speeds
    return {
        "role": str(engine.role),
        "draining": engine.draining,
        "model": engine.model.name,
        "device": str(engine.model.device),
        "layout": {"fingerprint": engine.layout.fingerprint.hex(), "page_tokens": engine.layout.page_tokens},
        "context_tokens_max": engine.model.context_tokens_max,
        "frames": {"total": engine.arena.frames_total, "free": engine.arena.frames_free},
        "requests": {state.name.lower(): states.count(state) for state in State if state is not State.ENDED},
        "prefills_held": len(engine.prefills),
        "side_steps": side_steps,
        "speeds": {
            "step_ms": 1e3 * speeds.step_s,
            "prefill_tokens_per_s": speeds.prefill_tokens_per_s,
            "hook_us_per_layer": 1e6 * pool.hook_s / max(1, pool.hook_layers),
        },
        "pool": {"node": pool.store.name if pool.store else None, "up": pool.up, "failures": pool.failures},
    }
