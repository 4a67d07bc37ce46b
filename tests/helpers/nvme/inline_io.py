"""InlineIo: a peer of ``IoThreads`` in the caller's thread, so that a seed tells what happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.errors import KVStoreError

T = TypeVar("T")


class InlineIo:
    """See the module."""

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T | OSError | KVStoreError]:
        """See ``IoThreads.run``."""
        results: list[T | OSError | KVStoreError] = []
        for task in tasks:
            try:
                results.append(task())
            except (OSError, KVStoreError) as error:
                results.append(error)
        return results

    def close(self) -> None:
        """See ``IoThreads.close``."""
