"""Request traces in the JSONL format published with Mooncake (Qin et al., FAST'25).

One JSON object per line::

    {"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 41, 42]}

Timestamps are milliseconds since the start of the trace and never go back. Each hash id names one block of 512 prompt
tokens, the last of which may be partial. Ids are chained: an equal id means equal tokens *and* an equal prefix before
them. So in the example above block 41 can only ever follow block 0, and a later prompt that begins ``[0, 41]`` shares
its first 1024 tokens with this one. ("Block" is the trace's word; a page of the store may be any size.)
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

BLOCK_TOKENS = 512
VOCABULARY_TOKENS = 32_000
_INT64_MAX = 2**63 - 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt and its answer, content reduced to block ids.

    ``input_tokens`` need not be a multiple of the block size: ``len(block_ids) == ceil(input_tokens / block size)``.
    """

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]

    def tokens(self, block_tokens: int = BLOCK_TOKENS) -> npt.NDArray[np.uint32]:
        """Token ids of the prompt, uint32 ``[input_tokens]``, each below `VOCABULARY_TOKENS`.

        A pure function of the block ids, equal on every machine and numpy version: requests that share k leading ids
        share k blocks of tokens. `block_tokens` is the block size of the trace (512 in Mooncake's).

        Raises:
            InvalidRequest: the number of block ids does not fit `input_tokens` at this block size.
        """
        if len(self.block_ids) != _blocks(self.input_tokens, block_tokens):
            raise InvalidRequest(
                "block_tokens", f"{len(self.block_ids)} blocks of {block_tokens} do not hold {self.input_tokens} tokens"
            )
        # SplitMix64 (Steele, Lea, Flood 2014): each block is the stream of one generator seeded by its mixed id.
        seeds = _mix(np.array(self.block_ids, dtype=np.uint64) + _GOLDEN)
        steps = np.arange(1, block_tokens + 1, dtype=np.uint64) * _GOLDEN
        stream = _mix((seeds[:, None] + steps).reshape(-1)[: self.input_tokens])
        # The upper half scaled to the vocabulary: a multiplication and a shift, several times faster than modulo.
        return (((stream >> np.uint64(32)) * np.uint64(VOCABULARY_TOKENS)) >> np.uint64(32)).astype(np.uint32)


