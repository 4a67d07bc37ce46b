"""Several conductors over one fleet: what each believes of roles, and who may change them."""

from __future__ import annotations

import random

import pytest

from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state.conductor_state import ConductorState
from engine.conductor.state.engine_table import AVOID_S, LoadReport
from engine.conductor.state.roles import CHANGE_S, KNOWN_S, ORDER_S
from engine.model.request import NO_ORDER, REVISION_MAX, Role, RoleOrder
from engine.state.admission import Admission
from kvstore.errors import InvalidRequest, NodeUnavailable
from tests.helpers import fleet
from tests.helpers.fleet import TTL_S, World, arrival, pages_of, world

PER_S, SWING_S = 12.0, 10.0  # requests; how long one mix of work lasts
CALM_S, FAULTS_S = 10.0, 30.0
FLOOR = 2


class Stubborn(ConductorState):
    """As conductors were until now: each decides about roles, leader or not, and believes itself at once."""

    def _change_roles(self, now_s: float, out: list[do.Instruction]) -> None:
        waits = [one for one in self.requests.values() if one.route is None]
        costs = [(one.model, one.cost_s, one.answer_s) for one in waits]
        self._roles.update_models(self.fleet.models)
        self._roles.revision, self._roles._orders_from_s = self._roles.revision or 0, 0.0
        for change in self._roles.changes(list(self.fleet.engines.values()), costs, now_s):
            self.fleet.engines[change.engine].role = change.role
            self.fleet.write(self.fleet.engines[change.engine])
            out.append(change)


def swinging(made: World, seconds: float, draw: random.Random) -> None:
    """Requests for long prompts and for long answers by turns, each to a conductor by chance."""
    end_s = made.now_s + seconds
    while made.now_s < end_s:
        number, prompts = len(made.arrivals), made.now_s // SWING_S % 2
        pages, answer = (60, 20) if prompts else (6, 250)
        prompt = pages_of(*range(10_000 * number, 10_000 * number + pages))
        made.arrive(arrival(number, prompt, answer=answer), draw.choice(made.seats))
        made.run(made.now_s + draw.expovariate(PER_S))


def break_something(made: World, draw: random.Random) -> None:
    """Cut a link or several, one way or both, or one to the catalog, for a while."""
    seat, seconds = draw.choice(made.seats), draw.uniform(1.0, 8.0)
    names = set(draw.sample(sorted(made.engines), draw.choice((1, 1, 3, len(made.engines)))))
    kind = draw.choice(("cut", "deaf", "both", "catalog"))

    def heal() -> None:
        if kind in ("cut", "both"):
            seat.cut -= names
        if kind in ("deaf", "both"):
            seat.deaf -= names
        if kind == "catalog":
            seat.off_catalog = False

    if kind in ("cut", "both"):
        seat.cut |= names
    if kind in ("deaf", "both"):
        seat.deaf |= names
    if kind == "catalog":
        seat.off_catalog = True
    made.after(seconds, heal)
    made.after(draw.uniform(1.0, 5.0), lambda: break_something(made, draw) if made.now_s < CALM_S + FAULTS_S else None)


def depose(made: World) -> None:
    """Take the leader from the catalog until another one leads."""
    leader = next((seat for seat in made.seats if made.leading(seat) is not None), made.seats[0])
    leader.off_catalog = True
    made.after(2 * TTL_S, lambda: setattr(leader, "off_catalog", False))


def torn(conductors: int, seed: int) -> World:
    """A fleet with several conductors, whose links are cut at random for a while."""
    draw = random.Random(seed)
    made = world(roles="pppddddd", conductors=conductors, split="always", roles_floor=FLOOR, seed=seed)
    made.live(seed)
    made.after(CALM_S, lambda: break_something(made, draw))
    made.after(CALM_S + FAULTS_S / 3, lambda: depose(made))
    swinging(made, CALM_S + FAULTS_S + CALM_S, draw)
    made.settle(300.0)
    return made


@pytest.mark.parametrize(("conductors", "seed"), [(2, 0), (2, 1), (3, 2)])
def test_no_request_is_refused_for_a_role_that_its_conductor_could_have_known(conductors: int, seed: int) -> None:
    """See ``World.misrouted`` for what it could not know. And no role ever falls below its floor."""
    made = torn(conductors, seed)
    assert not made.misrouted(), made.misrouted()[:3]
    assert made.role_refusals, "reports were under way when roles changed"
    assert len({it.order.revision for _, it in made.roles}) > 1, "leaders changed, and gave orders"
    assert all(min(prompts, answers) >= FLOOR for _, prompts, answers in made.splits), made.splits
    assert len(made.done) + len(made.given_up) == len(made.arrivals) and not made.refused
    for seat in made.seats:  # they agree once all is calm
        for name, engine in made.engines.items():
            assert seat.state.fleet.engines[name].role is engine.role


