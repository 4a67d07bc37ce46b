"""Request traces, in JSONL. Traces are written in the format that was published with Mooncake (Qin et al., FAST'25).

One JSON object per line::

    {"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 41, 42]}

Timestamps are milliseconds since the start of the trace, and never decrease. Each hash id names a block of 512 tokens
of the prompt. The last block may be partial. Ids are chained: equal ids mean equal tokens *and* an equal prefix. So
block 41 in the example always follows block 0, and another prompt that begins ``[0, 41]`` has the same first 1024
tokens. ("Block" is the word of the trace. A page of the store may have another size.)

Two more formats are read, plain or compressed with gzip. Their blocks are smaller, and are joined to blocks of 512
tokens:

- ``dynamo.request.trace.v1``, which NVIDIA Dynamo records: an object per event. Only those of type ``request_end`` with
  lengths and hashes (``replay``) are requests.
- Sessions of coding agents, as Weka published them: an object per session, whose hash ids are its own. Its requests may
  contain those of subagents. Sessions have no common clock: here one begins every ``SESSION_EVERY_S`` seconds.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TextIO, cast

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

BLOCK_TOKENS = 512
VOCABULARY_TOKENS = 32_000
SESSION_EVERY_S = 10.0
DYNAMO_SCHEMA = "dynamo.request.trace.v1"
_GZIP = b"\x1f\x8b"
_INT64_MAX = 2**63 - 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt, as the ids of its blocks, and the length of its answer.

    The last block may be partial: ``len(block_ids) == ceil(input_tokens / block size)``.
    """

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]

    def tokens(self, block_tokens: int = BLOCK_TOKENS) -> npt.NDArray[np.uint32]:
        """Return token ids for the prompt, uint32 ``[input_tokens]``, each below ``VOCABULARY_TOKENS``.

        They depend only on the block ids, and are the same on every machine and with every version of numpy. Requests
        with k common leading ids have k common blocks of tokens.

        Raises:
            InvalidRequest: ``input_tokens`` needs another number of blocks of ``block_tokens`` tokens.
        """
        if len(self.block_ids) != (blocks := _blocks(self.input_tokens, block_tokens)):
            reason = f"{self.input_tokens} tokens need {blocks} blocks of {block_tokens} (got {len(self.block_ids)})"
            raise InvalidRequest("block_tokens", reason)
        # SplitMix64 (Steele, Lea, Flood 2014): the tokens of a block come from a generator seeded with its mixed id.
        seeds = _mix(np.array(self.block_ids, dtype=np.uint64) + _GOLDEN)
        steps = np.arange(1, block_tokens + 1, dtype=np.uint64) * _GOLDEN
        stream = _mix((seeds[:, None] + steps).reshape(-1)[: self.input_tokens])
        # A multiplication and a shift map the upper half to the vocabulary, several times faster than a modulo.
        return (((stream >> np.uint64(32)) * np.uint64(VOCABULARY_TOKENS)) >> np.uint64(32)).astype(np.uint32)


