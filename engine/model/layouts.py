"""Layouts of two engines: whether one can use the other's KV."""

from __future__ import annotations

from dataclasses import fields

from kvstore.model.layout import Layout


def explain_mismatch(ours: Layout, theirs: Layout) -> str:
    """Why one engine cannot use the other's KV: both fingerprints, and every field that differs."""
    differing = [
        f"{setting.name}: ours {getattr(ours, setting.name)!r}, theirs {getattr(theirs, setting.name)!r}"
        for setting in fields(Layout)
        if getattr(ours, setting.name) != getattr(theirs, setting.name)
    ]
    prints = f"fingerprint {ours.fingerprint.hex()} here, {theirs.fingerprint.hex()} there"
    return f"layouts differ ({prints}): {'; '.join(differing) or 'in nothing'}"
