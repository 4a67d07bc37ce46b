"""The configuration of a conductor: one frozen object, which is read once at the start (see ``kvstore.config``).

A value comes from the first of these that has it: a flag of ``kvstore conductor``, the environment
(``KVSTORE_CONDUCTOR_POLICY``), a file (``policy = "kv-centric"`` under ``[conductor]``), the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.conductor.backends.settings import BackendSettings, parse_backends
from engine.conductor.state.conductor_state import ConductorRules
from engine.conductor.state.policies import POLICIES, SPLITS
from engine.config import parse_engines
from kvstore.config.daemon import ClusterConfig, DaemonConfig, listen, require
from kvstore.config.reading import (
    parse_address_or_none,
    parse_count,
    parse_number,
    parse_size,
    parse_text,
    read,
    setting,
)

ENV_PREFIX = "KVSTORE_CONDUCTOR_"


@dataclass(frozen=True, kw_only=True)
class ConductorConfig(DaemonConfig):
    """The settings of one conductor. Sizes are in bytes.

    Raises:
        InvalidRequest: a value is not valid. The error names the field.
    """

    engine: tuple[str, ...] = setting(
        (),
        parse_engines,
        "Addresses of engines, in addition to the engines in the catalog.",
        metavar="ADDRESS",
        repeats=True,
    )
    backend: tuple[BackendSettings, ...] = setting(
        (),
        parse_backends,
        "Servers that speak OpenAI's API. Each one becomes an engine of this conductor.",
        metavar="'URL tokenizer=FOLDER ...'",
        repeats=True,
    )
    policy: str = setting(
        "kv-centric",
        parse_text,
        "The rule that chooses which engine computes the prompt, and which engine answers.",
        metavar="|".join(POLICIES),
    )
    split: str = setting(
        "cost",
        parse_text,
        "Whether to use separate engines for prompt and answer: cost (if that is sooner), "
        "never, always, or threshold (if much of the prompt is not cached).",
        metavar="|".join(SPLITS),
    )
    name: str = setting(
        "conductor", parse_text, "Name in logs and metrics. In the catalog, the process number is added."
    )
    http: str | None = setting(
        None,
        parse_address_or_none,
        "HOST:PORT of OpenAI's API, /healthz, /readyz and /metrics. Beyond loopback it needs TLS and identities.",
        metavar="HOST:PORT",
    )
    listen: tuple[str, ...] = listen("127.0.0.1:0")
    salt: str = setting("", parse_text, "The salt of requests that name none.", default_shown="")
    window_s: float = setting(
        4.0,
        parse_number,
        "An engine gets prompts for this many seconds of work. More requests wait here, and tenants are served fairly.",
    )
    queue: int = setting(
        256 << 20, parse_size, "Memory for waiting requests; one tenant has at most half of it.", metavar="SIZE"
    )
    index: int = setting(
        1 << 30, parse_size, "Memory for the pages that nodes report, 8 bytes for each.", metavar="SIZE"
    )
    roles_floor: int = setting(
        0, parse_count, "Change roles with the load, and keep this many engines in each role; 0: never change roles."
    )
    first_token_s: float = setting(
        0.0,
        parse_number,
        "Default limit on the seconds until the first token. A request that would miss it is refused; 0: no limit.",
    )
    token_s: float = setting(0.0, parse_number, "Default limit on the seconds between two tokens; 0: no limit.")
    offer_catalog: str = setting(
        "",
        parse_text,
        "The catalog of another pool. Engines of this pool then compute prompts for that pool's conductors.",
        metavar="URL",
    )
    offer_pool: str = setting("default", parse_text, "The name of the other pool in its catalog.")
    offer_egress: int = setting(
        0, parse_size, "Bytes of KV per second that may go from this pool to the other one.", metavar="SIZE"
    )
    request_s_max: float = setting(
        3600.0, parse_number, "The longest time of a request, even if its client sets a later deadline or none."
    )
    keepalive_s: float = setting(
        75.0,
        parse_number,
        "How long an idle HTTP connection is kept. Must be longer than a load balancer's idle timeout (often 60 s).",
    )
    rpcs_max: int = setting(
        1024,
        parse_count,
        "How many gRPC calls may run at the same time. More are refused, with a hint about when to retry.",
    )
    drain_s: float = setting(10.0, parse_number, "How long the conductor waits for running answers when it stops.")
    seed: int = setting(0, parse_count, "Seed of all random choices. Equal events then lead to equal decisions.")

    def __post_init__(self) -> None:
        require(
            "engine",
            bool(self.engine or self.catalog or self.backend),
            "must not be empty without catalog and backend",
            self.engine,
        )
        require("policy", self.policy in POLICIES, f"must be one of {', '.join(POLICIES)}", self.policy)
        require("split", self.split in SPLITS, f"must be one of {', '.join(SPLITS)}", self.split)
        require("listen", bool(self.listen), "needs an address", self.listen)
        self.check_daemon()
        if self.offer_catalog:
            require("offer_egress", self.offer_egress > 0, "must be more than zero", self.offer_egress)
            is_own = (self.offer_catalog, self.offer_pool) == (self.catalog, self.pool)
            require("offer_catalog", not is_own, "must be another pool", self.offer_catalog)
        for name in ("window_s", "request_s_max", "keepalive_s"):
            require(name, getattr(self, name) > 0, "must be more than zero", getattr(self, name))
        for name in ("first_token_s", "token_s", "drain_s"):
            require(name, getattr(self, name) >= 0, "must be zero or more", getattr(self, name))
        require("rpcs_max", 1 <= self.rpcs_max <= 65535, "must be from 1 to 65535", self.rpcs_max)
        require("roles_floor", 0 <= self.roles_floor <= 1024, "must be from 0 to 1024", self.roles_floor)

    @property
    def offer(self) -> ClusterConfig:
        """The configuration for the catalog of the other pool. Its credentials are those for our own catalog."""
        return replace(self, catalog=self.offer_catalog, pool=self.offer_pool, offer_catalog="")

    @property
    def rules(self) -> ConductorRules:
        """The rules that decisions follow."""
        return ConductorRules(
            policy=self.policy,
            split=self.split,
            window_s=self.window_s,
            queue_bytes=self.queue,
            index_bytes=self.index,
            roles_floor=self.roles_floor or None,
            first_token_s=self.first_token_s,
            token_s=self.token_s,
            seed=self.seed,
        )


def load(
    path: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> tuple[ConductorConfig, dict[str, str]]:
    """Read the configuration. Returns it with the source of each value.

    Args:
        env: None means ``os.environ``.
        flags: entries that are None count as absent.

    Raises:
        InvalidRequest: a value is not valid. The error names the setting and its source.
    """
    return read(ConductorConfig, "conductor", path, os.environ if env is None else env, flags or {}, ENV_PREFIX)
