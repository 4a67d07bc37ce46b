"""The description of a cluster to simulate, and its parts that move and keep KV: links, and caches of nodes."""

from __future__ import annotations

import tomllib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from engine.conductor.state.candidates import FAR, HERE, HOST, NVME, ZONE, Priors
from engine.simulator.cache import CacheSimulation
from engine.simulator.hardware import (
    ASSUMED,
    GPUS,
    LINKS,
    MODELS,
    Efficiency,
    LinkSpeed,
    ModelShape,
    Roofline,
    choose,
    gpus_needed,
)
from engine.simulator.policies import make_policy
from engine.simulator.trace import BLOCK_TOKENS
from kvstore.config.reading import parse_size
from kvstore.errors import InvalidRequest
from kvstore.state.eviction import POLICY_DEFAULT

ENGINES_MAX: Final = 4096
PAGES_MAX: Final = 1 << 24  # of one cache: its columns take 50 bytes each
HBM_CACHE_SHARE: Final = 0.5  # of an engine's KV memory, at most, for prefixes that no running sequence uses
IN_MEMORY_BYTES_PER_S: Final = 1e13  # a prefix in the engine's own memory is used in place


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster. Each field is a key of a specification.

    Attributes:
        gpu, model: names in ``hardware.GPUS`` and ``hardware.MODELS``.
        gpus: GPUs of one engine; 0 for as few as hold the model.
        engines: all engines; ``prefill``: how many of them only compute prompts for the others. With 0 every engine
            does both.
        engines_per_host: hosts are filled in order.
        chunk_tokens: tokens of a prompt that one step computes, in addition to running sequences. With 0 a prompt is
            computed at once, and running sequences wait.
        layerwise: KV moves to the engine that answers while the prompt is computed, instead of afterwards.
        batch_max: sequences that an engine decodes together.
        fabric, local, host_link, drive: names in ``hardware.LINKS``: between hosts, between engines of a host, between
            an engine and its host's memory, and to NVMe.
        adapters, drives: how many adapters of the fabric and drives a host has.
        pool: the nodes of all hosts form one pool. Without it each engine reuses only prefixes in its own memory.
        remote: with ``pool``, prefixes of other nodes can be loaded. Otherwise each node uses only its own.
        dram, nvme: bytes of a node, with ``pool``.
        eviction: the policy of a node.
        conductors: how many conductors share the requests.
    """

    gpu: str = "h100"
    model: str = "8b-gqa"
    gpus: int = 0
    engines: int = 8
    prefill: int = 0
    engines_per_host: int = 8
    chunk_tokens: int = 2048
    layerwise: bool = True
    batch_max: int = 256
    fabric: str = "rdma-400"
    local: str = "nvlink"
    host_link: str = "pcie5"
    drive: str = "nvme"
    adapters: int = 1
    drives: int = 4
    pool: bool = True
    remote: bool = True
    dram: int = 512 << 30
    nvme: int = 0
    eviction: str = POLICY_DEFAULT
    conductors: int = 1

    def __post_init__(self) -> None:
        choose("gpu", GPUS, self.gpu)
        choose("model", MODELS, self.model)
        for name in ("fabric", "local", "host_link", "drive"):
            choose(name, LINKS, getattr(self, name))
        least = {"gpus": 0, "prefill": 0, "chunk_tokens": 0, "dram": 0, "nvme": 0}
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < least.get(field.name, 1):
                raise InvalidRequest(field.name, f"must be at least {least.get(field.name, 1)} (got {value})")
        if self.engines > ENGINES_MAX:
            raise InvalidRequest("engines", f"must be at most {ENGINES_MAX} (got {self.engines})")
        if self.prefill >= self.engines:
            raise InvalidRequest("prefill", f"must be below {self.engines}, the number of engines (got {self.prefill})")
        if self.pool and self.dram < self.page_bytes:
            raise InvalidRequest("dram", f"must hold a page of {self.page_bytes} bytes (got {self.dram})")
        if max(self.dram, self.nvme) > PAGES_MAX * self.page_bytes:
            raise InvalidRequest("dram", f"must hold at most {PAGES_MAX} pages, as must nvme (got {self.dram})")
        roofline = self.roofline()
        if roofline.kv_tokens_max < BLOCK_TOKENS:
            have, need = self.gpus * GPUS[self.gpu].memory_bytes, roofline.model.weight_bytes
            raise InvalidRequest("gpus", f"must hold {need:.3g} bytes of weights and some KV (got {have:.3g})")
        make_policy(self.eviction, 1)

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return MODELS[self.model]

    @property
    def gpus_of_engine(self) -> int:
        """GPUs of one engine."""
        return self.gpus or gpus_needed(self.shape, GPUS[self.gpu])

    @property
    def page_bytes(self) -> int:
        """Bytes of the KV of one page: a block of a trace."""
        return BLOCK_TOKENS * self.shape.kv_bytes

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return -(-self.engines // self.engines_per_host)

    def roofline(self, efficiency: Efficiency = ASSUMED) -> Roofline:
        """Return the times of an engine."""
        return Roofline(self.shape, GPUS[self.gpu], self.gpus_of_engine, efficiency)

    def priors(self, efficiency: Efficiency = ASSUMED) -> Priors:
        """Return what a conductor of this cluster assumes before it has measured."""
        here = LINKS[self.host_link].bytes_per_s * self.gpus_of_engine if self.pool else IN_MEMORY_BYTES_PER_S
        fabric = LINKS[self.fabric].bytes_per_s * self.adapters
        places = {
            HERE: here,
            NVME: LINKS[self.drive].bytes_per_s * self.drives,
            HOST: min(LINKS[self.local].bytes_per_s * self.gpus_of_engine, here) if self.pool else fabric,
            ZONE: fabric,
            FAR: fabric,
        }
        return self.roofline(efficiency).priors(places)


_KEYS: Final = {field.name: field.type for field in fields(ClusterSpec)}


def read_spec(text: str) -> ClusterSpec:
    """Return the cluster of ``key=value,..``, or of a TOML file with these keys.

    Raises:
        InvalidRequest: it cannot be read, or a key or value is not valid.
    """
    if "=" not in text and text:
        try:
            values: Mapping[str, Any] = tomllib.loads(Path(text).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest("cluster", f"must be key=value,.. or a file ({error})") from None
        except tomllib.TOMLDecodeError as error:
            raise InvalidRequest("cluster", f"must be a TOML file ({error})") from None
    else:
        pairs = [part.partition("=") for part in text.split(",") if part]
        values = {key.strip(): value.strip() for key, _, value in pairs}
    return with_values(ClusterSpec(), values)


def with_values(spec: ClusterSpec, values: Mapping[str, Any]) -> ClusterSpec:
    """Return a specification with other values, which may be text.

    Raises:
        InvalidRequest: a key or value is not valid.
    """
    return replace(spec, **{key: _parse(key, value) for key, value in values.items()})


def _parse(key: str, value: Any) -> Any:
    match choose("cluster", _KEYS, key):
        case _ if key in ("dram", "nvme"):
            return parse_size(value, key, zero_ok=True)
        case "bool" if str(value).lower() in ("true", "false", "yes", "no", "1", "0"):
            return str(value).lower() in ("true", "yes", "1")
        case "bool":
            raise InvalidRequest(key, f"must be true or false (got {value!r})")
        case "int":
            try:
                return int(str(value))
            except ValueError:
                raise InvalidRequest(key, f"must be a whole number (got {value!r})") from None
        case _:
            return str(value)


class Port:
    """One end of a link, in one direction. It sends one transfer after the other.

    Attributes:
        free_s: when all transfers so far have ended.
        busy_s, moved: the seconds and bytes of all transfers.
    """

    def __init__(self, link: LinkSpeed, count: int = 1) -> None:
        self.bytes_per_s = link.bytes_per_s * count
        self.latency_s = link.latency_s
        self.free_s = 0.0
        self.busy_s = 0.0
        self.moved = 0


def transfer(size: int, now_s: float, *ports: Port) -> float:
    """Move bytes through ports, as fast as the slowest, once all are free. Returns when the last byte arrives."""
    if not size:
        return now_s
    start_s = max(now_s, *(port.free_s for port in ports))
    takes_s = size / min(port.bytes_per_s for port in ports)
    for port in ports:
        port.free_s = start_s + takes_s
        port.busy_s += takes_s
        port.moved += size
    return start_s + takes_s + max(port.latency_s for port in ports)


class EngineCache:
    """The prefixes in an engine's own memory: the prefix that was used least recently is dropped first.

    A page leaves only after the pages behind it, because a request uses the pages of its prompt from the last to the
    first.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are here, and mark them as used."""
        hits = 0
        for block in blocks:
            if block not in self._pages:
                break
            hits += 1
        for block in reversed(blocks[:hits]):
            self._pages.move_to_end(block)
        return hits

    def store(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Store a prompt, as much of it as fits. Returns the new blocks, and the dropped ones."""
        blocks = blocks[: self.pages]
        new = [block for block in blocks if block not in self._pages]
        for block in reversed(blocks):
            self._pages[block] = None
            self._pages.move_to_end(block)
        gone = []
        while len(self._pages) > self.pages:
            gone.append(self._pages.popitem(last=False)[0])
        return new, gone


