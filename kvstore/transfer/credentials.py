"""How a process shows data servers who it is, as its environment says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore.transfer.base import DialCredentials


def credentials_of(env: Mapping[str, str]) -> DialCredentials:
    """``KVSTORE_TOKEN`` or ``KVSTORE_TOKEN_FILE``, ``KVSTORE_TLS_CA``, ``KVSTORE_TLS_CERT`` and ``KVSTORE_TLS_KEY``, as
    for ``kv://`` addresses. Where a data server's connections are encrypted, its entry in the catalog says so.

    Raises:
        InvalidRequest: the token's file cannot be read; names the variable.
    """
    token = env.get("KVSTORE_TOKEN", "")
    if not token and env.get("KVSTORE_TOKEN_FILE"):
        try:
            token = Path(env["KVSTORE_TOKEN_FILE"]).read_text(encoding="latin-1").strip()
        except OSError as error:
            raise InvalidRequest("KVSTORE_TOKEN_FILE", f"cannot be read: {error.strerror}") from None
    paths = {name: env.get(f"KVSTORE_TLS_{name.upper()}", "") for name in ("ca", "cert", "key")}
    return DialCredentials(token=token, **paths)
