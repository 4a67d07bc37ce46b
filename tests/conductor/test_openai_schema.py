"""Bodies of OpenAI's API as models: what an error says, what a body may cost, what is passed on unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.conductor.http import openai_schema
from engine.conductor.http.openai_errors import Refusal
from engine.conductor.http.openai_schema import EXTRA_BYTES_MAX, NOT_PASSED_ON, VALUES_MAX, parse_document, read_body

ASK = {"model": "m", "prompt": "a"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
OTHERS = frozenset(("m",))


def refusal(document: dict[str, Any], is_chat: bool = False, passing: frozenset[str] = frozenset()) -> str:
    """The message of the refusal of this document."""
    with pytest.raises(Refusal) as refused:
        read_body(parse_document(json.dumps(document).encode()), is_chat, passing)
    assert refused.value.status == 400
    return str(refused.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 33}, "n: must be at most 32 (got 33)"),
        ({"temperature": 2.5}, "temperature: must be at most 2 (got 2.5)"),
        ({"temperature": "hot"}, 'temperature: must be a number (got "hot")'),
        ({"top_p": 0}, "top_p: must be above 0 (got 0)"),
        ({"stream": 1}, "stream: must be true or false (got 1)"),
        ({"seed": 1 << 70}, f"seed: must be at most {2**63 - 1} (got {1 << 70})"),
        ({"stop": ["a"] * 5}, "stop: must be at most 4 texts (got 5)"),
        ({"model": "x" * 300}, "model: must have at most 256 characters"),
        ({"kvstore": {"deadline_s": 0}}, "kvstore.deadline_s: must be at least 0.001 (got 0)"),
        ({"kvstore": {"adapter": "\ud800"}}, "kvstore.adapter: must be valid Unicode"),
        ({"prompt": ["a"] * 17, "n": 2}, "n: must give at most 32 answers in all (got 17 prompts and 2)"),
    ],
)
def test_an_error_names_the_parameter_the_problem_and_the_value(more: dict[str, Any], message: str) -> None:
    assert refusal(ASK | more).startswith(message)


def test_an_error_in_a_part_of_a_message_names_its_place() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "\ud800"}]
    found = refusal(CHAT | {"messages": [{"role": "user", "content": parts}]}, True)
    assert found.startswith("messages[0].content[1].text: must be valid Unicode")


@pytest.mark.parametrize(
    "make",
    [
        lambda count: (ASK | {f"x{number}": number for number in range(count)}, False),
        lambda count: (ASK | {"kvstore": {f"x{number}": number for number in range(count)}}, False),
        lambda count: (CHAT | {"messages": [{"role": "wizard", "content": "a"}] * (count // 3)}, True),
        lambda count: (CHAT | {"messages": [CHAT["messages"][0] | {f"x{i}": 1 for i in range(count)}]}, True),
        lambda count: (ASK | {"stop": ["a"] * count}, False),
    ],
    ids=["names", "own names", "messages", "names of a message", "stops"],
)
def test_a_body_full_of_errors_costs_one_error(
    make: Callable[[int], tuple[dict[str, Any], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of pydantic has a document for each problem, so a body must not be able to have many."""
    counts: list[int] = []
    known = openai_schema._refusal
    monkeypatch.setattr(openai_schema, "_refusal", lambda error: (counts.append(error.error_count()), known(error))[1])
    document, is_chat = make(VALUES_MAX - 100)
    assert len(refusal(document, is_chat)) < 500
    assert counts == [1]


def test_engines_of_others_get_unknown_parameters_as_they_came() -> None:
    unknown = {"top_k": 5, "guided_json": {"type": "object"}, "allowed_token_ids": list(range(200))}
    body, extra = read_body(parse_document(json.dumps(ASK | unknown | {"min_p": None}).encode()), False, OTHERS)
    assert extra == unknown and body.model == "m"
    large = ASK | unknown | {"prompt": "x" * (32 << 10)}  # lists of token ids are cut out of a large body
    assert read_body(parse_document(json.dumps(large).encode()), False, OTHERS)[1] == unknown


@pytest.mark.parametrize("name", ["guided_json", *sorted(NOT_PASSED_ON)])
def test_an_unknown_parameter_is_refused_where_it_is_not_passed_on(name: str) -> None:
    passing = OTHERS if name in NOT_PASSED_ON else frozenset[str]()
    assert refusal(ASK | {name: 1}, passing=passing) == f"{name}: unknown parameter"


def test_parameters_to_pass_on_are_bounded() -> None:
    assert "at most 65536 bytes" in refusal(ASK | {"x": "y" * EXTRA_BYTES_MAX}, passing=OTHERS)
    assert "must have at most" in refusal(ASK | {"x": list(range(EXTRA_BYTES_MAX + 1))}, passing=OTHERS)
