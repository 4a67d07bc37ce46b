"""Documents: parses the JSON of a request's body, at a cost that its size bounds.

Python makes 24 bytes of objects from one byte of ``[1],[1],...``, and holds the interpreter until all are made: 8 MiB
cost 200 MiB and stall every other request for a second. So numpy first examines a body that is not small, in blocks,
and other threads run in the meantime:

    {"model": "m", "prompt": [[5, 17, ... 100,000 more], "text"]}
    {"model": "m", "prompt": [NaN,                       "text"]}    what ``json`` reads; the ids are cut out

Lists of token ids become arrays without a Python object for each id. The rest must have at most ``VALUES_MAX``
values, whatever their kind and nesting; texts may have any length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.conductor.http.openai_errors import INVALID, Refusal

SMALL_BYTES: Final = 16 << 10  # a body up to this size is parsed directly: at worst that takes a millisecond
VALUES_MAX: Final = 32768  # values of a body, apart from token ids in lists: some 8,000 messages
LISTS_MAX: Final = 64  # that are cut out: twice the prompts that a request may have
CUT_BYTES_MIN: Final = 256  # a list that is shorter is left to ``json``, as one value for each id
BLOCK_BYTES: Final = 64 << 10
TOKEN_MAX: Final = 2**32 - 1
TOKEN_DIGITS: Final = 10  # digits of the largest token
CUT: Final = b"NaN"  # in place of a list that was cut out: not JSON, so a body has none of its own

_QUOTE, _ESCAPE, _COMMA, _ZERO = b'"'[0], b"\\"[0], b","[0], b"0"[0]
_OPEN, _CLOSE = b"{"[0], b"}"[0]  # brackets differ from braces in one bit
_CASE: Final = 0x20
_IN_LISTS: Final = np.zeros(256, np.bool_)
_IN_LISTS[list(b"0123456789, \t\r\n")] = True

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class TokenList:
    """A long list of whole numbers in a document. ``ids``: None if one of them is above ``TOKEN_MAX``."""

    ids: Ids | None


def parse_document(body: bytes | bytearray) -> dict[str, Any]:
    """The object in a body, which must be UTF-8. Long lists of token ids in it are ``TokenList``.

    A body beyond ``SMALL_BYTES`` belongs in a thread: it takes up to 0.3 s, and lets other threads run.

    Raises:
        Refusal: the body is not such an object, or has more than ``VALUES_MAX`` values.
    """
    try:
        found = json.loads(body.decode()) if len(body) <= SMALL_BYTES else _parse_large(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, a number of thousands of digits; or nested too deeply
        raise Refusal(400, INVALID, "the body is not valid JSON", code="invalid_json") from None
    if not isinstance(found, dict):
        raise Refusal(400, INVALID, "the body is not a JSON object", code="invalid_json")
    return found


def _parse_large(body: bytes | bytearray) -> Any:
    data = np.frombuffer(body, np.uint8)
    brackets, commas = _outline(data)
    cuts: list[tuple[int, int]] = []
    lists: list[TokenList] = []
    for start, stop in _flat(data, brackets):
        found = _token_list(data[start + 1 : stop])
        if found is not None:
            token_list, count = found
            commas -= count - 1
            cuts.append((start, stop + 1))
            lists.append(token_list)
            if len(lists) == LISTS_MAX:
                break
    values = commas + len(brackets) // 2 - len(cuts) + 1
    if values > VALUES_MAX:
        raise _too_many()
    waiting = iter(lists)

    def cut_out(_: str) -> TokenList:
        found = next(waiting, None)
        if found is None:  # a NaN that the client sent
            raise ValueError
        return found

    text = b"".join(_remaining(body, cuts)).decode() if cuts else body.decode()
    return json.loads(text, parse_constant=cut_out)


def _remaining(body: bytes | bytearray, cuts: list[tuple[int, int]]) -> Iterator[bytes | memoryview]:
    at = 0
    whole = memoryview(body)
    for start, stop in cuts:
        yield whole[at:start]
        yield CUT
        at = stop
    yield whole[at:]


def _outline(data: Bytes) -> tuple[npt.NDArray[np.int64], int]:
    """Positions of brackets and braces outside texts, and the number of commas outside texts.

    Raises:
        Refusal: there are too many brackets.
    """
    found: list[npt.NDArray[np.int64]] = []
    brackets, commas, in_text, escapes = 0, 0, False, 0
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        quotes = np.flatnonzero(block == _QUOTE)
        quotes, escapes = _unescaped(block, quotes, escapes)
        flips = np.zeros(len(block), np.uint8)
        flips[quotes] = 1
        outside = ((np.add.accumulate(flips, dtype=np.uint8) + np.uint8(in_text)) & 1) == 0
        in_text ^= bool(len(quotes) % 2)
        kinds = block | _CASE
        ours = np.flatnonzero(((kinds == _OPEN) | (kinds == _CLOSE)) & outside)
        commas += int(np.count_nonzero((block == _COMMA) & outside))
        brackets += len(ours)
        if brackets > 2 * VALUES_MAX:
            raise _too_many()
        found.append(ours + at)
    return np.concatenate(found), commas


def _unescaped(block: Bytes, quotes: npt.NDArray[np.int64], carried: int) -> tuple[npt.NDArray[np.int64], int]:
    """The quotes that begin or end a text, and how many backslashes the block ends with.

    Args:
        carried: how many backslashes came right before the block.
    """
    escapes = np.flatnonzero(block == _ESCAPE)
    if not len(escapes):
        return (quotes[1:] if carried % 2 and len(quotes) and quotes[0] == 0 else quotes), 0
    begins = escapes[np.flatnonzero(np.diff(escapes, prepend=-2) != 1)]  # of each run of backslashes
    runs = np.searchsorted(begins, quotes) - 1  # the last one before each quote
    lengths = quotes - begins[np.maximum(runs, 0)]
    if begins[0] == 0:
        lengths[runs == 0] += carried
    is_run = np.zeros(len(quotes), np.bool_)
    after = quotes > 0
    is_run[after] = block[quotes[after] - 1] == _ESCAPE
    escaped = is_run & (lengths % 2 == 1)
    if len(quotes) and quotes[0] == 0:
        escaped[0] = carried % 2 == 1
    ending = 0
    if escapes[-1] == len(block) - 1:
        ending = len(block) - int(begins[-1]) + (carried if begins[-1] == 0 else 0)
    return quotes[~escaped], ending


def _flat(data: Bytes, brackets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where a list opens and closes that contains no list or object and is long enough to cut out."""
    if len(brackets) < 2:
        return
    kinds = data[brackets]
    opens, closes = kinds[:-1] == b"["[0], kinds[1:] == b"]"[0]
    for index in np.flatnonzero(opens & closes & (np.diff(brackets) > CUT_BYTES_MIN)):
        yield int(brackets[index]), int(brackets[index + 1])


