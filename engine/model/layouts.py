"""Comparison of the layouts of two engines: why one cannot use the other's KV."""

from __future__ import annotations

from dataclasses import fields

from kvstore.model.layout import Layout


def explain_mismatch(ours: Layout, theirs: Layout) -> str:
    """Return a string with both fingerprints and every field in which the layouts differ."""
    differing = [
        f"{setting.name}: ours {getattr(ours, setting.name)!r}, theirs {getattr(theirs, setting.name)!r}"
        for setting in fields(Layout)
        if getattr(ours, setting.name) != getattr(theirs, setting.name)
    ]
    fingerprints = f"fingerprints: ours {ours.fingerprint.hex()}, theirs {theirs.fingerprint.hex()}"
    return f"layouts differ ({fingerprints}): {'; '.join(differing) or 'no field differs'}"
