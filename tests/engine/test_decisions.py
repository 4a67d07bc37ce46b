"""What an engine decides, event by event: who comes first, which engine is asked, who joins a step, what is measured.

What holds whatever happens is tested by histories: ``tests/worlds/test_engine_simulation.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.model.request import Role
from engine.state import engine_state, integrity
from engine.state import events as ev
from engine.state import instructions as do
from engine.state.admission import Admission
from engine.state.engine_state import STORE_S, EngineState
from engine.state.migration import TAKE_S
from engine.state.prefill_source import AVOID_S
from engine.state.rules import Rules
from engine.state.sequences import Phase
from kvstore.errors import InvalidRequest, NodeUnavailable, TooManyCalls, VersionMismatch

PAGE = 16
LAYERS = 4
ONE, TWO = "one:1", "two:1"
GONE = NodeUnavailable("gone")


class Driver:
    """A state, its clock, and short names for what happens."""

    def __init__(self, **rules: Any) -> None:
        settings = {"frames": 64, "layers": LAYERS, "page_tokens": PAGE, "chunk_tokens": 64, "batch_max": 8}
        self.state = EngineState(Rules(**{**settings, **rules}))
        self.now_s = 0.0

    def submit(self, number: int, prompt: int = 4 * PAGE, tokens_max: int = 16, **how: Any) -> list[do.Instruction]:
        settings = {"generated": 0, "deadline_s": 1e6, **how}
        event = ev.Submitted(self.now_s, number, str(number), prompt=prompt, tokens_max=tokens_max, **settings)
        return self.state.handle(event)

    def loaded(self, number: int, tokens: int = 0) -> list[do.Instruction]:
        return self.state.handle(ev.PrefixLoaded(self.now_s, number, tokens))

    def turn(self, arriving: dict[int, ev.Arriving] | None = None) -> list[do.Instruction]:
        return self.state.handle(ev.Turn(self.now_s, arriving or {}))

    def run(self) -> list[do.Instruction]:
        """A turn, and its step if there is one."""
        out = self.turn()
        if self.state.step is not None:
            self.stepped()
        return out

    def stepped(self, seconds: float = 0.01, waited_s: float = 0.0, **how: Any) -> list[do.Instruction]:
        settings = {"ends": {}, "missed": frozenset(), **how}
        return self.state.handle(ev.Stepped(self.now_s, seconds=seconds, waited_s=waited_s, **settings))

    def failed(self, number: int, attempt: int, error: Any = GONE) -> list[do.Instruction]:
        """The engine that was asked is gone, and its mover has ended."""
        out = self.state.handle(ev.AskFailed(self.now_s, number, attempt, error))
        return out + self.state.handle(ev.Moved(self.now_s, number, attempt, 0, error))

    def decoding(self, *numbers: int) -> None:
        """Bring them there: prompts of a page, computed here."""
        for number in numbers:
            self.submit(number, PAGE, tokens_max=64)
        self.turn()
        for number in numbers:
            self.loaded(number)
        for _ in range(100):
            if all(self.state.roster.sequences[number].phase is Phase.DECODING for number in numbers):
                return
            self.run()
        raise AssertionError("prompts are not computed")

    def arriving(self, number: int) -> None:
        """Bring it to where its first token is drawn and its KV still arrives."""
        self.submit(number, engines=(ONE,))
        self.turn()
        self.loaded(number)
        self.state.handle(ev.Computed(self.now_s, number, 1, 5))
        self.state.handle(ev.TokenDrawn(self.now_s, number, ""))


def kinds(instructions: Sequence[do.Instruction]) -> list[str]:
    return [type(it).__name__ for it in instructions]


def only(instructions: Sequence[do.Instruction], kind: type) -> list[Any]:
    return [it for it in instructions if isinstance(it, kind)]


# --- who comes first -----------------------------------------------------------------------------------------------


def test_a_large_request_is_not_overtaken() -> None:
    driver = Driver(frames=10)
    driver.submit(1, 6 * PAGE, PAGE)
    driver.submit(2, 6 * PAGE, PAGE)
    driver.submit(3, PAGE, PAGE)
    assert [it.sequence for it in only(driver.turn(), do.LoadPrefix)] == [1]
    assert not only(driver.turn(), do.LoadPrefix)
    driver.loaded(1)
    driver.state.handle(ev.Cancelled(0.0, 1))
    assert [it.sequence for it in only(driver.turn(), do.LoadPrefix)] == [2, 3]


def test_one_waits_for_pages_that_another_is_at_and_lets_others_pass() -> None:
    driver = Driver(frames=10, chunk_tokens=32)
    driver.submit(1, 4 * PAGE, PAGE, names=(b"a", b"b", b"c"))
    driver.submit(2, 4 * PAGE, PAGE, names=(b"a", b"b", b"d"))
    driver.submit(3, PAGE, PAGE)
    assert [it.sequence for it in only(driver.turn(), do.LoadPrefix)] == [1, 3], "5 and 2 frames of 10"
    driver.loaded(1)
    driver.loaded(3)
    assert not only(driver.run(), do.LoadPrefix), "its pages are computed"
    assert only(driver.run(), do.LoadPrefix) == [do.LoadPrefix(2, [0, 1, 7, 8, 9], shared=2)], "it needs 3 frames more"
    assert driver.state.roster.frames.free == 0 and driver.state.roster.frames.shared == 2
    driver.state.handle(ev.Cancelled(0.0, 1))
    assert driver.state.roster.frames.free == 3 and driver.state.roster.frames.shared == 0
    out = driver.loaded(2, 2 * PAGE) + driver.turn()
    assert do.Part(2, 2 * PAGE, 3 * PAGE, False) in only(out, do.Step)[0].parts


@pytest.mark.parametrize("how", [{"answers": False, "hold_s": 5.0}, {"engines": (ONE,)}])
def test_nobody_waits_for_pages_while_another_engine_waits_for_him(how: dict[str, Any]) -> None:
    driver = Driver()
    driver.submit(1, 4 * PAGE, names=(b"a", b"b", b"c"))
    driver.submit(2, 4 * PAGE, names=(b"a", b"b", b"c"), **how)
    assert [it.sequence for it in only(driver.turn(), do.LoadPrefix)] == [1, 2]


def test_a_prompt_goes_on_beside_a_batch_larger_than_a_chunk() -> None:
    driver = Driver(chunk_tokens=4, batch_max=8)
    driver.decoding(1, 2, 3, 4, 5)
    driver.submit(6)
    driver.turn()
    driver.stepped()
    driver.loaded(6)
    (step,) = only(driver.turn(), do.Step)
    assert step.decoding == [1, 2, 3, 4, 5] and step.parts == [do.Part(6, 0, PAGE, False)]


def test_chunks_share_a_step_and_end_with_pages() -> None:
    driver = Driver(chunk_tokens=40)
    driver.submit(1, 20)
    driver.submit(2, 100)
    driver.turn()
    driver.loaded(1)
    driver.loaded(2)
    (step,) = only(driver.turn(), do.Step)
    assert step.parts == [do.Part(1, 0, 20, True), do.Part(2, 0, 16, False)]


def test_deadlines_end_whoever_waits_loads_and_decodes() -> None:
    driver = Driver(frames=6)
    driver.decoding(1)  # takes 5 frames
    driver.state.roster.sequences[1].deadline_s = 5.0
    driver.submit(2, PAGE, 1, answers=False, deadline_s=6.0)
    driver.run()
    driver.submit(3, 5 * PAGE, deadline_s=7.0)
    assert [driver.state.roster.sequences[n].phase for n in (1, 2, 3)] == [
        Phase.DECODING,
        Phase.LOADING,
        Phase.WAITING,
    ]
    late = []
    for driver.now_s in (5.0, 5.1, 6.1, 7.1):
        late.append([it.sequence for it in only(driver.run(), do.Fail)])
    assert late == [[], [1], [2], [3]]


# --- which engine is asked -----------------------------------------------------------------------------------------


def asked(driver: Driver, number: int = 1, **how: Any) -> str:
    """The engine that a request's prompt is asked of; "" for this one."""
    driver.submit(number, **how)
    driver.run()
    found = only(driver.loaded(number), do.AskPrefill)
    return found[0].engine if found else ""


