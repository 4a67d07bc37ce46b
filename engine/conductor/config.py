"""The configuration of a conductor: one frozen tree, read once at the edge, as a node's is (``kvstore.config``).

A value comes from, strongest first: a flag of ``kvstore conductor``, the environment (``KVSTORE_CONDUCTOR_POLICY``), a
file (``policy = "kv-centric"`` under ``[conductor]``), the default.
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
    """The settings of one conductor. Checked on construction: raises `InvalidRequest` naming the field. Sizes are
    bytes.
    """

    engine: tuple[str, ...] = setting(
        (),
        parse_engines,
        "Engines in addition to those that the catalog lists.",
        metavar="ADDRESS",
        repeats=True,
    )
    backend: tuple[BackendSettings, ...] = setting(
        (),
        parse_backends,
        "Servers that speak OpenAI's API, each as one more engine.",
        metavar="'URL tokenizer=FOLDER ...'",
        repeats=True,
    )
    policy: str = setting(
        "kv-centric", parse_text, "Which engine computes a prompt and which one answers it.", metavar="|".join(POLICIES)
    )
    split: str = setting(
        "cost",
        parse_text,
        "When one engine computes a prompt and another one answers: cost (where sooner), never, always, threshold.",
        metavar="|".join(SPLITS),
    )
    name: str = setting(
        "conductor", parse_text, "Name in logs and metrics and, with a number of its process, in the catalog."
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
        "Seconds of prompts that an engine has before it at most; others wait here, where tenants share fairly.",
    )
    queue: int = setting(
        256 << 20, parse_size, "Memory of requests that wait here; no tenant has more than half of it.", metavar="SIZE"
    )
    index: int = setting(
        1 << 30, parse_size, "Memory of what nodes tell of their pages: 8 bytes a page.", metavar="SIZE"
    )
    roles_floor: int = setting(
        0, parse_count, "How many engines keep each role when roles follow the load; 0: roles are left as they are."
    )
    first_token_s: float = setting(
        0.0,
        parse_number,
        "Seconds until the first token, of requests that name none: what would miss it is refused at once; 0: none.",
    )
    token_s: float = setting(
        0.0, parse_number, "The longest time between two tokens, in seconds, of requests that name none; 0: none."
    )
    offer_catalog: str = setting(
        "",
        parse_text,
        "The catalog of another pool, for whose conductors the engines of this one compute prompts; empty for none.",
        metavar="URL",
    )
    offer_pool: str = setting("default", parse_text, "Name of that other pool in its catalog.")
    offer_egress: int = setting(
        0, parse_size, "How much KV may leave this pool for that one in a second, in bytes.", metavar="SIZE"
    )
    request_s_max: float = setting(
        3600.0, parse_number, "The longest a request may take, also where its client names no deadline."
    )
    keepalive_s: float = setting(
        75.0,
        parse_number,
        "How long an idle HTTP connection is kept: longer than a load balancer in front keeps its own, 60 s often.",
    )
    rpcs_max: int = setting(
        1024, parse_count, "How many gRPC calls may run at the same time. More are refused with a hint when to retry."
    )
    drain_s: float = setting(10.0, parse_number, "How long the conductor waits at its end for answers under way.")
    seed: int = setting(0, parse_count, "Seed of all random choices: the same events lead to the same decisions.")

    def __post_init__(self) -> None:
        require(
            "engine",
            bool(self.engine or self.catalog or self.backend),
            "is missing, as are catalog and backend",
            self.engine,
        )
        require("policy", self.policy in POLICIES, f"must be one of {', '.join(POLICIES)}", self.policy)
        require("split", self.split in SPLITS, f"must be one of {', '.join(SPLITS)}", self.split)
        require("listen", bool(self.listen), "needs an address", self.listen)
        self.check_daemon()
        if self.offer_catalog:
            require("offer_egress", self.offer_egress > 0, "must be more than zero", self.offer_egress)
            same = (self.offer_catalog, self.offer_pool) == (self.catalog, self.pool)
            require("offer_catalog", not same, "is this pool's own", self.offer_catalog)
        for name in ("window_s", "request_s_max", "keepalive_s"):
            require(name, getattr(self, name) > 0, "must be more than zero", getattr(self, name))
        for name in ("first_token_s", "token_s", "drain_s"):
            require(name, getattr(self, name) >= 0, "must be zero or more", getattr(self, name))
        require("rpcs_max", 1 <= self.rpcs_max <= 65535, "must be from 1 to 65535", self.rpcs_max)
        require("roles_floor", 0 <= self.roles_floor <= 1024, "must be from 0 to 1024", self.roles_floor)

    @property
    def offer(self) -> ClusterConfig:
        """The pool to which it is offered; the credentials are those for our own catalog."""
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
    """The configuration, and the source of each of its values.

    ``env`` is ``os.environ`` when None; entries of ``flags`` that are None count as absent. Raises `InvalidRequest`
    naming the setting and saying where it was read.
    """
    return read(ConductorConfig, "conductor", path, os.environ if env is None else env, flags or {}, ENV_PREFIX)