def read_trace(path: str | Path, limit: int | None = None, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """Requests of a trace file, in order, read as they are consumed; at most `limit`. Blank lines are skipped.

    Raises (while iterating):
        InvalidRequest: the file cannot be opened, or a line is not a request; the field names file, line and member,
            as in ``trace.jsonl:17 hash_ids``.
    """
    if limit is not None and limit < 0:
        raise InvalidRequest("limit", f"must not be negative (got {limit})")
    return islice(_read(Path(path), block_tokens), limit)


def write_trace(target: str | Path | TextIO, requests: Iterable[TraceRequest]) -> int:
    """Write `requests`, one line each, as they come; returns how many.

    A file is written under a temporary name next to its final one and renamed when complete: after an error or a crash
    it holds what it held before. A stream is left open, and holds whatever was written to it before an error.

    Raises:
        InvalidRequest: the path is a folder or a device, or its folder does not exist.
        OSError: the file cannot be written.
    """
    if not isinstance(target, str | Path):
        return _write(target, requests)
    path = Path(target).resolve()
    if path.exists() and not path.is_file():
        raise InvalidRequest(str(target), "must be a regular file; give a stream instead")
    if not path.parent.is_dir():
        raise InvalidRequest(str(target), "is in a folder that does not exist")
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
    """What a trace offers a cache, in one pass; memory is proportional to the distinct blocks.

    Means and ratios of an empty set are 0. Some keys need an explanation:

    - ``blocks_used_once_ratio``: share of the distinct blocks that appear in a single request.
    - ``reuse_gap_s_p50``: median seconds between two consecutive uses of a block, over all its reuses.
    - ``block_hit_ratio_infinite``: hits per block used, of a cache that never evicts.
    - ``next_turn_ratio``: entry t-1 estimates P(a further turn | t turns so far). A request is the next turn of the
      one that last used its deepest known block, if it repeats all full blocks of that one and more than the first
      block (which a trace may share between all requests); only requests of two full blocks or more count as ones
      that could have had a next turn. Turns beyond the end of the trace are missing, so the estimate is a little low.
      Turns reached by fewer than 50 requests are left out.
    """
    seen = _Seen()
    for request in requests:
        seen.add(request)
    return seen.summary()


_TURN_REQUESTS_MIN = 50  # below this the standard error of a ratio exceeds .07


@dataclass(slots=True)
class _Turn:
    """A request as the latest user of its blocks."""

    turn: int
    full_blocks: int
    extended: bool = False


@dataclass(slots=True)
class _Seen:
    """Running totals of `statistics`."""

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
            before = self.last_use.get(block)
            if before is not None:
                self.gaps_ms.append(request.timestamp_ms - before[0])
                self.reused.add(block)
            self.last_use[block] = use

    def _turn_of(self, request: TraceRequest) -> _Turn:
        known = 0
        while known < len(request.block_ids) and request.block_ids[known] in self.last_use:
            known += 1
        turn = _Turn(1, request.input_tokens // BLOCK_TOKENS)
        if known >= 2:
            previous = self.last_use[request.block_ids[known - 1]][1]
            if known >= previous.full_blocks:
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
    try:
        stream = path.open("rb")
    except OSError as failed:
        raise InvalidRequest(str(path), failed.strerror or str(failed)) from failed
    earliest_ms = 0
    with stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            request = _parse(line, f"{path.name}:{number}", block_tokens)
            if request.timestamp_ms < earliest_ms:
                raise InvalidRequest(f"{path.name}:{number} timestamp", f"goes back from {earliest_ms}")
            earliest_ms = request.timestamp_ms
            yield request


def _parse(line: bytes, where: str, block_tokens: int) -> TraceRequest:
    try:
        members = json.loads(line)
    except (ValueError, RecursionError) as failed:
        raise InvalidRequest(where, "is not a JSON object") from failed
    if not isinstance(members, dict):
        raise InvalidRequest(where, "is not a JSON object")
    timestamp_ms = _integer(members, "timestamp", 0, where)
    input_tokens = _integer(members, "input_length", 1, where)
    output_tokens = _integer(members, "output_length", 0, where)
    ids = members.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block) is int and 0 <= block <= _INT64_MAX for block in ids):
        raise InvalidRequest(f"{where} hash_ids", "must be a list of integers, none negative or above 2**63 - 1")
    if len(ids) != _blocks(input_tokens, block_tokens):
        raise InvalidRequest(
            f"{where} hash_ids",
            f"holds {len(ids)} ids, but {input_tokens} tokens are {_blocks(input_tokens, block_tokens)} blocks",
        )
    if len(set(ids)) != len(ids):
        raise InvalidRequest(f"{where} hash_ids", "names a block twice, which a chained id cannot be")
    return TraceRequest(timestamp_ms, input_tokens, output_tokens, tuple(ids))


def _integer(members: dict[str, Any], name: str, least: int, where: str) -> int:
    value = members.get(name)
    if (
        type(value) is not int or not least <= value <= _INT64_MAX
    ):  # `type`: true and false do not count as numbers here
        raise InvalidRequest(f"{where} {name}", f"must be an integer of at least {least}")
    return value


def _write(stream: TextIO, requests: Iterable[TraceRequest]) -> int:
    written = 0
    for request in requests:
        members = {
            "timestamp": request.timestamp_ms,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.block_ids,
        }
        stream.write(json.dumps(members) + "\n")
        written += 1
    return written


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser, a bijection of 64-bit words, in place."""
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
