"""What engines and conductors can suffer while answers are under way, and what must hold. One fleet for all of it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import pytest

from tests.helpers.conductors import (
    ANSWER_S,
    ConductorAnswer,
    ConductorClient,
    ConductorProcess,
    client_of,
    serve_conductor,
)
from tests.helpers.engines.processes import EngineProcess, prompt, spawn_engine
from tests.helpers.engines.proxy import EngineProxy
from tests.helpers.http_server import head_of
from tests.helpers.processes import Machine, wait_until

LONG, SOME = 3000, 300  # tokens: the first are some seconds of an answer
SLOW_BYTES = 48 << 20  # of all that an engine could tell a reader that takes nothing


class FaultyFleet:
    """Engines without a pool, and a conductor, for all tests here. Those that a test has ended are replaced."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        # The dead leave a file at once.
        self.flags = {"catalog": f"file:{machine.logs / 'catalog'}", "catalog_ttl_s": "10"}
        self.engines: list[EngineProcess] = []
        self._conductor: ConductorProcess | None = None

    def spawn(self) -> EngineProcess:
        """One engine more."""
        self.engines.append(spawn_engine(self.machine, role="both", arena="32MiB", **self.flags))
        return self.engines[-1]

    def two(self) -> list[EngineProcess]:
        """Two that serve, and no others."""
        self.engines = [engine for engine in self.engines if engine.alive]
        while len(self.engines) > 2:
            self.engines.pop().kill()
        while len(self.engines) < 2:
            self.spawn()
        return [engine.wait_ready() for engine in self.engines]

    @property
    def conductor(self) -> ConductorProcess:
        """One that serves."""
        if self._conductor is None:
            self._conductor = serve_conductor(self.machine, http="127.0.0.1:0", **self.flags)
        return self._conductor

    @contextmanager
    def asked(self) -> Iterator[ConductorClient]:
        """Two engines, and a client of the conductor, which refuses nothing."""
        self.two()
        with client_of(self.conductor) as client:
            client.knows(2)
            wait_until("both are heard of", lambda: heard(client, 2))
            wait_until("nothing is under way", lambda: not any(client.status()["requests"].values()))
            yield client
            assert not client.status()["answers"].get("refused"), "there was room"

    def alone(self) -> list[int]:
        """The tokens that every engine draws."""
        with self.engines[0].client() as one:
            return list(one.generate(prompt(60), max_tokens=SOME, ignore_eos=True).tokens)

    def named(self, client: ConductorClient) -> dict[str, EngineProcess]:
        """The engines by the conductor's names for them."""
        found = client.status()["engines"]
        by_address = {engine.address: engine for engine in self.engines if engine.alive}
        return {name: by_address[one["address"]] for name, one in found.items() if one["address"] in by_address}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    machine = Machine(tmp_path_factory.mktemp("fleet"))
    try:
        yield FaultyFleet(machine)
    finally:
        machine.close()


def heard(client: ConductorClient, engines: int) -> bool:
    """So many engines have just said how busy they are."""
    return sum(each["heard_ago_s"] < 1.0 for each in client.status()["engines"].values()) == engines


def first_route(client: ConductorClient, seed: int) -> str:
    """Where a short prompt was sent first."""
    return str(client.answer(prompt(20, seed)).routes[0]["answers"])


# --- engines ---------------------------------------------------------------------------------------------------------


def test_an_answer_goes_on_elsewhere_without_a_repeated_token(fleet: FaultyFleet) -> None:
    """One engine stands still in the middle of an answer, then another one dies in the middle of the next."""
    with fleet.asked() as client:
        named = fleet.named(client)
        alone = fleet.alone()
        for fault in ("stop", "kill"):
            stream = client.submit(prompt(60), max_tokens=LONG)
            replies = [next(stream), next(stream)]  # where it goes, and some tokens
            name = ConductorAnswer(replies).routes[0]["answers"]
            lost = named[name]
            lost.stop() if fault == "stop" else lost.kill()
            while len(ConductorAnswer(replies).routes) < 2 or not replies[-1].HasField("tokens"):
                replies.append(next(stream))
            replies += [next(stream) for _ in range(20)]  # by another one
            answer = ConductorAnswer(replies)
            assert answer.indices == list(range(len(answer.tokens))), fault
            assert answer.tokens[:SOME] == alone[: len(answer.tokens)], fault
            assert len({route["answers"] for route in answer.routes}) == 2, fault
            stream.cancel()
            assert name not in {first_route(client, seed) for seed in range(4)}, fault
            if fault == "stop":
                lost.resume()
                wait_until("it is heard of again", lambda: heard(client, 2))


