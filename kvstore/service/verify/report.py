"""Report: what a verification of a stopped node found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvstore.model.replica import Tier

LISTED_MAX = 1000  # findings, and repairs, that are told one by one


@dataclass
class Report:
    """What was found. ``verified`` pages by tier, ``damaged`` ones by address, ``unstamped``: without checksums yet."""

    state: str = "stopped"
    verified: Counter[str] = field(default_factory=Counter)
    damaged: set[tuple[Any, ...]] = field(default_factory=set)
    unstamped: int = 0
    findings: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)

    def damage(self, tier: Tier, extent: int, frame: int, key: bytes, reason: str) -> None:
        """A sealed page does not hold."""
        self.damaged.add((tier, extent, frame))
        self.findings.append(f"{tier}: extent {extent} frame {frame}, page {key.hex()}: {reason} does not hold")

    def document(self, name: str) -> dict[str, Any]:
        """As ``Store.verify`` tells it, and more."""
        return {
            "name": name,
            "state": self.state,
            "pages_verified": sum(self.verified.values()),
            "pages_by_tier": dict(self.verified),
            "pages_without_checksums": self.unstamped,
            "pages_damaged": len(self.damaged),
            "findings": _some(self.findings),
            "repairs": _some(self.repairs),
        }


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - LISTED_MAX
    return lines if more <= 0 else [*lines[:LISTED_MAX], f"and {more} more"]
