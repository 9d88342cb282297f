"""Grammars in the loop: drafts are pruned and forced, ends are found inside drafts, and a bad grammar hurts its own
lane only (contract rules 4, 5 and 12).
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from backends.base import Flight, Masks, MaskWords
from backends.fake import EOS, FakeFlight
from engine.config import EngineConfig
from engine.constraints import LaneGrammar, LaneWork, Working
from engine.loop import Loop
from engine.messages import Message, Submit
from scheduler.events import Tokens
from scheduler.request import FinishReason, Request, Sampling
from scheduler.round import Window
from tests.engine.grammars import Chart, ChartMatcher, literal
from tests.engine.served import Guest, Served, Terse, decode, serve

STOPS = frozenset({EOS})
TEXT = b'{"name": "x", "valid": true}'


@pytest.fixture(autouse=True, scope="module")
def _no_tracebacks() -> Iterator[None]:
    """The engine logs each failure at length."""
    logger = logging.getLogger("paceline.engine")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


def guest(name: str, chart: Chart | None = None, max_tokens: int = 40) -> Guest:
    return Guest(Request(name, tuple(name.encode()), max_tokens, Sampling(1.0, len(name)), STOPS, True, chart))


def crowd(*charts: Chart | None) -> list[Guest]:
    """One guest for each chart, between free ones."""
    guests = [guest("free one")]
    for place, chart in enumerate(charts):
        guests += [guest(f"bound {place}", chart), guest(f"free {place}")]
    return guests


def others_are_plain(run: Served, *but: str) -> bool:
    return all(
        (run.tokens(name), run.end(name).reason) == (plain.tokens, plain.reason)
        for name, each in run.guests.items()
        if name not in but
        for plain in [decode(each.request)]
    )


# ---- forced text -----------------------------------------------------------------------------------------------------


def test_forced_text_is_drafted_and_never_wrong() -> None:
    run = serve(crowd(literal(TEXT)), EngineConfig(8, 100, 8))
    assert run.tokens("bound 0") == tuple(TEXT)
    (count,) = run.end("bound 0").usage.drafts
    assert (count.source, count.accepted) == ("grammar", count.drafted)
    assert sum(count.accepted) + count.drafts >= len(TEXT) - 1
    windows = [window for forward in run.backend.forwards for window in forward.windows if window.constraint]
    assert len(windows) == -(-len(TEXT) // 9), "nine tokens a round, eight of them forced"
    assert others_are_plain(run)


def test_without_drafts_a_lane_goes_on_one_by_one() -> None:
    run = serve(crowd(literal(TEXT)), EngineConfig(8, 100, 0))
    assert run.tokens("bound 0") == tuple(TEXT)
    assert run.end("bound 0").usage.drafts == ()


def test_the_grammar_is_asked_before_all_other_sources() -> None:
    run = serve(crowd(literal(TEXT)), EngineConfig(8, 100, 4), "overeager")
    assert {count.source for count in run.end("bound 0").usage.drafts} == {"grammar"}
    assert {count.source for count in run.end("free one").usage.drafts} == {"overeager"}


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sources", ["", "prophet", "overeager"])
@pytest.mark.parametrize("draft_tokens", [0, 1, 3, 30])
def test_rule_4_a_matcher_that_ends_inside_a_draft(draft_tokens: int, sources: str) -> None:
    """The text ends after 28 bytes, wherever in a window that falls, and nothing is drawn behind it."""
    run = serve(crowd(literal(TEXT)), EngineConfig(8, 300, draft_tokens), sources)
    assert (run.tokens("bound 0"), run.end("bound 0").reason) == (tuple(TEXT), FinishReason.STOP)
    assert run.end("bound 0").usage.completion_tokens == len(TEXT)
    assert others_are_plain(run)
    for forward in run.backend.forwards:
        for window in forward.windows:
            assert window.request_id != "bound 0" or window.end <= len(b"bound 0") + len(TEXT)


def test_log_probabilities_end_with_the_text() -> None:
    """Eight forced tokens and a bonus a round: in the last one the bonus lies behind the end."""
    chart = literal(TEXT[:17])
    request = Request("bound", (1, 2), 40, Sampling(0.0, logprobs=2), STOPS, constraint=chart)
    run = serve([Guest(request)], EngineConfig(8, 100))
    plain = decode(request)
    assert len(plain.logprobs) == 17
    assert (run.tokens("bound"), run.logprobs("bound")) == (plain.tokens, plain.logprobs)
    sampled = [window for forward in run.backend.forwards for window in forward.windows if window.samples]
    assert [len(window.draft) for window in sampled] == [8, 8]


def test_rule_12_the_end_of_the_grammar_outranks_length() -> None:
    run = serve([guest("bound", literal(TEXT), len(TEXT)), guest("short", literal(TEXT), 5)], EngineConfig(8, 100))
    assert run.end("bound").reason is FinishReason.STOP
    assert (run.tokens("short"), run.end("short").reason) == (tuple(TEXT[:5]), FinishReason.LENGTH)


def test_a_text_that_may_end_or_go_on_ends_with_an_eos_that_is_not_delivered() -> None:
    """Digits for ever; `ignore_eos` means nothing to a constrained request."""
    digits = Chart((dict.fromkeys(b"0123456789", 0),), frozenset({0}))
    run = serve(
        [Guest(Request(f"r{seed}", (1, 2), 300, Sampling(2.5, seed), STOPS, True, digits, "")) for seed in range(6)],
        EngineConfig(8, 100),
    )
    for name in run.guests:
        assert run.end(name).reason is FinishReason.STOP
        assert run.end(name).usage.completion_tokens == len(run.tokens(name)) + 1
        assert set(run.tokens(name)) <= set(b"0123456789")
    assert others_are_plain(run)


# ---- grammars that fail ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad(Chart):
    """Literal text, but the third time that its matcher is asked for a mask, something is wrong."""

    fault: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def matcher(self) -> ChartMatcher:
        return BadMatcher(self, self.fault, self.released)


class BadMatcher(ChartMatcher):
    def __init__(self, chart: Chart, fault: str, released: threading.Event) -> None:
        super().__init__(chart)
        self._fault = fault
        self._released = released
        self._fills = 0

    def fill(self, words: MaskWords) -> None:
        self._fills += 1
        super().fill(words)
        if self._fills < 3:
            return
        if self._fault == "raises":
            raise ArithmeticError("boom")
        if self._fault == "hangs":
            self._released.wait(60)
        if self._fault == "allows nothing":
            words[:] = 0
        if self._fault == "allows what it refuses":
            words[:] = 0
            words[0] = 1


def bad(fault: str) -> Bad:
    chart = literal(TEXT)
    return Bad(chart.steps, chart.ends, fault)


@pytest.mark.parametrize("draft_tokens", [0, 4])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "the grammar failed"),
        ("hangs", "the grammar took more than 0.2 s for one round"),
        ("allows nothing", "the grammar allows no token here"),
        ("allows what it refuses", "the grammar does not allow the token that was drawn"),
    ],
)
def test_a_bad_grammar_ends_its_lane_and_no_other(fault: str, message: str, draft_tokens: int) -> None:
    chart = bad(fault)
    config = EngineConfig(8, 100, draft_tokens, fill_seconds=0.2)
    run = serve(crowd(literal(TEXT), chart, literal(TEXT)), config, "prophet" if draft_tokens else "")
    chart.released.set()
    end = run.end("bound 1")
    assert (end.reason, end.error) == (FinishReason.ERROR, message)
    assert tuple(TEXT)[: len(run.tokens("bound 1"))] == run.tokens("bound 1")
    assert others_are_plain(run, "bound 1")
    assert sorted(run.backend.released) == sorted(run.guests)


def test_two_grammars_that_hang_in_one_round_both_end_and_the_third_goes_on() -> None:
    charts = [bad("hangs"), literal(TEXT), bad("hangs")]
    run = serve(crowd(*charts), EngineConfig(8, 100, 0, fill_seconds=0.2))
    for chart in charts:
        if isinstance(chart, Bad):
            chart.released.set()
    assert [run.end(f"bound {place}").reason for place in range(3)] == [
        FinishReason.ERROR,
        FinishReason.STOP,
        FinishReason.ERROR,
    ]
    assert others_are_plain(run, "bound 0", "bound 2")


def test_a_thread_that_comes_back_from_a_grammar_touches_no_other_lane() -> None:
    released = threading.Event()
    asked: list[str] = []
    lanes = [LaneGrammar(literal(TEXT)), LaneGrammar(literal(TEXT))]
    works = [LaneWork(lanes[0], lambda: released.wait(60) and None), LaneWork(lanes[1], lambda: asked.append("once"))]
    before = set(threading.enumerate())
    Working(works, 0.1).wait()
    assert (lanes[0].failure is None, lanes[1].failure is None) == (False, True)
    released.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert asked == ["once"]


@pytest.mark.parametrize("where", ["accept", "rollback", "fill", "forced", "finished"])
@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_whatever_is_asked_of_a_grammar_costs_its_own_lane_at_most(where: str, fault: str) -> None:
    """Each of its answers once takes for ever, or raises, in the middle of the text."""
    released = threading.Event()

    class Faulty(ChartMatcher):
        calls = 0

        def answer(self, name: str) -> None:
            Faulty.calls += name == where
            if name == where and Faulty.calls > 3:
                if fault == "raises":
                    raise ArithmeticError("boom")
                released.wait(60)

        def accept(self, token: int) -> bool:
            self.answer("accept")
            return super().accept(token)

        def rollback(self, count: int) -> None:
            self.answer("rollback")
            super().rollback(count)

        def fill(self, words: MaskWords) -> None:
            self.answer("fill")
            super().fill(words)

        def forced(self, limit: int) -> tuple[int, ...]:
            self.answer("forced")
            return super().forced(min(limit, 2))

        @property
        def finished(self) -> bool:
            self.answer("finished")
            return super().finished

    class FaultyChart(Chart):
        def matcher(self) -> ChartMatcher:
            return Faulty(self)

    text = literal(TEXT)
    run = serve(crowd(literal(TEXT), FaultyChart(text.steps, text.ends)), EngineConfig(8, 100, fill_seconds=0.2))
    released.set()
    assert run.end("bound 1").reason is FinishReason.ERROR
    assert others_are_plain(run, "bound 1")


def test_a_grammar_whose_matcher_cannot_be_made_ends_its_lane() -> None:
    class Unmade(Chart):
        def matcher(self) -> ChartMatcher:
            raise ArithmeticError("boom")

    text = literal(TEXT)
    run = serve(crowd(Unmade(text.steps, text.ends), literal(TEXT)), EngineConfig(8, 100))
    assert (run.end("bound 0").reason, run.end("bound 0").error) == (FinishReason.ERROR, "the grammar failed")
    assert others_are_plain(run, "bound 0")


def test_a_matcher_is_not_asked_anything_while_it_fills_masks_of_a_round_that_failed() -> None:
    """Its forward could not even be started, so that nobody waits for its masks."""
    failed, asked = threading.Event(), threading.Event()
    overlaps: list[bool] = []

    class Lingering(ChartMatcher):
        def fill(self, words: MaskWords) -> None:
            if not overlaps:
                failed.wait(20)
                overlaps.append(asked.wait(0.3))
            super().fill(words)

        def forced(self, limit: int) -> tuple[int, ...]:
            if failed.is_set():
                asked.set()
            return super().forced(limit)

    class LingeringChart(Chart):
        def matcher(self) -> ChartMatcher:
            return Lingering(self)

    class Failing(Terse):
        def verify(
            self, windows: Sequence[Window], after: Flight | None = None, masks: Masks | None = None
        ) -> FakeFlight:
            if windows[0].constraint is not None and not failed.is_set():
                failed.set()
                raise MemoryError
            return super().verify(windows, after, masks)

    text = literal(TEXT)
    mail: list[Message] = [Submit(guest("bound", LingeringChart(text.steps, text.ends)).request)]
    loop = Loop(
        Failing(),
        EngineConfig(2, 40, 4, paced=False),
        sources=(),
        mailbox=lambda: [mail.pop() for _ in range(len(mail))],
        clock=lambda: 0.0,
    )
    told: list[int] = []
    while mail or not loop.idle:
        told += [token for event in loop.step() if isinstance(event, Tokens) for token in event.tokens]
    assert overlaps == [False]
    assert tuple(told) == tuple(TEXT)
