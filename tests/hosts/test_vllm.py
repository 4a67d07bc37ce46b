"""A conductor before a real vLLM: `make hosts` installs it and runs this. `make test` does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.demo.command import MODEL
from tests.helpers.conductors import ConductorProcess, client_of, serve_conductor
from tests.helpers.engines.processes import serve_engine
from tests.helpers.hosts import VLLM, VLLM_ENV
from tests.helpers.processes import Machine, Process, free_port, wait_until

START_S = 280.0
CALL_S = 120.0
BLOCK = 32
SYSTEM = "You answer questions about kvstore from its documents. " * 12

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"),
    pytest.mark.timeout(600),
]


class VllmProcess(Process):
    """Its API server. The processes that this one has started outlive it, with gigabytes, unless they are ended."""

    def kill(self) -> int:
        """kill -9, with all that it has started but those that tidy up after the others."""
        started = list(self._started(self.pid))
        code = super().kill()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return code

    def _started(self, pid: int) -> Iterator[int]:
        with contextlib.suppress(OSError):
            for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
                yield from self._started(child)
                if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text():
                    yield child


@dataclass
class ServedVllm:
    """A real one, with the demo's model."""

    process: VllmProcess
    url: str
    words: str


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedVllm]:
    machine = Machine(tmp_path_factory.mktemp("vllm"))
    port, events, replay = free_port(), free_port(), free_port()
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    flags = {
        "served-model-name": MODEL.name,
        "dtype": "float32",
        "block-size": str(BLOCK),
        "max-model-len": "2048",
        "max-num-seqs": "8",
        "host": "127.0.0.1",
        "port": str(port),
        "kv-events-config": json.dumps(told),
    }
    command = [
        str(VLLM),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(MODEL),
        "--enforce-eager",
        "--enable-prompt-tokens-details",
    ]
    command += [word for name, value in flags.items() for word in (f"--{name}", value)]
    process = machine.start(VllmProcess, "vllm", command, None, **VLLM_ENV)
    url = f"http://127.0.0.1:{port}"
    words = f"{url} tokenizer={MODEL} dialect=vllm events=tcp://127.0.0.1:{events} replay=tcp://127.0.0.1:{replay}"
    try:
        yield ServedVllm(process, url, words)
    finally:
        machine.close()


@pytest.fixture
def conducted(vllm: ServedVllm, machine: Machine, tmp_path: Path) -> ConductorProcess:
    """A conductor that knows it."""
    conductor = serve_conductor(machine, config=str(config_of(tmp_path, backend=[vllm.words])), http="127.0.0.1:0")
    with client_of(conductor) as client:
        wait_until("vLLM is there", lambda: vllm.url in client.status()["engines"], START_S)
    return conductor


