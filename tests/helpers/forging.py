"""Forging: token ids that hit a chosen page key, from any parent, at once. What an attacker can do to xxh3_128.

For a page of 16 tokens the hash reads ten words of 8 bytes: the parent ``p0 p1`` and the tokens ``w2 .. w9``. Its
state, two words, is mixed three times (sums and xors beside ``fold``, the xored halves of a 128-bit product)::

    low, high = length * PRIME64_1, 0
    mix(w4 w5, w4 w5); mix(w2 w3, w6 w7); mix(p0 p1, w8 w9)

and then finished by steps that can be undone. Where ``w2`` is the very word that is xored onto it the product is 0
whatever ``w3`` is, so that ``w3`` makes any wanted ``high`` and ``w9`` any wanted ``low``.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import xxhash

PAGE_TOKENS = 16
MASK = 2**64 - 1
SECRET = bytes.fromhex(  # the first 96 bytes of the constant that xxh3 is keyed with by default
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
)
K = struct.unpack("<12Q", SECRET)
PRIME64_1, PRIME64_2, PRIME64_4 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x85EBCA77C2B2AE63
AVALANCHE = 0x165667919E3779F9


def fold(left: int, right: int) -> int:
    """The halves of the product, xored."""
    product = left * right
    return (product & MASK) ^ (product >> 64)


def _unshift(value: int, bits: int) -> int:
    """What ``value`` was before it was xored with itself, shifted to the right."""
    found, shift = value, bits
    while shift < 64:
        found = value ^ (found >> bits)
        shift += bits
    return found


def _unfinished(word: int) -> int:
    """Undo xxh3's avalanche."""
    word = _unshift(word, 32)
    word = word * pow(AVALANCHE, -1, 2**64) & MASK
    return _unshift(word, 37)


def _wanted_state(key: bytes, length: int) -> tuple[int, int]:
    """The state that the hash has to end in: low + high and low * P1 + high * P4 are known."""
    high_word, low_word = struct.unpack(">QQ", key)
    total = _unfinished(low_word)
    weighed = (_unfinished(-high_word & MASK) - length * PRIME64_2) & MASK
    factor = (PRIME64_4 - PRIME64_1) & MASK
    rest = (weighed - total * PRIME64_1) & MASK
    twos = (factor & -factor).bit_length() - 1
    assert not rest & ((1 << twos) - 1), "no input of this length has that key"
    high = (rest >> twos) * pow(factor >> twos, -1, 2**64) & MASK
    return (total - high) & MASK, high


def tokens_for(key: bytes, parent: bytes) -> npt.NDArray[np.uint32]:
    """16 token ids whose page, behind ``parent``, has this key; which is one that some page of 16 tokens has."""
    length = 16 + 4 * PAGE_TOKENS
    p0, p1 = struct.unpack("<QQ", parent)
    low, high = _wanted_state(key, length)
    w4, w5, w6, w7, w8 = 1, 2, 3, 4, 5
    w2 = K[4]
    first_low = (length * PRIME64_1 + fold(w4 ^ K[8], w5 ^ K[9])) & MASK ^ ((w4 + w5) & MASK)
    first_high = fold(w4 ^ K[10], w5 ^ K[11]) ^ ((w4 + w5) & MASK)
    second_low = first_low ^ ((w6 + w7) & MASK)  # w2 makes the product 0
    w9 = ((low ^ ((second_low + fold(p0 ^ K[0], p1 ^ K[1])) & MASK)) - w8) & MASK
    second_high = ((high ^ ((p0 + p1) & MASK)) - fold(w8 ^ K[2], w9 ^ K[3])) & MASK
    w3 = ((second_high ^ ((first_high + fold(w6 ^ K[6], w7 ^ K[7])) & MASK)) - w2) & MASK
    data = struct.pack("<8Q", w2, w3, w4, w5, w6, w7, w8, w9)
    assert xxhash.xxh3_128_digest(parent + data) == key, "xxh3 is another one"
    return np.frombuffer(data, np.uint32)
