"""ChangedFiles: whether files that a setting names are others than before: passwords, certificates, keys."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_Stamp = tuple[int, int, int, int] | None


class ChangedFiles:
    """Remembers which files it saw. A file that was replaced, also behind a link, or written into, has changed."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: tuple[_Stamp, ...] | None = None

    def changed(self) -> bool:
        """True where a file is another one than at the last call; at the first call, too. Look before you read: what
        changes after that is seen by the next call."""
        now = tuple(_stamp(each) for each in self._paths)
        before, self._seen = self._seen, now
        return now != before

    def forget(self) -> None:
        """The next call says that they changed: what was read this time made no sense."""
        self._seen = None


def _stamp(path: Path) -> _Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
