"""Errors over gRPC: every class of kvstore.errors arrives as itself, and what gRPC says by itself means something."""

from __future__ import annotations

import grpc
import pytest

from kvstore import errors
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.transfer.grpc_errors import CLASSES, CODES, DETAILS_BYTES_MAX, FIELD_KEY, NotServed, error_of, status_of

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVStoreError)]


def made(kind: type[KVStoreError]) -> KVStoreError:
    return kind("tokens", "must not be empty") if issubclass(kind, InvalidRequest) else kind("no luck")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_class_arrives_as_itself(kind: type[KVStoreError]) -> None:
    sent = made(kind)
    got = error_of(*status_of(sent))
    assert type(got) is kind
    assert str(got) == str(sent)
    assert vars(got).get("field") == vars(sent).get("field")
    assert vars(got).get("retry_after_s") == vars(sent).get("retry_after_s")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_code_alone_says_enough(kind: type[KVStoreError]) -> None:
    code, details, _ = status_of(made(kind))
    got = error_of(code, details)
    assert isinstance(got, KVStoreError)
    for parent in (errors.Unavailable, errors.InvalidRequest, errors.LeaseBroken):  # what callers decide by
        assert isinstance(got, parent) == issubclass(kind, parent)


def test_names_are_codes_of_grpc() -> None:
    known = {code.name for code in grpc.StatusCode}
    assert {*CODES.values(), *CLASSES} <= known
    assert set(CODES.values()) <= {*CLASSES, "UNKNOWN"}


def test_a_call_an_older_node_does_not_know_is_another_version() -> None:
    code, details, metadata = status_of(NotServed("this node has no call 'pins'"))
    assert code == "UNIMPLEMENTED"
    assert type(error_of(code, details, metadata)) is errors.VersionMismatch


def test_a_message_is_bounded_and_stays_text() -> None:
    _, details, metadata = status_of(InvalidRequest("fi\neld\u00e9", "\u00e9" * 5000))
    assert len(details.encode()) <= DETAILS_BYTES_MAX
    assert dict(metadata)[FIELD_KEY] == "fi?eld?"


def test_metadata_of_strangers_names_no_other_class() -> None:
    got = error_of("UNAVAILABLE", "gone", [("kvstore-error", "annotations"), ("retry-after-ms", "soon")])
    assert type(got) is errors.NodeUnavailable
    assert "retry_after_s" not in vars(got)
