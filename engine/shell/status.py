"""Status: what an engine says of itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.compute.kernels import chosen
from engine.compute.models import Model
from engine.config import EngineConfig
from engine.memory.arena import Arenas
from engine.memory.mounting import MountedArena
from engine.moving.serve import Prefills
from engine.moving.store_side import Pool
from engine.state.door import Door
from engine.state.engine_state import EngineState
from engine.state.sequence import Phase


def describe(
    config: EngineConfig,
    model: Model,
    arenas: Arenas,
    mounted: MountedArena,
    pool: Pool,
    door: Door,
    state: EngineState,
    prefills: Prefills,
    side_steps: int,
    graphs: str,
    demoted_pages: int,
) -> dict[str, Any]:
    """The document of ``Engine.status``. Any thread: it only reads."""
    arena = arenas.groups[0]
    found = [state.roster.sequences.get(number) for number in list(door.known.values())]
    frames = state.roster.frames
    phases = Counter(Phase.WAITING if sequence is None else sequence.phase for sequence in found)
    return {
        "role": str(door.role),
        "role_set_by": door.by,
        "role_order": door.order._asdict(),  # the last one of a leader among conductors
        "draining": door.draining,
        "model": model.name,
        "device": str(model.device),
        "ended": str(state.stopped) if state.stopped is not None else "",
        "graphs": graphs,
        "attention": chosen(arena.layout, arena.device).line,
        "model_path": str(Path(config.model).resolve()) if Path(config.model).is_dir() else None,
        "layout": {
            "fingerprint": arena.layout.fingerprint.hex(),
            "page_tokens": arena.layout.page_tokens,
            "page_bytes": arena.layout.page_bytes,
            "fields": asdict(arena.layout),
        },
        "groups": [
            {
                "layers": each.layout.layers,
                "window": group.window,
                "page_bytes": each.layout.page_bytes,
                "frames": each.frames_total,
                "frames_unused": each.frames_free,
            }
            for each, group in zip(arenas.groups, state.rules.groups, strict=True)
        ],
        "context_tokens_max": model.context_tokens_max,
        "frames": {
            "total": arena.frames_total,
            "free": frames.free,  # including kept pages, which are evicted as soon as a frame is needed
            "kept": frames.kept,
            "shared": frames.shared,
            "tokens_max": state.rules.tokens_max,  # of one sequence; 0: no bound
            "kv_tokens_max": 0 if state.rules.window else arena.frames_total * arena.layout.page_tokens,  # of all
            "kv_tokens": (arena.frames_total - frames.free) * arena.layout.page_tokens,  # that sequences hold
        },
        "mounted": {"segment": mounted.number, "why_not": mounted.why},
        "kept_pages": {"found": frames.found, "evicted": frames.evicted, "demoted": demoted_pages},
        "requests": {phase.name.lower(): phases[phase] for phase in Phase if phase is not Phase.ENDED},
        "batch_max": config.batch_max,
        "chunk_tokens": config.chunk_tokens,
        "prefills_held": len(prefills),
        "side_steps": side_steps,
        "speeds": {
            "step_ms": 1e3 * state.speeds.step_s,
            "prefill_tokens_per_s": state.speeds.prefill_tokens_per_s,
            "hook_us_per_layer": 1e6 * pool.hook_s / max(1, pool.hook_layers),
        },
        "pool": {"node": pool.store.name if pool.store else None, "up": pool.up, "failures": pool.failures},
    }
