"""The HTTP server as OpenAI's own clients meet it: every way to ask, and every refusal."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from engine.conductor.http.connection import HttpPatience
from engine.demo.command import MODEL
from kvstore.errors import InvalidRequest
from tests.helpers.api import TENANTS, Certificates, identities_file, identity
from tests.helpers.http_server import (
    CALL_S,
    ONE_WORD,
    WORDS,
    RunningServer,
    head_of,
    post,
    read_all,
    refused,
    serve_openai,
)
from tests.helpers.processes import wait_until

GONE_S = 10.0  # the promise is one second
HELLO = [{"role": "user", "content": "What is a salt?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with a tokenizer that has a chat template."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(MODEL)  # the import takes longer than a server's client waits
    return MODEL


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serve_openai(models={"talks": str(folder)}) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=CALL_S) as made:
        yield made


# --- Asking ----------------------------------------------------------------------------------------------------------


def test_a_completion_and_what_it_cost(server: RunningServer, client: openai.OpenAI) -> None:
    found = client.completions.create(model="words", prompt="hello", max_tokens=3)
    assert [choice.text for choice in found.choices] == [" word0 word1 word2"]
    assert found.choices[0].finish_reason == "length" and found.model == "words"
    assert found.usage is not None and found.usage.prompt_tokens_details is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (5, 3, 8)
    assert found.usage.prompt_tokens_details.cached_tokens == 2
    assert server.answers.requests[-1].sampling.max_tokens == 3 and server.answers.requests[-1].tenant == "local"


def test_a_stream_is_the_same_answer_and_tells_its_usage_last(client: openai.OpenAI) -> None:
    asked = {"model": "words", "prompt": "hello", "max_tokens": 3}
    events = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == " word0 word1 word2"
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * 3 + ["length"]
    assert events[-1].choices == [] and events[-1].usage.total_tokens == 8
    assert all(event.usage is None for event in events[:-1]) and len({event.id for event in events}) == 1
    assert all(event.choices for event in client.completions.create(**asked, stream=True)), "no usage unless asked for"


def test_prompts_as_text_as_tokens_and_as_lists_of_them(server: RunningServer, client: openai.OpenAI) -> None:
    for prompt, tokens in (
        ("ab", [[97, 98]]),
        ([7, 8, 9], [[7, 8, 9]]),
        (["a", "b"], [[97], [98]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        del server.answers.requests[:]
        found = client.completions.create(model="words", prompt=prompt, max_tokens=1)
        assert [ask.tokens.tolist() for ask in server.answers.requests] == tokens
        assert [choice.index for choice in found.choices] == list(range(len(tokens)))
        assert found.usage is not None and found.usage.prompt_tokens == sum(map(len, tokens))


def test_several_answers_of_one_prompt_differ_in_their_seeds_alone(
    server: RunningServer, client: openai.OpenAI
) -> None:
    del server.answers.requests[:]
    found = client.completions.create(model="words", prompt=["a", "bc"], n=3, seed=5, max_tokens=2, stop=["x", "y"])
    assert [choice.index for choice in found.choices] == list(range(6))
    assert found.usage is not None and (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 12)
    asks = {ask.id.rpartition("-")[2]: ask for ask in server.answers.requests}
    assert [asks[str(i)].sampling.seed for i in range(6)] == [5, 6, 7] * 2
    assert {ask.sampling.stop for ask in asks.values()} == {("x", "y")}


def test_a_chat_goes_by_the_models_own_template(server: RunningServer, folder: Path, client: openai.OpenAI) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    found = client.chat.completions.create(model="talks", messages=messages, max_completion_tokens=2)
    assert found.choices[0].message.content == " word0 word1" and found.choices[0].message.role == "assistant"
    text = AutoTokenizer.from_pretrained(folder).decode(server.answers.requests[-1].tokens)
    assert text == "<|system|>Be brief.<|end|><|user|>What is a salt?<|end|><|assistant|>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a salt?"}]}]
    client.chat.completions.create(model="talks", messages=parts, max_tokens=1)
    client.chat.completions.create(model="talks", messages=HELLO, max_tokens=1)
    assert server.answers.requests[-1].tokens.tolist() == server.answers.requests[-2].tokens.tolist()


def test_the_route_is_told_where_it_is_asked_for(server: RunningServer, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "words", "prompt": "a", "max_tokens": 1}
    found = client.completions.create(**asked, extra_body={"kvstore": {"explain": True, "priority": 3}})
    assert found.model_extra is not None
    assert found.model_extra["kvstore"]["routes"][0]["route"]["reason"] and server.answers.requests[-1].priority == 3
    first, *_ = client.completions.create(**asked, extra_body={"kvstore": {"explain": True}}, stream=True)
    assert first.choices == [] and first.model_extra is not None and first.model_extra["kvstore"]["route"]["reason"]
    assert "kvstore" not in (client.completions.create(**asked).model_extra or {})


# --- Refusals --------------------------------------------------------------------------------------------------------

CHAT = {"model": "talks", "messages": HELLO}
NAMED = (  # what is added to a good request, the parameter that is named, and the code
    ({"logprobs": 2}, "logprobs", "unsupported_parameter"),
    ({"logprobs": True}, "logprobs", "unsupported_parameter"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"guided_json": {}}, "guided_json", "unknown_parameter"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 1.5}, "n", "invalid_type"),
    ({"n": 33}, "n", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"seed": 1 << 70}, "seed", "invalid_value"),
    ({"stop": ["a"] * 5}, "stop", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    ({"stop": 7}, "stop", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"model": None}, "model", "missing_required_parameter"),
    ({"model": 3}, "model", "invalid_type"),
    ({"kvstore": {"expalin": True}}, "kvstore.expalin", "unknown_parameter"),
    ({"kvstore": {"deadline_s": 0}}, "kvstore.deadline_s", "invalid_value"),
)
PROMPTS = (
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [1 << 32]}, "prompt", "invalid_value"),
    ({"prompt": ["a", []]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 33}, "prompt", "invalid_value"),
    ({"prompt": "\ud800"}, "prompt", "invalid_value"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"model": "short", "prompt": "a" * 17}, "prompt", "context_length_exceeded"),
    ({"messages": HELLO}, "messages", "unknown_parameter"),
)
MESSAGES = (
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_type"),
    ({"messages": ["a"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "invalid_value"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[1].tool_calls",
     "unsupported_parameter"),
    ({"model": "words"}, "messages", "no_chat_template"),
    ({"max_completion_tokens": 9000}, "messages", "context_length_exceeded"),
)  # fmt: skip


@pytest.mark.parametrize(("more", "param", "code"), (*NAMED, *PROMPTS))
def test_a_bad_completion_is_refused_by_its_parameter(
    server: RunningServer, more: dict[str, Any], param: str, code: str
) -> None:
    error = refused(post(server, WORDS | more), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(("more", "param", "code"), (*(each for each in NAMED if "echo" not in each[0]), *MESSAGES))
def test_a_bad_chat_is_refused_by_its_parameter(
    server: RunningServer, more: dict[str, Any], param: str, code: str
) -> None:
    error = refused(post(server, CHAT | more, "/v1/chat/completions"), 400)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("stream", [False, True])
def test_what_answers_refuse(client: openai.OpenAI, stream: bool) -> None:
    def ask(model: str) -> None:
        found: Any = client.completions.create(model=model, prompt="a", stream=stream)
        for _ in found if stream else ():
            pass

    with pytest.raises(openai.RateLimitError) as busy:
        ask("busy")
    assert busy.value.response.headers["Retry-After"] == "3" and busy.value.code == "overloaded"
    with pytest.raises(openai.InternalServerError) as gone:
        ask("gone")
    assert gone.value.status_code == 503 and gone.value.code == "unavailable"
    with pytest.raises(openai.BadRequestError) as picky:
        ask("picky")
    assert picky.value.param == "top_p"
    with pytest.raises(openai.APIError, match="the last engine"):
        ask("breaks")
    with pytest.raises(openai.InternalServerError) as bug:
        ask("bug")
    assert bug.value.status_code == 500 and "secret" not in str(bug.value)


# --- Disconnects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_ends_its_work(server: RunningServer, client: openai.OpenAI, n: int) -> None:
    with client.completions.create(model="floods", prompt="a", n=n, stream=True) as stream:
        next(iter(stream))
        wait_until("it runs", lambda: server.answers.open["floods"] == n)
    wait_until("nobody answers it any more", lambda: not server.answers.open["floods"], GONE_S)


# --- Keys and TLS ----------------------------------------------------------------------------------------------------


def test_keys_are_tenants(tmp_path: Path) -> None:
    several = identity("c", salts='["x", "y"]')
    metrics = {"/metrics": lambda: (200, "text/plain", "up 1\n"), "/healthz": lambda: (200, "text/plain", "ok\n")}
    with serve_openai(metrics, identities=identities_file(tmp_path, TENANTS + several)) as server:

        def ask(key: str | None, **own: Any) -> httpx2.Response:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return post(server, WORDS | {"max_tokens": 1, "kvstore": own}, **headers)

        for key in (None, "wrong", "late-token"):
            assert refused(ask(key), 401)["code"] == "invalid_api_key"
        assert ask("a-token").status_code == 200
        assert (server.answers.requests[-1].tenant, server.answers.requests[-1].salt) == ("a", "a")
        assert refused(ask("a-token", salt="b"), 403)["code"] == "permission_denied"
        assert refused(ask("c-token"), 400)["param"] == "kvstore.salt"
        assert ask("c-token", salt="y").status_code == 200 and server.answers.requests[-1].salt == "y"
        assert ask("op-token").status_code == 200 and server.answers.requests[-1].salt is None
        assert httpx2.get(f"{server.url}/healthz").text == "ok\n"
        refused(httpx2.get(f"{server.url}/v1/models"), 401)
        for key, status in (("a", 403), ("op", 200)):
            headers = {"Authorization": f"Bearer {key}-token"}
            assert httpx2.get(f"{server.url}/metrics", headers=headers).status_code == status


@pytest.mark.parametrize("together", [False, True])
def test_a_reply_over_tls_ends_without_another_word_of_its_caller(tmp_path: Path, together: bool) -> None:
    """``together``: the request comes in one piece with the end of the handshake."""
    made = Certificates(tmp_path)
    trust = ssl.create_default_context(cafile=made.path("ca.pem"))
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.wrap_bio(coming, going, server_hostname="localhost")
    files = {"tls_cert": Path(made.path("server.pem")), "tls_key": Path(made.path("server.key"))}
    patience = HttpPatience(headers_s=600.0, stall_s=600.0)
    with serve_openai(patience=patience, **files) as server, server.connect(CALL_S) as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(going.read())
                coming.write(connection.recv(65536))
        if not together:
            connection.sendall(going.read())
        client.write(head_of(len(ONE_WORD), "Connection: close") + ONE_WORD)
        connection.sendall(going.read())
        coming.write(read_all(connection))  # it ends before it times out
        assert client.read(65536).startswith(b"HTTP/1.1 200 ")


def test_beyond_loopback_it_takes_tls_and_keys(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="http: .*needs TLS"), serve_openai(http="0.0.0.0:0"):
        pass
    made = Certificates(tmp_path)
    tls = {"tls_cert": Path(made.path("server.pem")), "tls_key": Path(made.path("server.key"))}
    with pytest.raises(InvalidRequest, match="http: .*anyone could call"), serve_openai(http="0.0.0.0:0", **tls):
        pass
    with serve_openai(identities=identities_file(tmp_path), **tls) as server:
        trust = httpx2.Client(verify=ssl.create_default_context(cafile=made.path("ca.pem")))
        with trust, openai.OpenAI(base_url=f"{server.url}/v1", api_key="b-token", http_client=trust) as client:
            assert client.completions.create(model="words", prompt="a", max_tokens=1).choices[0].text == " word0"
        assert server.answers.requests[-1].tenant == "b"
