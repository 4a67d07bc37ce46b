"""A client for the gRPC API of a conductor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from google.protobuf.struct_pb2 import Struct

from engine.client import url_of
from kvstore.client.remote.admin import document
from kvstore.client.remote.endpoint import CallerCredentials, endpoint
from kvstore.client.remote.node import RemoteNode
from kvstore.pb import conductor_pb2 as pb
from kvstore.pb import engine_pb2


class _RemoteConductor(RemoteNode):
    service = "/kvstore.v1.Conductor/"


def ask_route(
    address: str,
    text: str,
    tokens: Sequence[int],
    timeout_s: float,
    *,
    model: str = "",
    tenant: str = "",
    salt: str | None = None,
    max_tokens: int = 16,
) -> dict[str, Any]:
    """Ask the conductor at this address where it would send a prompt now, and why. Returns its explanation.

    Args:
        text, tokens: the prompt; one of them is empty.
        salt: None means the conductor's default.
        max_tokens: the length of the answer.

    Raises:
        InvalidRequest: the prompt or the address is not valid. The error names the field.
        NodeUnavailable, DeadlineExceeded: the conductor is not responding.
    """
    request = engine_pb2.SubmitRequest(
        text=text, token_ids=tokens, salt=salt, sampling=engine_pb2.Sampling(max_tokens=max_tokens)
    )
    remote = _RemoteConductor(endpoint(url_of(address), CallerCredentials(), os.environ), timeout_s)
    try:
        message = pb.RouteRequest(request=request, model=model, tenant=tenant)
        return document(remote.call("Route", message, Struct))
    finally:
        remote.close()
