"""How a process shows data servers who it is, as its environment says."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import InvalidRequest
from kvstore.transfer.base import DialCredentials, read_token


def credentials_of(env: Mapping[str, str]) -> DialCredentials:
    """``KVSTORE_TOKEN`` or ``KVSTORE_TOKEN_FILE``, ``KVSTORE_TLS_CA``, ``KVSTORE_TLS_CERT`` and ``KVSTORE_TLS_KEY``, as
    for ``kv://`` addresses. Where a data server's connections are encrypted, its entry in the catalog says so.

    Raises:
        InvalidRequest: the token's file cannot be read; names the variable.
    """
    token, file = env.get("KVSTORE_TOKEN", ""), env.get("KVSTORE_TOKEN_FILE", "")
    file = file if not token else ""
    if file:
        try:
            token = read_token(file)
        except OSError as error:
            raise InvalidRequest("KVSTORE_TOKEN_FILE", f"cannot be read: {error.strerror}") from None
    paths = {name: env.get(f"KVSTORE_TLS_{name.upper()}", "") for name in ("ca", "cert", "key")}
    return DialCredentials(token=token, token_file=file, **paths)