def _token_list(text: Bytes) -> tuple[TokenList, int] | None:
    """The whole numbers between two brackets, and how many; None: there is something else, or it is not valid JSON."""
    parts: list[Ids] = []
    beyond = False
    at = 0
    while at < len(text):
        block = text[at : at + BLOCK_BYTES]
        is_last = at + len(block) == len(text)
        if not is_last:
            commas = np.flatnonzero(block == _COMMA)
            if not len(commas):
                return None
            block = block[: commas[-1] + 1]
        at += len(block)
        ids = _numbers(block, is_last)
        if ids is None:
            return None
        beyond |= bool(len(ids)) and int(ids.max()) > TOKEN_MAX
        parts.append(ids.astype(np.uint32))
    count = sum(map(len, parts))
    return TokenList(None if beyond else np.concatenate(parts)), count


def _numbers(block: Bytes, is_last: bool) -> npt.NDArray[np.uint64] | None:
    """Numbers with a comma after each but the last; a number with more digits than a token becomes 2**32."""
    if not _IN_LISTS[block].all():
        return None
    is_digit = block - _ZERO < 10
    padded = np.concatenate(([False], is_digit, [False]))
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    starts, stops = edges[::2], edges[1::2]
    commas = np.flatnonzero(block == _COMMA)
    if len(commas) != len(starts) - is_last:
        return None
    if (commas < stops[: len(commas)]).any() or (commas[: len(starts) - 1] > starts[1:]).any():
        return None  # two numbers without a comma between, or two commas without a number
    digits = stops - starts
    if ((block[starts] == _ZERO) & (digits > 1)).any():
        return None
    values = np.zeros(len(starts), np.uint64)
    for place in range(min(int(digits.max(initial=0)), TOKEN_DIGITS)):
        at = np.maximum(stops - 1 - place, 0)
        values += np.where(place < digits, block[at] - _ZERO, 0).astype(np.uint64) * np.uint64(10**place)
    values[digits > TOKEN_DIGITS] = TOKEN_MAX + 1
    return values


def _too_many() -> Refusal:
    reason = f"the body has more than {VALUES_MAX} values that are not token ids in a list"
    return Refusal(400, INVALID, reason, code="invalid_json")
