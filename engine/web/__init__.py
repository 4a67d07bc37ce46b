"""``kvstore web``: pages about a running node or pool, and about clusters that do not exist yet."""

from engine.web.cli import web

__all__ = ["web"]