def read_trace(path: str | Path, limit: int | None = None, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file, in order, at most ``limit``. Blank lines are skipped.

    The file is read during the iteration.

    Raises (during the iteration):
        InvalidRequest: the file cannot be opened, or a line is not a valid request. The field names the file, the line
            and the member, as in ``trace.jsonl:17 hash_ids``.
    """
    if limit is not None and limit < 0:
        raise InvalidRequest("limit", f"must not be negative (got {limit})")
    return islice(_read(Path(path), block_tokens), limit)


def write_trace(target: str | Path | TextIO, requests: Iterable[TraceRequest]) -> int:
    """Write requests, one per line. Returns their number.

    A file is written under a temporary name and renamed when it is complete. So after an error or a crash, the previous
    file is unchanged. A stream stays open. After an error it contains the requests that were written before.

    Raises:
        InvalidRequest: the path is a folder or a device, or its folder does not exist.
        OSError: the file cannot be written.
    """
    if not isinstance(target, str | Path):
        return _write(target, requests)
    path = Path(target).resolve()
    if path.exists() and not path.is_file():
        raise InvalidRequest(str(target), "must be a regular file")
    if not path.parent.is_dir():
        raise InvalidRequest(str(target), "the folder does not exist")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="ascii", newline="\n") as stream:
            written = _write(stream, requests)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return written


def statistics(requests: Iterable[TraceRequest]) -> dict[str, Any]:
    """Return statistics of a trace about lengths, arrivals and reuse.

    Reads the requests once. Memory is proportional to the number of distinct blocks. Means and ratios of an empty set
    are 0. Some of the keys:

    - ``blocks_used_once_ratio``: the share of the distinct blocks that appear in only one request.
    - ``reuse_gap_s_p50``: the median time between two consecutive uses of a block, in seconds.
    - ``block_hit_ratio_infinite``: the block hit ratio of a cache that never evicts.
    - ``next_turn_ratio``: entry t-1 is an estimate of P(a further turn | t turns so far). A request is the next turn of
      the request that last used its deepest known block, if it repeats all full blocks of that request and at least two
      blocks (all requests of a trace may have the first block in common). Only requests with at least two full blocks
      count as having a chance of a next turn. Turns after the end of the trace are missing, so the estimates are
      slightly low. Turns with fewer than 50 requests are omitted.
    """
    totals = _Totals()
    for request in requests:
        totals.add(request)
    return totals.summary()


_TURN_REQUESTS_MIN = 50  # with fewer, the standard error of a ratio exceeds .07


@dataclass(slots=True)
class _Turn:
    """A request that may be the last one to use a block.

    Attributes:
        turn: the number of this turn in its session, starting at 1.
        extended: True once a next turn was found.
    """

    turn: int
    full_blocks: int
    extended: bool = False


@dataclass(slots=True)
class _Totals:
    """The running totals of ``statistics``.

    Attributes:
        reused: the blocks that were used more than once.
        last_use: for each block, the time and the request of its last use.
        reached, extended: for each turn, the number of requests that reached it, and that had a next turn.
    """

    timestamps_ms: array[int] = field(default_factory=lambda: array("q"))
    gaps_ms: array[int] = field(default_factory=lambda: array("q"))
    input_tokens: int = 0
    output_tokens: int = 0
    blocks: int = 0
    reused: set[int] = field(default_factory=set)
    last_use: dict[int, tuple[int, _Turn]] = field(default_factory=dict)
    reached: list[int] = field(default_factory=list)
    extended: list[int] = field(default_factory=list)

    def add(self, request: TraceRequest) -> None:
        self.timestamps_ms.append(request.timestamp_ms)
        self.input_tokens += request.input_tokens
        self.output_tokens += request.output_tokens
        self.blocks += len(request.block_ids)
        use = request.timestamp_ms, self._turn_of(request)
        for block in request.block_ids:
            previous = self.last_use.get(block)
            if previous is not None:
                self.gaps_ms.append(request.timestamp_ms - previous[0])
                self.reused.add(block)
            self.last_use[block] = use

    def _turn_of(self, request: TraceRequest) -> _Turn:
        known_blocks = 0
        while known_blocks < len(request.block_ids) and request.block_ids[known_blocks] in self.last_use:
            known_blocks += 1
        turn = _Turn(1, request.input_tokens // BLOCK_TOKENS)
        if known_blocks >= 2:
            previous = self.last_use[request.block_ids[known_blocks - 1]][1]
            if known_blocks >= previous.full_blocks:
                turn.turn = previous.turn + 1
                if previous.full_blocks >= 2 and not previous.extended:
                    previous.extended = True
                    self.extended[previous.turn - 1] += 1
        while len(self.reached) < turn.turn:
            self.reached.append(0)
            self.extended.append(0)
        if turn.full_blocks >= 2:
            self.reached[turn.turn - 1] += 1
        return turn

    def summary(self) -> dict[str, Any]:
        requests, distinct = len(self.timestamps_ms), len(self.last_use)
        arrivals_ms = np.array(self.timestamps_ms, dtype=np.int64)
        between_s = np.diff(arrivals_ms) / 1000
        return {
            "requests": requests,
            "duration_s": int(arrivals_ms[-1] - arrivals_ms[0]) / 1000 if requests else 0.0,
            "interarrival_s_mean": _mean(between_s),
            "interarrival_s_p50": _median(between_s),
            "interarrival_s_max": float(between_s.max()) if len(between_s) else 0.0,
            "input_tokens_mean": _ratio(self.input_tokens, requests),
            "output_tokens_mean": _ratio(self.output_tokens, requests),
            "blocks": self.blocks,
            "blocks_distinct": distinct,
            "blocks_used_once_ratio": _ratio(distinct - len(self.reused), distinct),
            "block_hit_ratio_infinite": _ratio(self.blocks - distinct, self.blocks),
            "reuse_gap_s_p50": _median(np.array(self.gaps_ms, dtype=np.int64) / 1000),
            "next_turn_ratio": [
                round(extended / reached, 3)
                for extended, reached in zip(self.extended, self.reached, strict=True)
                if reached >= _TURN_REQUESTS_MIN
            ],
        }


def _read(path: Path, block_tokens: int) -> Iterator[TraceRequest]:
    last_ms = 0
    with _open(path) as stream:
        lines = ((f"{path.name}:{number}", line) for number, line in enumerate(_lines(path, stream), start=1))
        members = ((place, _object(line, place)) for place, line in lines if not line.isspace())
        first = next(members, None)
        if first is None:
            return
        if "schema" in first[1] or "requests" in first[1]:
            yield from _read_foreign(chain([first], members), block_tokens)
            return
        for place, each in chain([first], members):
            request = _parse(each, place, block_tokens)
            if request.timestamp_ms < last_ms:
                reason = f"must not be before that of the previous line, {last_ms} (got {request.timestamp_ms})"
                raise InvalidRequest(f"{place} timestamp", reason)
            last_ms = request.timestamp_ms
            yield request


def _open(path: Path) -> IO[bytes]:
    try:
        with path.open("rb") as stream:
            compressed = stream.read(2) == _GZIP
        return cast(IO[bytes], gzip.open(path)) if compressed else path.open("rb")
    except OSError as error:
        raise InvalidRequest(str(path), error.strerror or str(error)) from error


def _lines(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from stream
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequest(str(path), f"cannot be read ({error})") from error


def _object(line: bytes, place: str) -> dict[str, Any]:
    """Parse a line. ``place`` names the file and the line in errors."""
    try:
        members = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(place, "must be a JSON object") from error
    if not isinstance(members, dict):
        raise InvalidRequest(place, "must be a JSON object")
    return members


class _Joined:
    """Ids for blocks of ``block_tokens`` tokens that consist of smaller blocks. Equal ids mean equal prefixes."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ids: dict[tuple[int, tuple[object, ...]], int] = {}

    def request(
        self, timestamp_ms: int, lengths: tuple[int, int], hashes: list[Any], small: int, scope: object, place: str
    ) -> TraceRequest:
        """Make a request of ``(input, output)`` tokens from hashes of ``small`` tokens each, valid in a scope."""
        input_tokens, output_tokens = lengths
        if small < 1 or self._block_tokens % small:
            raise InvalidRequest(f"{place} block size", f"must divide {self._block_tokens} (got {small})")
        if len(hashes) not in (input_tokens // small, _blocks(input_tokens, small)):
            reason = f"must have {_blocks(input_tokens, small)} for {input_tokens} tokens (got {len(hashes)})"
            raise InvalidRequest(f"{place} hashes", reason)
        count, ids, before = self._block_tokens // small, [], -1
        for start in range(0, _blocks(input_tokens, small), count):
            key = before, (scope, *hashes[start : start + count])
            before = self._ids.setdefault(key, len(self._ids))
            ids.append(before)
        return TraceRequest(timestamp_ms, input_tokens, output_tokens, tuple(ids))


def _read_foreign(members: Iterable[tuple[str, dict[str, Any]]], block_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests of the two other formats in the order of their arrival: all are read first."""
    joined, requests = _Joined(block_tokens), []
    for number, (place, each) in enumerate(members):
        if isinstance(each.get("requests"), list):
            small, start_ms = _integer(each, "block_size", 1, place), 1000 * SESSION_EVERY_S * number
            for request in _leaves(each["requests"], place):
                at_ms = int(start_ms + 1000 * _seconds(request, place))
                lengths = _integer(request, "in", 1, place), _integer(request, "out", 0, place)
                hashes = _list(request, "hash_ids", place)
                requests.append(joined.request(at_ms, lengths, hashes, small, number, place))
        elif each.get("schema") != DYNAMO_SCHEMA:
            raise InvalidRequest(f"{place} schema", f"must be {DYNAMO_SCHEMA} (got {each.get('schema')!r})")
        elif each.get("event_type") == "request_end" and isinstance(about := each.get("request"), dict):
            replay = about.get("replay")
            if not isinstance(replay, dict):
                raise InvalidRequest(f"{place} replay", "must be an object with lengths and hashes")
            lengths = _integer(replay, "input_length", 1, place), _integer(about, "output_tokens", 0, place)
            hashes = _list(replay, "input_sequence_hashes", place)
            at_ms = _integer(about, "request_received_ms", 0, place)
            small = _integer(replay, "trace_block_size", 1, place)
            requests.append(joined.request(at_ms, lengths, hashes, small, None, place))
    requests.sort(key=lambda request: request.timestamp_ms)
    start_ms = requests[0].timestamp_ms if requests else 0
    for made in requests:
        yield replace(made, timestamp_ms=made.timestamp_ms - int(start_ms))


def _leaves(requests: list[Any], place: str) -> Iterator[dict[str, Any]]:
    """Yield the requests of a session and of its subagents."""
    waiting = list(reversed(requests))
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            raise InvalidRequest(f"{place} requests", "must be objects")
        if isinstance(each.get("requests"), list):
            waiting += reversed(each["requests"])
        else:
            yield each


def _seconds(members: dict[str, Any], place: str) -> float:
    value = members.get("t")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _INT64_MAX / 1e6:
        raise InvalidRequest(f"{place} t", f"must be seconds since the start of the session (got {value!r})")
    return float(value)


def _list(members: dict[str, Any], name: str, place: str) -> list[Any]:
    value = members.get(name)
    if not isinstance(value, list) or not all(type(each) in (int, str) for each in value):
        raise InvalidRequest(f"{place} {name}", "must be a list of integers or strings")
    return value


def _parse(members: dict[str, Any], place: str, block_tokens: int) -> TraceRequest:
    """Make a request of a line. ``place`` names the file and the line in errors."""
    timestamp_ms = _integer(members, "timestamp", 0, place)
    input_tokens = _integer(members, "input_length", 1, place)
    output_tokens = _integer(members, "output_length", 0, place)
    ids = members.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block) is int and 0 <= block <= _INT64_MAX for block in ids):
        raise InvalidRequest(f"{place} hash_ids", "must be a list of integers from 0 to 2**63 - 1")
    if len(ids) != (blocks := _blocks(input_tokens, block_tokens)):
        reason = f"must have {blocks} ids for {input_tokens} tokens (got {len(ids)})"
        raise InvalidRequest(f"{place} hash_ids", reason)
    if len(set(ids)) != len(ids):
        raise InvalidRequest(f"{place} hash_ids", "must not name a block twice, because ids are chained")
    return TraceRequest(timestamp_ms, input_tokens, output_tokens, tuple(ids))


def _integer(members: dict[str, Any], name: str, least: int, place: str) -> int:
    value = members.get(name)
    if type(value) is not int or not least <= value <= _INT64_MAX:  # not isinstance(): a bool is not a number in JSON
        raise InvalidRequest(f"{place} {name}", f"must be an integer of at least {least} (got {value!r})")
    return value


def _write(stream: TextIO, requests: Iterable[TraceRequest]) -> int:
    count = 0
    for request in requests:
        members = {
            "timestamp": request.timestamp_ms,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.block_ids,
        }
        stream.write(json.dumps(members) + "\n")
        count += 1
    return count


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64, a bijection of 64-bit words, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _median(values: npt.NDArray[np.float64]) -> float:
    return float(np.median(values)) if len(values) else 0.0