def test_engines_are_asked_where_the_role_says_so() -> None:
    rules = {"prefill": (ONE, TWO), "local_prefill_tokens": 2 * PAGE}
    assert asked(Driver(**rules), role=Role.DECODE) == ONE
    assert asked(Driver(**rules), role=Role.BOTH) == ""
    assert asked(Driver(**rules), role=Role.BOTH, engines=(TWO,)) == TWO
    assert asked(Driver(**rules), role=Role.DECODE, engines=()) == ""
    assert asked(Driver(**rules), role=Role.DECODE, answers=False) == ""


def test_engines_that_were_found_are_asked_by_turns() -> None:
    """They take turns by request. Those that an engine was started with come before them; who has gone is not asked."""
    driver = Driver()
    driver.state.handle(ev.EnginesFound(driver.now_s, (ONE, TWO)))
    assert {asked(driver, number, role=Role.DECODE) for number in (1, 2)} == {ONE, TWO}
    driver.state.handle(ev.EnginesFound(driver.now_s, (TWO,)))
    assert [asked(driver, number, role=Role.DECODE) for number in (3, 4)] == [TWO, TWO]
    driver.state.handle(ev.EnginesFound(driver.now_s, ()))
    assert asked(driver, 5, role=Role.DECODE) == ""
    configured = Driver(prefill=(ONE,))
    configured.state.handle(ev.EnginesFound(configured.now_s, (TWO,)))
    assert [asked(configured, number, role=Role.DECODE) for number in (1, 2)] == [ONE, ONE]


