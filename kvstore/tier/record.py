"""Record: a copy of what an extent's table says of one frame."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.replica import STAMPED, RecordFormat


class Record(NamedTuple):
    """A copy of one frame's record. Whether it still is that, the word in the table says."""

    raw: bytes
    fmt: RecordFormat

    @property
    def word(self) -> int:
        """Generation and state, see ``model.replica.word_of``."""
        return self._word(0)

    @property
    def key(self) -> bytes:
        """See ``ExtentTable.key``."""
        return self.raw[RecordFormat.key]

    @property
    def root(self) -> bytes:
        """See ``ExtentTable.root``."""
        return self.raw[RecordFormat.root]

    @property
    def extra(self) -> bytes:
        """See ``ExtentTable.extra``."""
        return self.raw[RecordFormat.extra]

    @property
    def tokens(self) -> bytes:
        """Token ids, little-endian uint32; none in a lean record."""
        return self.raw[self.fmt.tokens]

    @property
    def identity(self) -> bytes:
        """Key, root, extra and token ids."""
        return self.raw[self.fmt.identity]

    @property
    def parent(self) -> bytes:
        """See ``ExtentTable.parent``."""
        return self.raw[self.fmt.parent]

    @property
    def info(self) -> int:
        """See ``RecordFormat``."""
        return self._word(self.fmt.info)

    @property
    def checksums(self) -> npt.NDArray[np.uint32]:
        """One per layer, once they are ``stamped``."""
        return np.frombuffer(self.raw[self.fmt.checksums], "<u4")

    @property
    def stamped(self) -> bool:
        """The checksums are there."""
        return bool(self.info >> 48 & STAMPED)

    def is_sound(self) -> bool:
        """Identity and parent are what was written, by their sum."""
        return xxhash.xxh3_64_intdigest(self.raw[self.fmt.summed]) == self._word(self.fmt.identity_sum)

    def _word(self, offset: int) -> int:
        return int.from_bytes(self.raw[offset : offset + 8], "little")
