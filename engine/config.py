"""The configuration of an engine: a frozen dataclass that is read once at the start, like that of a node.

The first of these sources that sets a value wins: a flag of ``kvstore engine``, the environment
(``KVSTORE_ENGINE_ROLE``), a file (``role = "decode"`` under ``[engine]``), the default. The file may also have the
settings of a node.
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
            raise InvalidRequest(name, f"must be one of {', '.join(kind)} (got {value!r})") from None

    return parse


def parse_engines(value: object, name: str = "prefill") -> tuple[str, ...]:
    """Parse addresses of engines: a list, or a string with commas between them.

    An address is ``HOST:PORT``, ``kv://HOST:PORT`` or ``unix:PATH``.

    Raises:
        InvalidRequest: an address has another form, or no port.
    """
    if isinstance(value, str):
        addresses = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, list | tuple):
        addresses = [parse_text(part, name) for part in value]
    else:
        raise InvalidRequest(name, f"must be HOST:PORT or a list of addresses (got {value!r})")
    for address in addresses:
        if (
            not address.startswith(("unix:/", "kv+unix:///"))
            and parse_address(address.removeprefix("kv://"), name)[1] == 0
        ):
            raise InvalidRequest(name, f"must have a port (got {address!r})")
    return tuple(addresses)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(DaemonConfig):
    """The settings of an engine. The constructor checks them, and raises ``InvalidRequest`` with the field's name.

    Sizes are in bytes.
    """

    role: Role = setting(
        Role.BOTH,
        _choice(Role),
        "What the engine does: prefill (computes prompts for other engines), decode (answers prompts), or both. The "
        "role can be changed while the engine runs.",
        metavar="|".join(Role),
    )
    device: str = setting("cpu", parse_text, "The device to compute on: cpu or cuda:N.", metavar="DEVICE")
    model: str = setting(
        "",
        parse_text,
        "A folder with config, weights and tokenizer in the format of Hugging Face, or a preset such as tiny-llama.",
        metavar="PATH|PRESET",
        default_shown="",
    )
    node: str = setting(
        "",
        parse_text,
        "The node of the pool: a name on this machine, or kv://HOST:PORT. Empty: the only node here. none: no pool.",
        metavar="ADDRESS",
        default_shown="$KVSTORE_NODE, else the only one",
    )
    name: str = setting("engine", parse_text, "Name in logs and metrics.")
    listen: tuple[str, ...] = listen("127.0.0.1:0")
    data_port: int = setting(
        0, parse_count, "TCP port on the hosts of `listen` from which other engines fetch KV; 0: a free port."
    )
    page_tokens: int = setting(
        64, parse_count, "Tokens per page. Engines share pages only if they have the same value."
    )
    arena: int = setting(GIB, parse_size, "Device memory for the KV of all requests.", metavar="SIZE")
    keep_pages: float = setting(
        1.0,
        parse_number,
        "The share of the arena that pages of ended requests may use until their frames are needed; 0: no pages are "
        "kept.",
    )
    mount: str = setting(
        "auto",
        parse_text,
        "auto: other processes of this machine can find and read the pages that the arena keeps; none: they cannot.",
        metavar="|".join(MOUNTS),
    )
    dtype: str = setting(
        DTYPE_AUTO,
        parse_text,
        "Type of weights and KV: float32, bfloat16 or float16. auto: float32 on a CPU, the model's own type on a GPU.",
        metavar="|".join((DTYPE_AUTO, *DTYPES)),
    )
    seed: int = setting(0, parse_count, "Seed of a preset's weights. Engines with the same seed have the same model.")
    threads: int = setting(0, parse_count, "Number of threads that torch computes with; 0: torch chooses.")
    chunk_tokens: int = setting(512, parse_count, "The most prompt tokens that one step computes.")
    batch_max: int = setting(16, parse_count, "The most requests that one step decodes.")
    requests_max: int = setting(
        256,
        parse_count,
        "The most requests, including waiting ones. More are refused, with a hint about when to retry.",
    )
    prefill: tuple[str, ...] = setting(
        (),
        parse_engines,
        "Engines that a decode engine asks, in this order, to compute prompts.",
        metavar="ADDRESS",
        repeats=True,
    )
    local_prefill_tokens: int = setting(
        256, parse_count, "A decode engine computes a prompt itself if at most this many of its tokens are not cached."
    )
    handoff: Timing = setting(
        Timing.EAGER,
        _choice(Timing),
        "When KV of another engine is moved here: eager, while it is computed; lazy, once the answer gets its frames.",
        metavar="|".join(Timing),
    )
    source: Source = setting(
        Source.ARENA,
        _choice(Source),
        "Where that KV is read: arena, in the prefill engine's memory; dram, full pages in the pool.",
        metavar="|".join(Source),
    )
    grain: Grain = setting(
        Grain.LAYER,
        _choice(Grain),
        "The pieces in which that KV is moved: layer, each layer once it is ready; whole, all layers after the last.",
        metavar="|".join(Grain),
    )
    link: str = setting(
        "none",
        parse_text,
        "A limit on the speed of hand-offs: none, nvlink, pcie, rdma, 10gbe, or a speed such as 1.5GB/s.",
    )
    compress: str = setting(
        "none",
        parse_text,
        "int8: pages are stored and handed over as lossy replicas, for requests that allow them; none: exact pages.",
        metavar="|".join(CODECS),
    )
    hold_s: float = setting(30.0, parse_number, "How long the KV of a finished prefill is kept until it is fetched.")
    salt: str = setting("", parse_text, "The salt of requests that name none.", default_shown="")
    request_s_max: float = setting(
        3600.0, parse_number, "The longest time that a request may take, even if its client sets no deadline."
    )
    rpcs_max: int = setting(
        512,
        parse_count,
        "How many gRPC calls may run at the same time. More are refused, with a hint about when to retry.",
    )
    drain_s: float = setting(10.0, parse_number, "How long the engine waits for running requests when it shuts down.")

    @property
    def unmounted(self) -> str:
        """The reason why the arena is not mounted at the node; "" if it may be mounted."""
        return "mount=none" if self.mount == "none" else "" if self.keep_pages else "keep_pages is 0"

    def __post_init__(self) -> None:
        require("model", self.model != "", "must be a folder, or a preset such as tiny-llama", self.model)
        require("device", _DEVICE.fullmatch(self.device) is not None, "must be cpu or cuda:N", self.device)
        require("listen", bool(self.listen), "must have an address", self.listen)
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
    """Read the configuration. Returns it, and for each value the source that set it.

    Args:
        env: the environment; None means ``os.environ``.
        flags: the flags; those that are None are not set.

    Raises:
        InvalidRequest: a value is not valid. Names the setting and the source.
    """
    return read(EngineConfig, "engine", path, os.environ if env is None else env, flags or {}, ENV_PREFIX)