def test_a_lazy_request_waits_for_frames_only_when_it_is_computed() -> None:
    driver = Driver()
    assert kinds(driver.submit(1, engines=(ONE,), lazy=True)) == ["AskPrefill"]
    assert not driver.turn()
    driver.state.handle(ev.Computed(0.0, 1, 1, 5))
    assert kinds(driver.turn()) == ["LoadPrefix"]
    assert kinds(driver.loaded(1)) == ["MoveIn", "Draw"]


def test_an_engine_that_failed_is_left_alone_for_a_while() -> None:
    driver = Driver()
    asked(driver, engines=(ONE,))
    driver.failed(1, 1)
    driver.now_s = AVOID_S - 0.1
    assert asked(driver, 2, engines=(ONE, TWO)) == TWO
    driver.now_s = AVOID_S + 0.1
    assert asked(driver, 3, engines=(ONE, TWO)) == ONE


def test_an_engine_that_does_not_fit_is_a_mistake_to_show() -> None:
    driver = Driver()
    asked(driver, engines=(ONE, TWO))
    out = driver.failed(1, 1, VersionMismatch("another layout"))
    assert not only(out, do.AskPrefill)
    assert [type(it.error) for it in only(out, do.Fail)] == [VersionMismatch]


def test_what_came_as_whole_pages_is_not_computed_again() -> None:
    for tokens, start in ((0, 0), (PAGE - 1, 0), (2 * PAGE + 3, 2 * PAGE), (4 * PAGE, 4 * PAGE - 1)):
        driver = Driver()
        asked(driver, engines=(ONE,))
        driver.state.handle(ev.Moved(0.0, 1, 1, tokens, GONE))
        (step,) = only(driver.turn(), do.Step)
        assert step.parts[0].start == start


def told(**how: Any) -> Driver:
    """An answer of two tokens that is over before its mover has reported."""
    driver = Driver(kept_max=64)
    asked(driver, tokens_max=2, engines=(ONE,), names=(b"a", b"b", b"c", b"d"), **how)
    assert kinds(driver.state.handle(ev.Computed(0.0, 1, 1, 5))) == ["Draw"]
    assert not driver.state.handle(ev.TokenDrawn(0.0, 1, ""))
    assert only(driver.turn({1: ev.Arriving(LAYERS)}), do.Step)[0].decoding == [1]
    assert kinds(driver.stepped()) == ["Forget", "Finish"], "its client does not wait for the mover"
    return driver


def test_pages_of_an_answer_are_stored_where_its_mover_reports_after_its_end() -> None:
    driver = told()
    driver.now_s = STORE_S - 0.1
    assert not driver.turn() and not driver.state.handle(ev.Cancelled(driver.now_s, 1)), "its client is gone"
    out = driver.state.handle(ev.Moved(driver.now_s, 1, 1, 4 * PAGE))
    assert kinds(out) == ["Settle", "StorePages", "GiveBack", "EndSequence"]
    assert only(out, do.StorePages) == [do.StorePages(1, 4)]
    integrity.check(driver.state)
    driver.submit(2, names=(b"a", b"b", b"c", b"d"))
    assert only(driver.turn(), do.LoadPrefix)[0].shared == 3, "the arena has them, too"


@pytest.mark.parametrize("why", ["late", "deadline", "stop"])
def test_frames_do_not_wait_for_a_mover_for_ever(why: str) -> None:
    driver = told(deadline_s=3.0 if why == "deadline" else 1e6)
    driver.now_s = {"late": STORE_S + 0.1, "deadline": 3.1, "stop": 0.1}[why]
    event = ev.Stop(driver.now_s) if why == "stop" else ev.Turn(driver.now_s)
    assert kinds(driver.state.handle(event)) == ["GiveUp"]
    out = driver.state.handle(ev.Moved(driver.now_s, 1, 1, 4 * PAGE))
    assert kinds(out) == ["GiveBack", "EndSequence"]


