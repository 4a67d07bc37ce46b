"""Names of nodes, hosts and zones, as numbers that arrays can hold."""

from __future__ import annotations


class NumberedNames:
    """Numbers for names, in the order in which they come; -1 for the empty one.

    Attributes:
        names: by number.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers = {"": -1}

    def __len__(self) -> int:
        return len(self.names)

    def number(self, name: str) -> int:
        """The number of a name; it is assigned at the first call."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]