def config_of(folder: Path, **settings: Any) -> Path:
    path = folder / "conductor.toml"
    path.write_text("[conductor]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    return path


def chat_client(conductor: ConductorProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{conductor.http}/v1", api_key="any", max_retries=0, timeout=CALL_S)


def asked(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": MODEL.name, "messages": messages, "max_tokens": 12, "temperature": 0, **more}


def routes(completion: Any) -> dict[str, Any]:
    found: dict[str, Any] = completion.model_extra["kvstore"]["routes"][-1]["route"]
    return found


EXPLAIN: dict[str, Any] = {"extra_body": {"kvstore": {"explain": True}}}


def test_a_second_equal_chat_is_cached_and_the_index_knows_where(vllm: ServedVllm, conducted: ConductorProcess) -> None:
    with chat_client(conducted) as client, client_of(conducted) as status:
        first = client.chat.completions.create(**asked("What is a lease?"), **EXPLAIN)
        text = first.choices[0].message.content
        assert text and any(word.isalpha() for word in text.split()), text
        wait_until("its blocks are known", lambda: status.status()["pages"] > 0)
        again = client.chat.completions.create(**asked("What is a lease?"), **EXPLAIN)
        assert again.choices[0].message.content == text and again.usage is not None
        details = again.usage.prompt_tokens_details
        route = routes(again)
        (candidate,) = route["explained"]["candidates"]
        show("text", text)
        show("usage", again.usage.model_dump(exclude_none=True))
        show("route", {name: route[name] for name in ("answers", "own_tokens", "cached_tokens", "first_token_s")})
        show("why", route["explained"]["why"])
        assert details is not None and details.cached_tokens is not None
        whole = again.usage.prompt_tokens // BLOCK * BLOCK
        assert 0 < details.cached_tokens <= whole and candidate["engine"] == vllm.url
        assert candidate["own_tokens"] == whole, "as its events say"
        streamed = client.chat.completions.create(**asked("What is a lease?"), stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in streamed) == text
    assert conducted.terminate() == 0


def test_salts_are_kept_apart_by_vllm_and_here(vllm: ServedVllm, conducted: ConductorProcess) -> None:
    with chat_client(conducted) as client:

        def cached(salt: str) -> int:
            made = client.chat.completions.create(**asked("Who?"), extra_body={"kvstore": {"salt": salt}})
            assert made.usage is not None and made.usage.prompt_tokens_details is not None
            return made.usage.prompt_tokens_details.cached_tokens or 0

        assert cached("one") == 0 and cached("one") > 0 and cached("two") == 0


def test_who_goes_away_frees_its_work(vllm: ServedVllm, conducted: ConductorProcess) -> None:
    with chat_client(conducted) as client:
        with client.completions.create(model=MODEL.name, prompt="a", max_tokens=1500, stream=True) as stream:
            next(iter(stream))
        wait_until("vLLM has nothing to do", lambda: running(vllm) == 0.0)


def running(vllm: ServedVllm) -> float:
    """Requests that it decodes, as it says itself."""
    import httpx2

    text = httpx2.get(f"{vllm.url}/metrics", timeout=CALL_S).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))


def test_an_answer_that_vllm_began_goes_on_at_an_engine_of_ours(
    vllm: ServedVllm, machine: Machine, tmp_path: Path
) -> None:
    """The last one: vLLM is killed in the middle of an answer, and an engine of ours with the same model goes on."""
    engine = serve_engine(machine, str(MODEL), role="both", arena="48MiB", dtype="float32")
    settings = config_of(tmp_path, backend=[vllm.words], engine=[engine.address])
    conductor = serve_conductor(machine, config=str(settings), http="127.0.0.1:0")
    with chat_client(conductor) as client, client_of(conductor) as status:
        wait_until("both are there", lambda: len(status.status()["engines"]) == 2, START_S)
        alone = answer_of(engine, status)
        texts: dict[str, str] = {}
        deadline = time.monotonic() + START_S
        while vllm.process.alive:
            assert time.monotonic() < deadline, "nothing goes to vLLM"
            stream = client.chat.completions.create(**asked("What is a page?", max_tokens=400), stream=True, **EXPLAIN)
            texts = follow(stream, lambda route: route == vllm.url and vllm.process.kill())
        assert list(texts) == [vllm.url, alone] and all(texts.values()), texts
        show("begun at vLLM", texts[vllm.url][-60:])
        show("gone on at ours", texts[alone][:60])


def answer_of(engine: Any, status: Any) -> str:
    """The name of our engine."""
    return next(name for name, each in status.status()["engines"].items() if each["address"] == engine.address)


def follow(stream: Any, begun: Callable[[str], Any]) -> dict[str, str]:
    """The text of a stream by the engine it came from; ``begun`` is called with the first one at its first text."""
    texts: dict[str, str] = {}
    for event in stream:
        said = (event.model_extra or {}).get("kvstore")
        if said:
            texts[said["route"]["answers"]] = ""
        text = event.choices[0].delta.content if event.choices else ""
        if text:
            name = list(texts)[-1]
            if len(texts) == 1 and not texts[name]:
                begun(name)
            texts[name] += text
    return texts


def show(what: str, value: Any) -> None:
    """For who runs `make hosts` with -s."""
    sys.stdout.write(f"{what}: {value}\n")
