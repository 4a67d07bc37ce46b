"""``kvstore web``: real pages in a real browser, beside a real node; and what the server refuses."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.simulator.cli import plan
from engine.simulator.what_if import read_query, what_if
from engine.web.server import LiveFrames
from kvstore.errors import InvalidRequest, NodeUnavailable
from tests.helpers.browser import browser, path_of_browser
from tests.helpers.processes import CLI, WAIT_S, Machine, Process, put, wait_until

PAGES = 7


def test_the_page_and_the_command_show_the_same_numbers() -> None:
    query = "model=8b-gqa&gpus=16&input=20000&rate=2&ttft=3"
    printed = CliRunner().invoke(plan, ["--what-if", query, "--json"])
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.stdout) == json.loads(json.dumps(what_if(query)))
    again = what_if(what_if(query)["query"])
    assert again == what_if(query), "the link reproduces the page"


def test_the_formulas_answer_as_the_questions_of_a_buyer_expect() -> None:
    slow, fast = (what_if(f"fabric={fabric}&hosts=1&gpus=4&input=8000") for fabric in ("ethernet-10", "nvlink"))
    assert slow["break_even_tokens"] > fast["break_even_tokens"]
    goodput = {each["name"]: each["goodput"] for each in slow["designs"]}
    assert goodput["disaggregated"] < goodput["chunked"], "hand-offs over a slow link"
    for name, less, more in (("gpus", 4, 16), ("dram", 64, 2048), ("ttft", 0.5, 5)):
        best = [what_if(f"{name}={value}")["designs"][0]["goodput"] for value in (less, more)]
        assert best[0] <= best[1], name
    without = what_if("caching=off")
    assert all(each["hit_ratio"] == 0 for each in without["designs"])
    overloaded = what_if("rate=100000&gpus=1")
    assert all(each["limit"] and each["curve"][-1] == [None, None] for each in overloaded["designs"])


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("rate=0", "rate"),
        ("rate=nan", "rate"),
        ("gpu=abacus", "gpu"),
        ("caching=maybe", "caching"),
        ("colour=red", "query"),
        ("model=671b-mla&gpus=2", "gpus"),
        ("a" * 5000, "query"),
    ],
)
def test_a_query_that_is_not_valid_is_refused_by_the_name_of_its_field(query: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        what_if(query)
    assert caught.value.field == field
    assert read_query("")["rate"] == 4.0


def test_a_node_that_stops_responding_is_shown_with_its_last_numbers() -> None:
    asyncio.run(_shows_last_numbers())


async def _shows_last_numbers() -> None:
    def frames():
        yield {"name": "n", "tiers": {"dram": {"hit_tokens_per_s": 5.0}}, "missed_per_s": {"tokens": 1.0}}
        raise NodeUnavailable("n is gone")

    live = LiveFrames(frames())
    page: asyncio.Queue[bytes | None] = asyncio.Queue(10)
    live._pages.add(page)
    task = asyncio.create_task(live.run())
    first = json.loads((await page.get()).removeprefix(b"data: "))
    second = json.loads((await page.get()).removeprefix(b"data: "))
    task.cancel()
    assert first["point"]["hits"] == {"dram": 5.0} and first["point"]["missed"] == 1.0
    assert second["frame"]["error"] == "n is gone" and second["frame"]["name"] == "n"


def test_a_page_that_does_not_read_is_disconnected() -> None:
    asyncio.run(_disconnects())


async def _disconnects() -> None:
    live = LiveFrames(None)
    page: asyncio.Queue[bytes | None] = asyncio.Queue(2)
    live._pages.add(page)
    for _ in range(3):
        live._send(b"event")
    assert not live._pages
    assert [page.get_nowait() for _ in range(2)] == [b"event", None]


def fetch(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def started(machine: Machine) -> tuple[Process, str]:
    web = machine.start(
        Process, "web", [*CLI, "web", "--node", "n", "--http", "127.0.0.1:0", "--json"], PYTHONUNBUFFERED="1"
    )
    wait_until("the address", lambda: "http://" in web.output())
    return web, json.loads(web.output())["url"]


def test_pages_are_for_this_machine_and_its_names_alone(machine: Machine) -> None:
    machine.serve("n", dram="2MiB")
    said = machine.run("web", "--node", "n", "--http", "0.0.0.0:0")
    assert said.returncode != 0 and "must be an address of loopback" in said.stderr
    web, url = started(machine)
    for path in ("", "plan", "style.css", "charts.js", "live.js", "plan.js"):
        status, text = fetch(url + path)
        assert status == 200
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), "no other site is named"
    assert fetch(url, Host="evil.example")[0] == 403
    assert fetch(url + "events", Origin="http://evil.example")[0] == 403
    status, text = fetch(url + "api/plan?gpu=abacus")
    assert status == 400 and json.loads(text)["error"].startswith("gpu: must be one of")
    web.signal(signal.SIGTERM)
    assert web.wait() == 0


@pytest.mark.skipif(path_of_browser() is None, reason="needs a browser: apt install chromium")
def test_a_browser_shows_the_node_its_death_and_its_return_and_redraws_while_a_slider_moves(
    machine: Machine, tmp_path: Path
) -> None:
    asyncio.run(_in_a_browser(machine, tmp_path))


async def _in_a_browser(machine: Machine, tmp_path: Path) -> None:
    node = machine.serve("n", dram="2MiB")
    with machine.connect("n") as store:
        put(store, 1, PAGES)
    _, url = started(machine)
    async with browser() as page:
        await page.open(url)
        card = "document.querySelector('#members article')"
        await page.until(f"{card} && {card}.textContent.includes('{PAGES}')")
        assert await page.value(f"{card}.dataset.name") == "n"
        assert await page.value(f"{card}.classList.contains('dead')") is False
        await asyncio.to_thread(node.kill)
        await page.until(f"{card}.classList.contains('dead')")
        await asyncio.to_thread(machine.serve, "n", dram="2MiB")
        await page.until(f"!{card}.classList.contains('dead')")
        await page.open(url + "plan?rate=2&gpus=16")
        sentence = "document.getElementById('sentence')?.textContent"
        first = await page.until(sentence)
        document = what_if("rate=2&gpus=16")
        assert document["because"] in first
        cells = await page.value(
            "[...document.querySelectorAll('#designs tr.best td')].map((each) => each.textContent)"
        )
        assert cells[0] == document["recommended"]
        assert float(cells[2].removesuffix(" /s")) == pytest.approx(document["designs"][0]["goodput"], rel=0.01)
        slider = "document.querySelector('input[name=input]')"
        await page.value(f"{slider}.value = 195, {slider}.dispatchEvent(new Event('input'))")
        await page.until(f"{sentence} !== {json.dumps(first)}")
        assert "input=" in await page.value("location.search")
        link = await page.value("location.href")
        shown = "new URLSearchParams(location.search).get('input')"
        await page.until(f"document.getElementById('command')?.dataset.command?.includes({shown})")
        second = await page.value(sentence)
        await page.open(link)
        assert await page.until(sentence) == second, "the link reproduces the page"
        controls = "[...document.querySelectorAll('input, select, button, svg')]"
        unnamed = f"{controls}.filter((each) => !(each.labels?.length || each.ariaLabel || each.textContent))"
        assert await page.value(f"{unnamed}.length") == 0, "everything has a name that can be read out"
        for name, width, dark in (("wide", 1200, False), ("phone", 390, True)):
            await page.picture(tmp_path / f"{name}.png", width, dark=dark)
            assert await page.value("document.documentElement.scrollWidth <= window.innerWidth"), name
