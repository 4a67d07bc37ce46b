"""Opening: checks the configuration and makes the HTTP server. The web framework is loaded only if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.conductor.door.patience import PATIENCE, HttpPatience
from engine.conductor.door.prompts import PromptMaker
from engine.conductor.shell.answers import Answers
from kvstore.cluster.data_connection import is_loopback
from kvstore.config import parse_address
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest
from kvstore.server.certificates import ServerCertificate
from kvstore.server.http import HostNames, Route
from kvstore.server.identities import Identities
from kvstore.server.listening import check_certificates, check_far, numeric

if TYPE_CHECKING:
    from engine.conductor.door.server import HttpDoor


def open_door(
    config: DaemonConfig,
    identities: Identities,
    answers: Answers,
    routes: Mapping[str, Route],
    prompts: PromptMaker,
    patience: HttpPatience = PATIENCE,
) -> HttpDoor:
    """The HTTP server at ``config.http``, not started yet; start it on the event loop of ``answers``.

    Raises:
        InvalidRequest: "http": the address is beyond loopback without TLS or keys, or the extra is not installed; or
            the certificate cannot be used.
    """
    assert config.http is not None
    host, port = parse_address(config.http, "http")
    number = numeric(host, config.http, "http")[0]
    if not is_loopback(number):
        check_far(config, identities, config.http, "http")
    check_certificates(config, identities)
    try:
        from engine.conductor.door.server import HttpDoor
    except ModuleNotFoundError as error:
        raise InvalidRequest("http", f"needs {error.name}: pip install 'kvstore[http]'") from None
    certificate = ServerCertificate.of(config)
    tls = certificate.for_sockets() if certificate is not None else None
    shown = f"[{number}]" if ":" in number else number
    hosts = HostNames.of(config, certificate.names() if certificate is not None else ())
    return HttpDoor(answers, f"{shown}:{port}", identities, tls, hosts, routes, prompts, patience)