def test_conductors_that_believe_themselves_break_that_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law is one that can be broken: of 600 requests 24 are sent wrong so, and now none is."""
    monkeypatch.setattr(fleet, "ConductorState", Stubborn)
    made = torn(2, 0)
    assert made.misrouted()


# --- what one conductor believes --------------------------------------------------------------------------------------


def report(made: World, name: str, role: Role, order: RoleOrder = NO_ORDER, asked: bool = True) -> None:
    """An engine answers; where it is not ``asked`` before, this is the answer to an earlier question."""
    if asked:
        made.tell(ev.ReportRequested(made.now_s, name))
    made.tell(ev.LoadReported(made.now_s, name, LoadReport(role=role, order=order)))


def send(made: World, number: int) -> str:
    """Where a short request is sent; "": it waits."""
    sent = len(made.sends)
    made.arrive(arrival(number, pages_of(1000 + number)))
    return made.sends[-1][1].route.answering.engine.about.name if len(made.sends) > sent else ""


def test_an_engine_that_refuses_for_its_role_is_asked_again_and_not_barred() -> None:
    """The request goes elsewhere at once, and the engine does its new work as soon as it says what that is."""
    made = world(2, policy="least-load")
    made.tell(ev.ReportRequested(0.0, "e0"))  # the answer is on its way while the role changes
    made.engines["e0"].admission.set_role(Role.PREFILL, None)
    numbers = iter(range(100))
    while not made.role_refusals:
        send(made, next(numbers))
    assert {each.engine for each in made.role_refusals} == {"e0"}
    assert made.sends[-1][1].number == made.role_refusals[0].number, "it went to the other one at once"
    report(made, "e0", Role.BOTH, asked=False)  # what it was before
    assert {send(made, next(numbers)) for _ in range(4)} == {"e1"}
    explained = made.explain(arrival(99, pages_of(1)))
    (out,) = explained["left_out"]  # type: ignore[misc]
    assert out["engine"] == "e0" and "refused a request because of its role" in out["why"]
    made.engines["e0"].admission.set_role(Role.BOTH, None)
    report(made, "e0", Role.BOTH)
    assert made.now_s < AVOID_S and "e0" in {send(made, next(numbers)) for _ in range(6)}
    made.settle()
    assert len(made.role_refusals) == 1 and len(made.done) == len(made.arrivals)


def test_a_request_that_every_engine_refuses_waits_for_a_report() -> None:
    made = world(1)
    made.engines["e0"].admission.set_role(Role.PREFILL, None)
    assert send(made, 0) == "e0" and len(made.role_refusals) == 1
    made.run(10.0)
    assert len(made.role_refusals) == 1 and made.state.requests, "nothing is sent on a guess"
    report(made, "e0", Role.PREFILL)
    assert len(made.sends) == 1
    made.engines["e0"].admission.set_role(Role.BOTH, None)
    report(made, "e0", Role.BOTH)
    made.settle()
    assert set(made.done) == {0}


def test_a_request_that_was_kept_for_an_engine_goes_elsewhere_when_its_role_changes() -> None:
    """The engine is about to have its prefix, and does other work by then."""
    made = world(2, policy="longest-prefix")
    pages = pages_of(*range(200))
    made.arrive(arrival(0, pages))
    (first,) = (send.route.answering.engine.about.name for _, send in made.sends)
    made.arrive(arrival(1, pages_of(*range(200), 7)))
    assert len(made.sends) == 1 and made.state.requests[1].route is not None, "it is kept"
    made.engines[first].admission.set_role(Role.PREFILL, None)
    report(made, first, Role.PREFILL)
    made.settle()
    assert set(made.done) == {0, 1} and not made.role_refusals


# --- orders -----------------------------------------------------------------------------------------------------------


def leader(roles: str, revision: int = 1, floor: int = 1) -> World:
    """A conductor that has led for long enough, and knows its engines."""
    made = world(roles=roles, roles_floor=floor)
    made.tell(ev.LeadershipChanged(0.0, True, revision))
    return made


def ticked(made: World, seconds: float = 0.0) -> list[do.SetRole]:
    """The orders that it gives now. What becomes of them is not told."""
    made.now_s += seconds
    for name, engine in made.engines.items():
        report(made, name, engine.role, engine.admission.order)
    out = made.state.handle(ev.Ticked(made.now_s))
    return [each for each in out if isinstance(each, do.SetRole)]


def test_a_role_below_its_floor_is_filled_by_the_leader_alone() -> None:
    """Also where nothing is asked for; a new leader waits until no other order can be under way."""
    made = leader("ddd", revision=7)
    assert not ticked(made) and not ticked(made, ORDER_S)
    (order,) = ticked(made, KNOWN_S)
    assert (order.role, order.order) == (Role.PREFILL, RoleOrder(7, 1))
    made = leader("ddd")
    made.tell(ev.LeadershipChanged(0.0, False))
    assert not any(ticked(made, 1.0) for _ in range(20))


def test_an_engine_under_an_order_gets_nothing_until_it_has_reported() -> None:
    made = leader("dd")
    (order,) = ticked(made, ORDER_S + KNOWN_S)
    other = next(name for name in made.engines if name != order.engine)
    assert {send(made, number) for number in range(4)} == {other}
    made.tell(ev.ReportRequested(made.now_s, order.engine))
    made.tell(ev.RoleOrderEnded(made.now_s, order.engine))
    report(made, order.engine, Role.DECODE, asked=False)  # it was asked before the order had ended
    assert {send(made, number) for number in range(4, 8)} == {other}
    made.set_role(order.engine, order.role, order.order)
    report(made, order.engine, order.role, order.order)
    assert made.state.fleet.engines[order.engine].role is Role.PREFILL
    made.settle()
    assert not made.role_refusals


def test_engines_that_do_not_answer_count_for_no_floor() -> None:
    """The leader never takes the last engine that it knows of from a role, whatever the others were."""
    made = leader("ddd")
    ticked(made, ORDER_S + KNOWN_S - 1.0)
    made.now_s += KNOWN_S + 1.0
    report(made, "e0", Role.DECODE)
    assert not [each for each in made.state.handle(ev.Ticked(made.now_s)) if isinstance(each, do.SetRole)]


def test_a_leader_goes_on_where_revisions_have_begun_anew() -> None:
    """The catalog was lost, and counts from one again: the leader's orders are later than what engines know."""
    made = leader("ddd", revision=2)
    for name in made.engines:
        made.set_role(name, Role.DECODE, RoleOrder(1000, 3))
    (order,) = ticked(made, ORDER_S + KNOWN_S)
    assert order.order == RoleOrder(1001, 1)
    made.set_role(order.engine, order.role, order.order)
    made.tell(ev.RoleOrderEnded(made.now_s, order.engine))
    assert not ticked(made, CHANGE_S), "its own orders are no news"
    made.tell(ev.LeadershipChanged(made.now_s, True, REVISION_MAX))
    assert not ticked(made, CHANGE_S)


