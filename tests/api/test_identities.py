"""Identities: what a file may say, who is found, when they end, and what a bad file changes (nothing)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, PermissionDenied, Unauthenticated
from kvstore.server import identities
from kvstore.server.identities import Identities


def sha(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def entry(name: str = "a", token: str = "secret", **more: str) -> str:
    fields = {"name": f'"{name}"', "token_sha256": f'"{sha(token)}"', "salts": '["a"]', **more}
    return "[[identity]]\n" + "".join(f"{key} = {value}\n" for key, value in fields.items() if value)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identities.toml"


def test_a_token_finds_its_identity(path: Path) -> None:
    known = Identities(write(path, entry() + entry("b", "other", operator="true", salts='["*"]')))
    a, b = known.find("secret", ()), known.find("other", ())
    assert (a.name, a.operator, a.may_use("a"), a.may_use("b")) == ("a", False, True, False)
    assert (b.name, b.operator, b.may_use("anything")) == ("b", True, True)
    with pytest.raises(PermissionDenied):
        a.check_salt("b")
    with pytest.raises(PermissionDenied):
        a.check_operator()


@pytest.mark.parametrize("token", ["", "Secret", "secret ", sha("secret"), "sécret", None])
def test_another_token_finds_nobody(path: Path, token: str | None) -> None:
    with pytest.raises(Unauthenticated):
        Identities(write(path, entry())).find(token, ["a"])


def test_certificates(path: Path) -> None:
    both = entry("both", "t", certificate='"both.example"')
    alone = '[[identity]]\nname = "c"\ncertificate = "c.example"\nsalts = ["c"]\n'
    known = Identities(write(path, both + alone))
    assert known.by_certificate
    assert known.find(None, ["x", "c.example"]).name == "c"
    assert known.find("t", ["both.example"]).name == "both"
    for token, names in (("t", ["c.example"]), ("t", []), (None, ["both.example"]), ("wrong", ["c.example"])):
        with pytest.raises(Unauthenticated):
            known.find(token, names)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_file_others_can_read_is_refused_with_the_remedy(path: Path, mode: int) -> None:
    with pytest.raises(InvalidRequest, match="chmod 600"):
        Identities(write(path, entry(), mode))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "at least one"),
        ("x", "is not TOML"),
        ("[node]\nname = 'a'\n", "nothing else"),
        ("[identity]\nname = 'a'\n", "at least one"),
        (entry(token_sha256='"secret"'), "64 hex digits"),
        (entry(token_sha256=""), "needs token_sha256 or certificate"),
        (entry(salts='"a"'), "salts must be a list"),
        (entry(salts=""), "salts must be a list"),
        (entry(operator='"yes"'), "true or false"),
        (entry(expires='"soon"'), "must be a date"),
        (entry(name=""), "name must be text"),
        (entry(token="1") + entry(token="2"), "the same name"),
        (entry("a") + entry("b"), "the same token"),
        (entry(tokens='"x"'), "tokens is not one of"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        Identities(write(path, text))
    assert refused.value.field == "identities"
    assert sha("secret") not in str(refused.value)


def test_a_change_is_seen_and_a_bad_one_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "LOOK_S", 0.0)
    known = Identities(write(path, entry()))
    a = known.find("secret", ())
    write(path, "broken [")
    assert known.find("secret", ()) == a
    write(path, entry("b", "other"), 0o644)
    assert known.find("secret", ()) == a
    path.unlink()
    assert known.find("secret", ()) == a
    write(path, entry("b", "other"))
    assert known.find("other", ()).name == "b"
    with pytest.raises(Unauthenticated):
        known.find("secret", ())
    with pytest.raises(Unauthenticated):  # also in a stream that began before
        known.check(a)
