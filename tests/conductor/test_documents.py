"""Bodies become documents at a cost that their size bounds, whatever is in them."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from engine.conductor.http import openai_schema
from engine.conductor.http.openai_errors import Refusal
from engine.conductor.http.openai_schema import LISTS_MAX, TOKEN_MAX, VALUES_MAX, TokenList, parse_document

SEED = 5
ROUNDS = 3000
BODY_BYTES = 8 << 20
COPIES_MAX = 8  # bytes of memory for a byte of body: text of four bytes a character twice, and masks of one block
TEXTS = '\\"[]{},:a1é\U0001f600\n'
WRONG = (b",", b"[", b"]", b"0", b" ", b"\\", b'"', b"NaN", b"1 2", b"01", b"-")


def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
    """A body of ``BODY_BYTES`` that repeats ``unit``."""
    count = (BODY_BYTES - len(head) - len(tail)) // len(unit)
    return head + (unit * count).rstrip(b",") + tail


def plain(value: Any) -> Any:
    """A document as ``json`` would make it; None for a list with something above ``TOKEN_MAX``."""
    if isinstance(value, TokenList):
        return None if value.ids is None else value.ids.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def a_value(chance: random.Random, depth: int = 3) -> Any:
    match chance.randrange(9 if depth else 6):
        case 0:
            return "".join(chance.choices(TEXTS, k=chance.randrange(40)))
        case 1:
            return chance.choice([None, True, -1, 1.5, 0, 12, 1 << 31])
        case 2 | 3 | 4:
            return chance.choices([0, 1, 99, TOKEN_MAX, 12345], k=chance.randrange(12))
        case 5:
            return chance.choices([0, 1, -4, 2.5, "1,2", True], k=chance.randrange(12))
        case 6:
            names = ("".join(chance.choices(TEXTS, k=4)) for _ in range(chance.randrange(4)))
            return {name: a_value(chance, depth - 1) for name in names}
        case _:
            return [a_value(chance, depth - 1) for _ in range(chance.randrange(4))]


def a_body(chance: random.Random) -> bytes:
    """A document with whatever spaces and escapes, and often something wrong with it."""
    spaced: dict[str, Any] = chance.choice([{}, {"indent": 1}, {"separators": (",", ":")}])
    document = {"a": a_value(chance), "b": a_value(chance)}
    body = bytearray(json.dumps(document, ensure_ascii=chance.random() < 0.5, **spaced).encode())
    for _ in range(chance.choice((0, 0, 1, 2))):
        at = chance.randrange(len(body))
        body[at : at + chance.randrange(2)] = chance.choice(WRONG)
    return bytes(body)


def test_a_body_in_blocks_gives_what_json_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_schema, "BLOCK_BYTES", 16)  # so that everything lies across the ends of blocks
    monkeypatch.setattr(openai_schema, "CUT_BYTES_MIN", 4)
    monkeypatch.setattr(openai_schema, "SMALL_BYTES", 0)
    chance = random.Random(SEED)
    taken = 0
    for body in (a_body(chance) for _ in range(ROUNDS)):
        try:
            wanted = json.loads(body.decode())
        except ValueError:
            wanted = None
        if b"NaN" in body and isinstance(wanted, dict):
            continue  # json takes it, and we do so in a small body alone
        try:
            found = parse_document(body)
        except Refusal as refusal:
            assert not isinstance(wanted, dict), (body, refusal)
            continue
        taken += 1
        assert isinstance(wanted, dict) and masked(plain(found), wanted) == wanted, body
    assert taken > ROUNDS / 3


def masked(found: Any, wanted: Any) -> Any:
    """``found`` with lists of what is no token as they were asked for."""
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        return {name: masked(found[name], wanted[name]) for name in found}
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return [masked(*pair) for pair in zip(found, wanted, strict=True)]
    beyond = isinstance(wanted, list) and max((each for each in wanted if isinstance(each, int)), default=0) > TOKEN_MAX
    return wanted if found is None and beyond else found


@pytest.mark.parametrize(
    "body",
    [
        filled(b'{"prompt":[', b"[1],", b"]}"),
        filled(b'{"prompt":[', b"{},", b"]}"),
        filled(b'{"prompt":[', b'"ab",', b"]}"),
        filled(b'{"prompt":[', b"1.5,", b"]}"),
        filled(b'{"prompt":[[],', b"300,", b"]}"),
        filled(b'{"prompt":', b"[", b"}"),
        filled(b'{"prompt":[', b"[" + b"300," * 70 + b"3],", b"]}"),
        b"{" + b",".join(b'"%06x":1' % number for number in range(BODY_BYTES // 11)) + b"}",
    ],
    ids=["lists", "objects", "texts", "numbers", "mixed", "nested", "prompts", "names"],
)
def test_a_body_of_many_values_is_refused_before_they_are_made(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match=f"more than {VALUES_MAX} values") as refused:
            parse_document(body)
        assert tracemalloc.get_traced_memory()[1] < len(body)
    finally:
        tracemalloc.stop()
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        filled(b'{"prompt":[', b"7,", b"]}"),
        filled(b'{"prompt":[', b" 4294967295,", b"]}"),
        filled(b'{"prompt":"', b"[1], {\\\\", b'"}'),
        filled(b'{"prompt":"', b"\\u1234", b'"}'),
        filled('{"prompt":"\U0001f600'.encode(), b"x", b'"}'),
    ],
    ids=["small ids", "large ids", "brackets in text", "escapes", "wide text"],
)
def test_a_large_body_of_one_prompt_is_taken_in_bounded_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        prompt = parse_document(body)["prompt"]
        assert tracemalloc.get_traced_memory()[1] < COPIES_MAX * len(body) + (8 << 20)
    finally:
        tracemalloc.stop()
    wanted = json.loads(body)["prompt"]
    assert (prompt.ids.tolist() if isinstance(prompt, TokenList) else prompt) == wanted


def test_long_lists_beyond_the_prompts_of_one_request_are_values_like_others() -> None:
    lists = [list(range(100, 400))] * (LISTS_MAX + 1)
    found = parse_document(json.dumps({"a": lists, "b": "x" * openai_schema.SMALL_BYTES}).encode())["a"]
    assert [type(each) for each in found] == [TokenList] * LISTS_MAX + [list]
    assert plain(found) == lists
