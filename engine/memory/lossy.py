"""Lossy: a codec for replicas that may lose precision, bound to a layout. See ``engine.memory.compression``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.memory.compression import Codec, decode, encode, lossy_layout
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Lossy:
    """Pages of ``exact`` as pages of ``layout``, and back."""

    name: str
    exact: Layout
    layout: Layout

    @classmethod
    def of(cls, exact: Layout, name: str) -> Lossy | None:
        """The codec of that name; None for "none". Raises InvalidRequest if the layout does not permit it."""
        return None if name in ("", "none") else cls(name, exact, lossy_layout(exact, name))

    def encode(self, rows: Bytes) -> Bytes:
        """Encode whole tokens ``[n, bytes]``, exact to lossy."""
        out: Bytes = encode(rows, self.exact, self.name)
        return out

    def decode(self, rows: Bytes, out: Bytes | None = None) -> Bytes:
        """And back."""
        exact: Bytes = decode(rows, self.exact, self.name, out)
        return exact


def codecs(exact: Layout) -> Mapping[str, Lossy | None]:
    """Every codec that this layout permits, by name; "none" and "" are exact."""
    found: dict[str, Lossy | None] = {"": None, "none": None}
    for name in Codec:
        try:
            found[name] = Lossy.of(exact, name)
        except InvalidRequest:
            continue
    return found
