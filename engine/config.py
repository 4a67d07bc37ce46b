"""The configuration of an engine: one frozen tree, read once at the edge, as a node's is (``kvstore.config``).

A value comes from, strongest first: a flag of ``kvstore engine``, the environment (``KVSTORE_ENGINE_ROLE``), a file
(``role = "decode"`` under ``[engine]``; a node's settings may be in it, too), the default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.model.request import Grain, Role, Source, Timing
from engine.transfer.link import parse_link
from kvstore.config.daemon import DaemonConfig, listen, require
from kvstore.config.reading import GIB, parse_address, parse_count, parse_number, parse_size, parse_text, read, setting
from kvstore.errors import InvalidRequest

ENV_PREFIX = "KVSTORE_ENGINE_"
WITHOUT_NODE = "none"
CODECS = ("none", "int8")
MOUNTS = ("auto", "none")
DTYPES = ("float32", "bfloat16", "float16")
DTYPE_AUTO = "auto"
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


def _choice(kind: type[StrEnum]) -> Callable[[object, str], Any]:
    def parse(value: object, name: str) -> StrEnum:
        try:
            return kind(parse_text(value, name))
        except ValueError:
            raise InvalidRequest(name, f"{value!r} is not one of {', '.join(kind)}") from None

    return parse


def parse_engines(value: object, name: str = "prefill") -> tuple[str, ...]:
    """Addresses of engines: ``HOST:PORT``, ``kv://HOST:PORT`` or ``unix:PATH``, several separated by commas, or a list.

    Raises:
        InvalidRequest: one of them has another form, or no port.
    """
    if isinstance(value, str):
        found = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, list | tuple):
        found = [parse_text(part, name) for part in value]
    else:
        raise InvalidRequest(name, f"{value!r} is not HOST:PORT, nor a list of them")
    for address in found:
        if (
            not address.startswith(("unix:/", "kv+unix:///"))
            and parse_address(address.removeprefix("kv://"), name)[1] == 0
        ):
            raise InvalidRequest(name, f"{address!r} has no port")
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(DaemonConfig):
    """One engine. Checked however it is made: raises `InvalidRequest` naming the field. Sizes are bytes."""

    role: Role = setting(
        Role.BOTH,
        _choice(Role),
        "What the engine does: prefill (computes prompts for others), decode (answers) or both; it can be "
        "changed while it runs.",
        metavar="|".join(Role),
    )
    device: str = setting("cpu", parse_text, "cpu or cuda:N.", metavar="DEVICE")
    model: str = setting(
        "",
        parse_text,
        "A folder with config, weights and tokenizer as Hugging Face lays them out, or a preset such as tiny-llama.",
        metavar="PATH|PRESET",
        default_shown="",
    )
    node: str = setting(
        "",
        parse_text,
        "The pool's node: a name on this machine, kv://HOST:PORT; empty: the only one here; none: without a pool.",
        metavar="ADDRESS",
        default_shown="$KVSTORE_NODE, else the only one",
    )
    name: str = setting("engine", parse_text, "Name in logs and metrics.")
    listen: tuple[str, ...] = listen("127.0.0.1:0")
    data_port: int = setting(
        0, parse_count, "TCP port, on the hosts of `listen`, where other engines fetch KV; 0: a free one."
    )
    page_tokens: int = setting(64, parse_count, "Tokens of a page; engines that share a pool agree on it.")
    arena: int = setting(GIB, parse_size, "Device memory for the KV of all requests.", metavar="SIZE")
    keep_pages: float = setting(
        1.0,
        parse_number,
        "Share of the arena that may keep pages of requests that have ended, until frames are needed; 0: "
        "none are kept.",
    )
    mount: str = setting(
        "auto",
        parse_text,
        "auto: the node of this machine knows the pages that are kept, and its other processes read them; "
        "none: not so.",
        metavar="|".join(MOUNTS),
    )
    dtype: str = setting(
        DTYPE_AUTO,
        parse_text,
        "Type of weights and KV: float32, bfloat16 or float16; auto: float32 on a CPU, the model's own on a GPU.",
        metavar="|".join((DTYPE_AUTO, *DTYPES)),
    )
    seed: int = setting(0, parse_count, "Seed of a preset's weights: engines with the same seed have the same model.")
    threads: int = setting(0, parse_count, "Threads that torch computes with; 0: its own choice.")
    chunk_tokens: int = setting(512, parse_count, "Prompt tokens computed in one step at most.")
    batch_max: int = setting(16, parse_count, "Requests decoded together at most.")
    requests_max: int = setting(
        256, parse_count, "Requests here at most, waiting ones among them; more are refused with a hint to retry."
    )
    prefill: tuple[str, ...] = setting(
        (),
        parse_engines,
        "Engines that a decode engine asks to compute prompts, in this order.",
        metavar="ADDRESS",
        repeats=True,
    )
    local_prefill_tokens: int = setting(
        256, parse_count, "A decode engine computes a prompt itself if at most this many of its tokens are not cached."
    )
    handoff: Timing = setting(
        Timing.EAGER,
        _choice(Timing),
        "When KV computed elsewhere is moved: eager, while it is computed; lazy, when a slot is free.",
        metavar="|".join(Timing),
    )
    source: Source = setting(
        Source.ARENA,
        _choice(Source),
        "Where it is read: arena, the prefill engine's memory; dram, full pages out of the pool.",
        metavar="|".join(Source),
    )
    grain: Grain = setting(
        Grain.LAYER,
        _choice(Grain),
        "In which pieces it moves: layer, as layers are ready; whole, after the last one.",
        metavar="|".join(Grain),
    )
    link: str = setting(
        "none",
        parse_text,
        "A bound on the speed of hand-offs: none (no bound), nvlink, pcie, rdma, 10gbe, or a speed such as 1.5GB/s.",
    )
    compress: str = setting(
        "none",
        parse_text,
        "none or int8: pages are written as lossy replicas only, for requests that allow them; hand-offs likewise.",
        metavar="|".join(CODECS),
    )
    hold_s: float = setting(30.0, parse_number, "How long a finished prefill waits to be fetched.")
    salt: str = setting("", parse_text, "The salt of requests that name none.", default_shown="")
    request_s_max: float = setting(
        3600.0, parse_number, "The longest a request may take, also where its client names no deadline."
    )
    rpcs_max: int = setting(
        512, parse_count, "How many gRPC calls may run at the same time. More are refused with a hint when to retry."
    )
    drain_s: float = setting(10.0, parse_number, "How long the engine waits at its end for requests under way.")

    @property
    def unmounted(self) -> str:
        """Why the node is not to know what the arena keeps; "" where it is."""
        return "mount=none" if self.mount == "none" else "" if self.keep_pages else "keep_pages is 0"

    def __post_init__(self) -> None:
        require("model", self.model != "", "is missing: a folder, or a preset such as tiny-llama", self.model)
        require("device", _DEVICE.fullmatch(self.device) is not None, "must be cpu or cuda:N", self.device)
        require("listen", bool(self.listen), "needs an address", self.listen)
        self.check_daemon()
        known = (DTYPE_AUTO, *DTYPES)
        require("dtype", self.dtype in known, f"must be one of {', '.join(known)}", self.dtype)
        require("mount", self.mount in MOUNTS, f"must be one of {', '.join(MOUNTS)}", self.mount)
        require("compress", self.compress in CODECS, f"must be one of {', '.join(CODECS)}", self.compress)
        parse_link(self.link)
        for name, low, high in (
            ("page_tokens", 1, 4096),
            ("chunk_tokens", 1, 1 << 20),
            ("batch_max", 1, 4096),
            ("requests_max", 1, 65535),
            ("rpcs_max", 1, 65535),
            ("data_port", 0, 65535),
            ("local_prefill_tokens", 0, 1 << 30),
            ("threads", 0, 4096),
            ("seed", 0, (1 << 63) - 1),
        ):
            require(name, low <= getattr(self, name) <= high, f"must be from {low} to {high}", getattr(self, name))
        for name in ("hold_s", "request_s_max"):
            require(name, getattr(self, name) > 0, "must be more than zero", getattr(self, name))
        require("keep_pages", 0 <= self.keep_pages <= 1, "must be from 0 to 1", self.keep_pages)
        require("drain_s", self.drain_s >= 0, "must be zero or more", self.drain_s)


def load(
    path: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> tuple[EngineConfig, dict[str, str]]:
    """The configuration, and where each of its values came from.

    ``env`` is ``os.environ`` when None; of ``flags`` those that are None are not given. Raises `InvalidRequest` naming
    the setting and saying where it was read.
    """
    return read(EngineConfig, "engine", path, os.environ if env is None else env, flags or {}, ENV_PREFIX)