def test_a_late_report_of_an_engine_that_died_brings_it_nothing(fleet: FaultyFleet) -> None:
    """It was idle when it was asked, and is dead when that is heard: one request finds that out, and no other."""
    dies, stays = fleet.two()
    with closing(EngineProxy(dies.address)) as proxy:
        given = f"{proxy.address} {stays.address}"
        conductor = serve_conductor(fleet.machine, engine=given, policy="least-load")  # idle ones take turns
        with client_of(conductor) as client:
            client.knows(2)
            wait_until("it has reported", lambda: heard(client, 2))
            proxy.passes.clear()
            asked = proxy.asked
            wait_until("it is asked again, and answers", lambda: proxy.asked > asked)
            dies.kill()
            routes: list[str] = []

            def found_out() -> bool:  # by a request; or by the connection, where no request was sent there yet
                routes.append(first_route(client, len(routes)))
                told = client.route(prompt(20))
                away = [each["engine"] for each in told["left_out"]]
                away += [each["engine"] for each in told["candidates"] if each["silent"]]
                return proxy.address in {*routes, *away}

            wait_until("it is found dead", found_out)
            asked = proxy.asked
            proxy.passes.set()
            wait_until("the late report was heard", lambda: proxy.asked > asked)
            routes += [first_route(client, 100 + seed) for seed in range(4)]
            assert (proxy.address, proxy.address) not in pairwise(routes), routes
            answers = client.status()["answers"]
            assert {how for how, count in answers.items() if count} == {"length"}, "nothing was refused or lost"
        conductor.kill()


# --- clients ---------------------------------------------------------------------------------------------------------


def ask_http(conductor: ConductorProcess, stream: bool, sides: int) -> tuple[socket.socket, bytes]:
    """So many answers, of which some are long: any may end by itself. What has come, where they are streamed."""
    asked = {"model": "tiny-llama", "prompt": prompt(60).tolist(), "max_tokens": LONG, "stream": stream, "n": sides}
    body = json.dumps(asked).encode()
    host, _, port = conductor.http.rstrip(",").rpartition(":")
    connection = socket.create_connection((host, int(port)), ANSWER_S)
    connection.sendall(head_of(len(body)) + body)
    return connection, connection.recv(4096) if stream else b""


def test_a_reader_that_takes_nothing_costs_bounded_memory(fleet: FaultyFleet) -> None:
    """Its engine has half a gigabyte to tell."""
    with closing(EngineProxy(fleet.two()[0].address)) as proxy:
        conductor = serve_conductor(fleet.machine, engine=proxy.address, http="127.0.0.1:0")
        with client_of(conductor) as client:
            client.knows(1)
            client.answer(prompt(20))
            proxy.floods, before = True, conductor.memory_bytes()
            for over in ("grpc", "http"):
                proxy.told_bytes = 0
                if over == "grpc":
                    stream = client.submit(prompt(20), max_tokens=LONG)
                    next(stream)
                    leaves: Callable[[], Any] = stream.cancel
                else:
                    connection, reply = ask_http(conductor, True, 1)
                    assert reply.startswith(b"HTTP/1.1 200 ")
                    leaves = connection.close
                wait_until("its engine is held up", lambda: stands(proxy))
                assert proxy.told_bytes < SLOW_BYTES, over
                assert conductor.memory_bytes() - before < SLOW_BYTES, over
                leaves()
        conductor.kill()


def stands(proxy: EngineProxy) -> bool:
    """Some was told, and for a while no more."""
    told = proxy.told_bytes
    time.sleep(0.5)
    return 0 < told == proxy.told_bytes


# --- conductors ------------------------------------------------------------------------------------------------------


def test_engines_go_on_without_their_conductor_and_the_next_one_is_right(fleet: FaultyFleet) -> None:
    engines, flags = fleet.two(), {**fleet.flags, "pool": "other", "roles_floor": "1"}
    given = " ".join(engine.address for engine in engines)
    first, second = (serve_conductor(fleet.machine, engine=given, **flags) for _ in range(2))
    with client_of(first) as one, client_of(second) as two:
        wait_until("one leads", lambda: one.status()["leads"] or two.status()["leads"])
        dies, stays, client = (first, second, two) if one.status()["leads"] else (second, first, one)
        assert not client.status()["leads"], "the other does not"
        dies.kill()
        assert client.answer(prompt(30)).finished.reason == "length"
        wait_until("the other leads", lambda: client.status()["leads"])
        assert stays.terminate() == 0
    with engines[0].client() as engine:
        assert len(engine.generate(prompt(30), max_tokens=4, ignore_eos=True).tokens) == 4
    again = serve_conductor(fleet.machine, engine=given, **flags)
    with client_of(again) as client:
        client.knows(2)
        assert client.answer(prompt(30)).finished.reason == "length"
    again.kill()
