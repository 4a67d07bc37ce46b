"""``kvstore conductor --http`` in front of a real engine with the demo's model, asked by OpenAI's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from engine.client import EngineClient
from engine.demo.command import MODEL
from tests.helpers.conductors import serve_conductor
from tests.helpers.engines.processes import serve_engine, wait_idle
from tests.helpers.processes import Machine

CALL_S = 120.0


@pytest.mark.slow
def test_a_chat_over_http_reuses_its_prefix_and_says_where_it_went(machine: Machine, tmp_path: Path) -> None:
    catalog = {"catalog": f"file:{tmp_path / 'catalog'}", "catalog_ttl_s": "2"}
    machine.serve("n0", dram="32MiB", listen="127.0.0.1:0", **catalog)
    engine = serve_engine(machine, str(MODEL), node="n0", role="both", arena="48MiB", **catalog)
    conductor = serve_conductor(machine, http="127.0.0.1:0", **catalog)
    url = f"http://{conductor.http}"
    system = "You answer questions about kvstore from its documents. " * 8
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": "What is a lease?"}]
    asked: dict[str, Any] = {"model": MODEL.name, "messages": messages, "max_tokens": 12, "temperature": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=CALL_S) as client:
        first = client.chat.completions.create(**asked, extra_body={"kvstore": {"explain": True}})
        text = first.choices[0].message.content
        assert text and any(word.isalpha() for word in text.split()), "words, and not noise"
        assert first.model_extra is not None and first.model_extra["kvstore"]["routes"][0]["route"]["answers"]
        again = client.chat.completions.create(**asked)
        assert again.choices[0].message.content == text and again.usage is not None
        details = again.usage.prompt_tokens_details
        assert details is not None and details.cached_tokens is not None
        assert 0 < details.cached_tokens < again.usage.prompt_tokens
        deltas = [
            event.choices[0].delta.content or "" for event in client.chat.completions.create(**asked, stream=True)
        ]
        assert "".join(deltas) == text and len(deltas) > 2
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL.name, prompt=[1 << 20], max_tokens=1)
        assert refused.value.param == "prompt"
        with client.completions.create(model=MODEL.name, prompt="a", max_tokens=4000, stream=True) as stream:
            next(iter(stream))
        with EngineClient(engine.address) as asking:  # whoever has gone is answered no longer
            wait_idle(asking)
        assert httpx2.get(f"{url}/healthz").text == "ok\n" and httpx2.get(f"{url}/readyz").text == "ready\n"
        metrics = httpx2.get(f"{url}/metrics").text
        assert 'kvstore_conductor_http_requests_total{code="200",path="/v1/chat/completions"} 3.0' in metrics
    assert conductor.terminate() == 0
