"""Roles of real engines, and what real conductors know of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from engine.model.request import Role
from tests.helpers.conductors import ConductorClient, client_of, serve_conductor
from tests.helpers.engines.processes import prompt, spawn_engine
from tests.helpers.engines.proxy import EngineProxy
from tests.helpers.processes import Machine, wait_until


def test_a_request_that_is_refused_for_a_role_goes_elsewhere_and_bars_nobody(machine: Machine) -> None:
    """The report that tells of the new role is under way for as long as we like."""
    turned, other = (spawn_engine(machine, role="both") for _ in range(2))
    turned.wait_ready()
    with closing(EngineProxy(turned.address)) as proxy, closing(turned.client()) as operator:
        given = f"{proxy.address} {other.wait_ready().address}"
        conductor = serve_conductor(machine, engine=given, policy="least-load")  # idle ones take turns
        with client_of(conductor) as client:
            client.knows(2)
            proxy.passes.clear()
            asked = proxy.asked
            wait_until("it is asked, and its answer does not come", lambda: proxy.asked > asked)
            operator.set_role(Role.PREFILL)
            answers = [client.answer(prompt(20, seed)) for seed in range(4)]
            assert {answer.finished.reason for answer in answers} == {"length"}
            routes = [[route["answers"] for route in answer.routes] for answer in answers]
            assert [proxy.address, other.address] in routes and routes.count([proxy.address, other.address]) == 1, (
                routes
            )
            status = client.status()
            assert status["role_refusals"] == 1 and status["answers"]["length"] == 4
            assert status["engines"][proxy.address]["role_unsure"], "nothing goes there on a guess"
            out = {each["engine"]: each["why"] for each in client.route(prompt(20))["left_out"]}
            assert "refused a request because of its role" in out[proxy.address], out
            operator.set_role(Role.BOTH)
            proxy.passes.set()
            wait_until("it answers again", lambda: client.answer(prompt(20)).routes[0]["answers"] == proxy.address)
            assert client.status()["role_refusals"] == 1


def test_the_leader_decides_about_roles_and_all_conductors_learn_of_it(machine: Machine, tmp_path: Path) -> None:
    """One of two engines that compute prompts is ordered to answer. The next leader has a later revision."""
    flags = {"catalog": f"file:{tmp_path / 'catalog'}", "catalog_ttl_s": "2"}
    engines = [spawn_engine(machine, role="prefill", **flags) for _ in range(2)]
    for engine in engines:
        engine.wait_ready()
    first, second = (serve_conductor(machine, roles_floor="1", **flags) for _ in range(2))
    with client_of(first) as one, client_of(second) as two:
        wait_until("one leads", lambda: one.status()["leads"] or two.status()["leads"])
        leader, client, follower = (first, one, two) if one.status()["leads"] else (second, two, one)
        wait_until("an engine answers", lambda: roles_known(follower) == ["decode", "prefill"])
        wait_until("both know", lambda: roles_known(client) == ["decode", "prefill"])
        revision = client.status()["revision"]
        orders = [each["role_order"] for each in follower.status()["engines"].values() if each["role"] == "decode"]
        assert orders == [{"revision": revision, "number": 1}] and revision > 0
        assert follower.answer(prompt(40)).finished.reason == "length"
        assert follower.status()["revision"] is None
        leader.kill()
        wait_until("the other leads", lambda: follower.status()["leads"])
        assert follower.status()["revision"] > revision


def roles_known(client: ConductorClient) -> list[str]:
    """Roles of engines, as a conductor knows them."""
    return sorted(each["role"] for each in client.status()["engines"].values() if not each["role_unsure"])