Changed = Callable[[str, Sequence[int], Sequence[int]], None]
"""Called with a tier, the blocks that it has gained, and those that it has lost."""


class NodeCaches:
    """DRAM and NVMe of one node, under the node's own policy of eviction.

    A chain that leaves DRAM is kept on NVMe from its front, as a node's demotion does.
    """

    def __init__(self, spec: ClusterSpec, changed: Changed) -> None:
        self._changed = changed
        nvme = spec.nvme // spec.page_bytes
        dram = max(1, spec.dram // spec.page_bytes)
        self.nvme = CacheSimulation(nvme, make_policy(spec.eviction, nvme), self._left_nvme) if nvme else None
        self.dram = CacheSimulation(dram, make_policy(spec.eviction, dram), self._left_dram)
        self.written = 0  # pages that were written to NVMe
        self._last_ms = -1

    def match(self, now_ms: int, blocks: Sequence[int]) -> tuple[int, int]:
        """Return how many leading blocks are in DRAM, and how many more on NVMe."""
        upper = self.dram.match(now_ms, blocks)
        if self.nvme is None or upper == len(blocks):
            return upper, 0
        return upper, max(0, self.nvme.match(now_ms, blocks) - upper)

    def store(self, now_ms: int, blocks: Sequence[int]) -> None:
        """Store a prompt in DRAM."""
        self._put("dram", self.dram, now_ms, blocks)

    def _put(self, tier: str, cache: CacheSimulation, now_ms: int, blocks: Sequence[int]) -> int:
        before = [block for block in blocks if block not in cache.slots]
        cache.request(now_ms, blocks)
        new = [block for block in before if block in cache.slots]
        if new:
            self._changed(tier, new, ())
        return len(new)

    def _left_dram(self, now_ms: int, before: list[int], blocks: list[int]) -> None:
        self._changed("dram", (), blocks)
        if self.nvme is not None:
            self.written += self._put("nvme", self.nvme, now_ms, before + blocks)

    def _left_nvme(self, now_ms: int, before: list[int], blocks: list[int]) -> None:
        self._changed("nvme", (), blocks)
