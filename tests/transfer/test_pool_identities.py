"""A pool whose data servers ask who somebody is, over TLS: nodes tell, tenants read their own, strangers get words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from kvstore.server.identities import UNKNOWN
from kvstore.shm.data_server_file import find_data_server
from kvstore.shm.folder import NodeFolder
from tests.helpers.api import Certificates
from tests.helpers.content import SMALL, chain, contents, first_wrong, prompt
from tests.helpers.processes import CLI, Daemon, Machine, put, wait_until

PAGES = 20
IDENTITIES = """
[[identity]]
name = "pool"
token_sha256 = "{operator}"
operator = true
salts = ["*"]

[[identity]]
name = "team"
token_sha256 = "{tenant}"
salts = ["theirs"]
"""
OPERATOR, TENANT = "o" * 32, "t" * 32


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def serve(machine: Machine, name: str, catalog: str, identities: Path, certificates: Certificates) -> Daemon:
    flags = ["--dram", "16MiB", "--catalog", catalog, "--identities", str(identities)]
    flags += ["--tls-cert", certificates.path("server.pem"), "--tls-key", certificates.path("server.key")]
    command = [*CLI, "serve", "--name", name, *flags]
    env = {"KVSTORE_TOKEN": OPERATOR, "KVSTORE_TLS_CA": certificates.path("ca.pem")}
    daemon = machine.start(Daemon, "serve", command, **env)
    daemon.wait_ready()
    return daemon


def test_who_has_no_token_gets_words_and_no_page(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = f"file:{tmp_path / 'catalog'}"
    identities = tmp_path / "identities.toml"
    identities.write_text(IDENTITIES.format(operator=digest(OPERATOR), tenant=digest(TENANT)))
    identities.chmod(0o600)
    certificates = Certificates(tmp_path)
    monkeypatch.setenv("KVSTORE_TLS_CA", certificates.path("ca.pem"))
    for name in "ab":
        serve(machine, name, catalog, identities, certificates)
    put(machine.connect("a"), 1, PAGES, salt="theirs")
    put(machine.connect("a"), 1, PAGES, salt="others")

    def verified(**env: str) -> tuple[int, str]:
        env["KVSTORE_TLS_CA"] = certificates.path("ca.pem")
        told = machine.run("verify", "--cluster", "--catalog", catalog, "--json", **env)
        return told.returncode, " ".join(json.loads(told.stdout)["findings"])

    wait_until("all is told", lambda: verified(KVSTORE_TOKEN=OPERATOR) == (0, ""), 60)
    for token, says in ((TENANT, "only operators"), ("", UNKNOWN)):
        code, said = verified(KVSTORE_TOKEN=token)
        assert code == 1 and says in said, said

    def got(salt: str, token: str) -> int:
        """Pages of a that a program beside b reads, right ones."""
        monkeypatch.setenv("KVSTORE_TOKEN", token)
        store = machine.connect("b")
        out = np.zeros((PAGES, SMALL.page_bytes), np.uint8)
        match = store.cache(SMALL, salt=salt).get(prompt(1, PAGES), out)
        assert first_wrong(out[: match.pages], contents(chain(1, PAGES, SMALL, salt))[: match.pages]) == ""
        store.close()
        return match.pages

    wait_until("a tenant reads its own", lambda: got("theirs", TENANT) == PAGES, 60)
    assert got("others", TENANT) == 0
    assert got("others", OPERATOR) == PAGES
    assert got("theirs", "x" * 32) == 0 and got("theirs", "") == 0
    assert find_data_server(NodeFolder.at(machine.folder("a"))) is not None, "it lives"