# --- who joins a step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "joins"),
    [
        (ev.Arriving(LAYERS, 0.0), True),  # all of it
        (ev.Arriving(0, 0.001), False),  # not even the first layer
        (ev.Arriving(1, 0.0), False),  # nobody knows how fast
        (ev.Arriving(1, 0.5), True),
        (ev.Arriving(1, 0.5, late=True), False),  # it was waited for already
        (ev.Arriving(1, 0.9), False),  # with its margin, slower than a layer is computed
        (ev.Arriving(2, 1.2), True),
    ],
)
def test_who_joins_a_step_whose_layers_take_a_second(there: ev.Arriving, joins: bool) -> None:
    assert engine_state.arrives_in_time(there, LAYERS, 1.0) is joins


def test_who_is_late_goes_aside_and_only_so_many_do() -> None:
    driver = Driver(side_max=1)
    for number in (1, 2, 3):
        driver.arriving(number)
    late, nothing, all_there = ev.Arriving(1, 0.0), ev.Arriving(0, 0.0), ev.Arriving(LAYERS, 0.0)
    assert not driver.turn({1: nothing, 2: nothing, 3: nothing})
    out = driver.turn({1: late, 2: late, 3: all_there})
    assert [it.sequence for it in only(out, do.SideStep)] == [1]
    assert [it.decoding for it in only(out, do.Step)] == [[3]]
    driver.stepped()
    assert kinds(driver.state.handle(ev.SideStepped(0.0, 1, 7))) == ["Draw"]
    driver.state.handle(ev.TokenDrawn(0.0, 1, ""))
    assert [it.sequence for it in only(driver.turn({1: nothing, 2: late, 3: nothing}), do.SideStep)] == [2]


def test_who_missed_a_step_drew_nothing() -> None:
    driver = Driver()
    driver.arriving(1)
    driver.turn({1: ev.Arriving(LAYERS)})
    driver.stepped(missed=frozenset((1,)))
    assert driver.state.roster.sequences[1].generated == 1
    driver.turn({1: ev.Arriving(LAYERS)})
    driver.stepped()
    assert driver.state.roster.sequences[1].generated == 2


def test_speeds_are_of_steps_of_one_kind_without_their_waits() -> None:
    driver = Driver(chunk_tokens=64)
    driver.submit(1)
    driver.turn()
    driver.loaded(1)
    driver.turn()
    driver.stepped(1.0)
    assert driver.state.speeds.prefill_tokens_per_s == 64.0 and driver.state.speeds.step_s == 0.0
    driver.turn()
    driver.stepped(0.5, waited_s=0.3)
    assert driver.state.speeds.step_s == pytest.approx(0.2) and driver.state.speeds.layer_s == pytest.approx(0.05)
    driver.turn()
    driver.stepped(0.4)
    assert driver.state.speeds.step_s == pytest.approx(0.2 + 0.2 * 0.2)


# --- answers that leave, prefills that are held --------------------------------------------------------------------


def test_a_drain_ends_with_the_first_answer_that_is_not_taken() -> None:
    driver = Driver()
    driver.decoding(1, 2)
    driver.state.handle(ev.Drain(0.0, TWO))
    assert [it.sequence for it in only(driver.turn(), do.PassOn)] == [1]
    driver.stepped()
    assert not only(driver.turn(), do.PassOn), "one after the other"
    driver.stepped()
    assert kinds(driver.state.handle(ev.NotTaken(0.0, 1, GONE))) == ["AnswerCall"]
    assert not only(driver.turn(), do.PassOn)


def test_an_answer_comes_back_that_is_not_taken_in_time() -> None:
    driver = Driver()
    driver.decoding(1)
    out = driver.state.handle(ev.Migrate(0.0, 1, TWO, 9))
    assert kinds(out) == ["StorePages", "PassOn"]
    driver.now_s = TAKE_S + 0.1
    out = driver.turn()
    assert kinds(out) == ["AnswerCall", "CancelThere"] and out[0].call == 9
    assert kinds(driver.turn()) == []
    assert kinds(driver.state.handle(ev.NotTaken(driver.now_s, 1))) == []
    assert [step.decoding for step in only(driver.turn(), do.Step)] == [[1]]


# --- admission ------------------------------------------------------------------------------------------------------


def test_admission_refuses_by_role_by_count_and_by_id() -> None:
    admission = Admission(Role.DECODE, 2)
    admission.check(answers=True)
    with pytest.raises(InvalidRequest, match="prefill or both"):
        admission.check(answers=False)
    admission.enter("a", 1)
    with pytest.raises(InvalidRequest, match="in use"):
        admission.enter("a", 2)
    admission.enter("b", 2)
    with pytest.raises(TooManyCalls):
        admission.enter("c", 3)
    admission.leave("a")
    admission.enter("a", 4)
    admission.draining = True
    with pytest.raises(NodeUnavailable, match="drained"):
        admission.check(answers=True)