def test_an_order_of_a_leader_that_stood_still_is_refused_in_words() -> None:
    """The conductor led when it looked, and its order goes out when another one has led for long."""
    admission = Admission(Role.DECODE, 2)
    admission.set_role(Role.PREFILL, RoleOrder(9, 1))
    for late in (RoleOrder(7, 100), RoleOrder(9, 1), RoleOrder(9, 0)):
        with pytest.raises(InvalidRequest, match="^revision: order 1 of revision 9 was carried out before"):
            admission.set_role(Role.DECODE, late)
    assert (admission.role, admission.order, admission.role_set_by) == (Role.PREFILL, RoleOrder(9, 1), "leader")
    admission.set_role(Role.DECODE, RoleOrder(9, 2))
    admission.set_role(Role.BOTH, None)
    assert (admission.role, admission.order, admission.role_set_by) == (Role.BOTH, RoleOrder(9, 2), "operator")


def test_an_order_of_a_leader_ends_no_drain() -> None:
    """The engine is about to go; that it may take work again is for an operator to say."""
    admission = Admission(Role.DECODE, 2)
    admission.draining = True
    with pytest.raises(NodeUnavailable, match="is being drained"):
        admission.set_role(Role.PREFILL, RoleOrder(1, 1))
    assert admission.draining and admission.role is Role.DECODE
    admission.set_role(Role.PREFILL, None)
    assert not admission.draining
