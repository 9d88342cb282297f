"""What the chaos bench makes of answers, and one short chaos with a real process."""

import asyncio
import json
import random
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from backends.fault_plan import Plan, kind_of, read_plan
from deploy.bench.__main__ import app
from deploy.bench.chaos import Tally, bounds_of, manner, plan, pool
from deploy.bench.chaos_client import WRONG, Answer, Fate, Manner, Said, answer_of, ask, fate
from deploy.bench.servers import free_port
from deploy.bench.wire import Arrival
from tests.deploy.streams import DONE, HEAD, event, speaking, usage

ALONE = Answer((Said("a", 3.0), Said("b", 0.0005), Said("c", 2.0)), "length", None, 1)


def token(text: str, lead: float = 1.0, reason: str | None = None) -> bytes:
    tops = [{"token": text, "logprob": -0.5}, {"token": "z", "logprob": -0.5 - lead}]
    logged = {"content": [{"token": text, "logprob": -0.5, "top_logprobs": tops}]}
    return event({"choices": [{"index": 0, "delta": {"content": text}, "logprobs": logged, "finish_reason": reason}]})


def end(reason: str = "length") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def error(message: str) -> bytes:
    return event({"error": {"message": message, "type": "server_error"}})


def heard(*frames: bytes, head: bytes = HEAD) -> Answer:
    return answer_of([Arrival(0.0, each) for each in (head, *frames)])


# ---- what was heard --------------------------------------------------------------------------------------------------


def test_a_whole_answer() -> None:
    answer = heard(token("a", 3.0), token("b", 0.25), end(), usage(2), DONE)
    assert answer == Answer((Said("a", 3.0), Said("b", 0.25)), "length", None, 1)


@pytest.mark.parametrize(
    ("frames", "ends", "late"),
    [
        ((token("a"),), 0, 0),
        ((token("a"), error("boom")), 1, 0),
        ((token("a"), end(), error("boom")), 2, 0),
        ((token("a"), end(), end("stop"), DONE), 2, 0),
        ((error("boom"), token("a"), token("b")), 1, 2),
        ((token("a"), DONE), 0, 0),
    ],
)
def test_ends_are_counted_and_what_comes_behind_them(frames: tuple[bytes, ...], ends: int, late: int) -> None:
    answer = heard(*frames)
    assert (answer.ends, answer.late) == (ends, late)


def test_a_refusal_is_an_end() -> None:
    answer = heard(b'{"error": "busy"}', head=b"HTTP/1.1 503 Busy\r\nContent-Length: 17\r\n\r\n")
    assert answer.ends == 1
    assert answer.error is not None
    assert answer.error.startswith("HTTP 503")


def test_what_cannot_be_understood_is_no_end() -> None:
    assert heard(b"data: {\n\n").ends == 0
    assert heard(head=b"\x00\r\n\r\n").ends == 0
    assert answer_of([]).ends == 0


# ---- what became of it -----------------------------------------------------------------------------------------------


def said(*tokens: str) -> tuple[Said, ...]:
    return tuple(Said(each, 1.0) for each in tokens)


@pytest.mark.parametrize(
    ("answer", "killed", "expected"),
    [
        (Answer(said("a", "b", "c"), "length", None, 1), False, Fate.SAME),
        (Answer(said("a", "b", "c"), "length", None, 1), True, Fate.SAME),
        (Answer(said("a", "x", "y", "z"), "length", None, 1), False, Fate.NEAR_TIE),
        (Answer(said("a", "b", "x"), "length", None, 1), False, Fate.OTHER_TEXT),
        (Answer(said("x", "b", "c"), "length", None, 1), False, Fate.OTHER_TEXT),
        (Answer(said("a", "b"), "length", None, 1), False, Fate.OTHER_TEXT),
        (Answer(said("a", "b", "c"), "stop", None, 1), False, Fate.OTHER_TEXT),
        (Answer(said("a", "b", "c", "d"), "length", None, 1), False, Fate.OTHER_TEXT),
        (Answer(said("a"), None, "boom", 1), False, Fate.ERROR),
        (Answer(said("x"), None, "boom", 1), False, Fate.OTHER_TEXT),
        (Answer(said("a", "b", "x"), left=True), False, Fate.OTHER_TEXT),
        (Answer(said("a"), left=True), False, Fate.LEFT),
        (Answer(said("a")), True, Fate.KILLED),
        (Answer(said("a")), False, Fate.NO_END),
        (Answer(said("a"), timed_out=True), False, Fate.TIMED_OUT),
        (Answer(said("a", "b", "c"), "length", "boom", 2), True, Fate.SEVERAL_ENDS),
        (Answer(said("a", "b", "c"), "length", None, 1, late=1), False, Fate.SEVERAL_ENDS),
    ],
)
def test_what_became_of_a_request(answer: Answer, killed: bool, expected: Fate) -> None:
    assert fate(answer, ALONE, killed=killed) is expected


@given(
    tokens=st.lists(st.sampled_from("ab"), max_size=6), count=st.integers(0, 6), reason=st.sampled_from(["", "stop"])
)
def test_a_beginning_is_never_another_text_and_a_whole_is_only_the_same(
    tokens: list[str], count: int, reason: str
) -> None:
    alone = Answer(said(*tokens), "stop", None, 1)
    cut = Answer(said(*tokens[:count]), reason or None, None, int(bool(reason)), left=not reason)
    whole = count >= len(tokens)
    expected = (Fate.SAME if whole else Fate.OTHER_TEXT) if reason else Fate.LEFT
    assert fate(cut, alone, killed=False) is expected


def test_every_fault_of_the_server_misses_a_bound() -> None:
    good = Tally(fates=Counter({Fate.SAME: 5, Fate.ERROR: 2}), injected=Counter({"nan": 9}), kills=1, starts=[1.5])
    assert good.faults == 10
    assert all(bound.holds for bound in bounds_of(good, 10, 8, 1.0))
    bad = [Tally(good.fates + Counter({each: 1}), injected=good.injected, kills=1, starts=[1.5]) for each in WRONG]
    bad.append(Tally(good.fates, injected=good.injected, kills=1, starts=[1.5], own_ends=1))
    bad.append(Tally(good.fates, injected=good.injected, kills=1, starts=[0.5, 2.5, 0.5]))
    bad.append(Tally(good.fates, injected=good.injected, starts=[1.5]))
    bad.append(Tally(Counter({Fate.ERROR: 3}), injected=good.injected, kills=1, starts=[1.5]))
    for tally in bad:
        assert sum(not bound.holds for bound in bounds_of(tally, 10, 8, 1.0)) == 1


# ---- clients and plans -----------------------------------------------------------------------------------------------


async def heard_by(how: Manner) -> Answer:
    """A server that says one token, and goes on only if its client stays."""

    async def script(_number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token("a"))
        if how.reads is not None:
            await asyncio.Event().wait()
        writer.write(token("b") + end())

    async with speaking(script) as speaker:
        request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        return await ask(speaker.target.host, speaker.target.port, request, how, 20.0)


def test_a_client_stays() -> None:
    assert asyncio.run(heard_by(Manner())) == Answer((Said("a", 1.0), Said("b", 1.0)), "length", None, 1)


@pytest.mark.parametrize("abrupt", [False, True])
def test_a_client_leaves_in_the_middle(abrupt: bool) -> None:
    assert asyncio.run(heard_by(Manner(1, abrupt=abrupt))) == Answer((Said("a", 1.0),), left=True)


@pytest.mark.parametrize("abrupt", [False, True])
def test_a_client_leaves_before_it_heard_anything(abrupt: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        answer = asyncio.run(ask("127.0.0.1", deaf.getsockname()[1], b"", Manner(0, abrupt=abrupt), 20.0))
    assert answer == Answer(left=True)


def test_a_client_does_not_wait_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        answer = asyncio.run(ask("127.0.0.1", deaf.getsockname()[1], b"", Manner(), 0.1))
    assert answer == Answer(timed_out=True)


def test_nobody_there_is_no_end() -> None:
    assert asyncio.run(ask("127.0.0.1", free_port(), b"", Manner(), 20.0)) == Answer()


def test_most_clients_stay() -> None:
    manners = [manner(random.Random(number)) for number in range(1000)]
    stay = sum(each.reads is None for each in manners)
    assert 600 < stay < 800
    assert {each.reads for each in manners} == {None, *range(12)}


def test_plans_can_be_read_and_have_their_rate(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(plan(3, 0.2)))
    told: Plan = read_plan(path)
    assert told.seed == 3
    rounds = [fault for fault in told.faults if not kind_of(fault).startswith("ssd")]
    assert sum(fault.probability for fault in rounds) == pytest.approx(0.2)
    assert {kind_of(fault) for fault in told.faults} >= {"raise", "nan", "keep", "ssd_read", "ssd_write"}


def test_prompts_come_with_what_tells_near_ties() -> None:
    prompts = pool(30, 7, 0.5)
    assert len({prompt.text for prompt in prompts}) == 30
    assert {prompt.fields["seed"] for prompt in prompts} == set(range(30))
    for prompt in prompts:
        assert prompt.fields["top_logprobs"] == 2
        assert (prompt.fields["max_tokens"], prompt.fields["temperature"]) == (7, 0.5)


# ---- with a real process ---------------------------------------------------------------------------------------------

PROGRAM = "from api.cli import main; main()"
LIAR = """
import backends.fake
from scheduler.events import TokenLogprob
from scheduler.round import Drawn

def drawn(tokens, logprobs=(), error=None):
    lie = Drawn((101,) * len(tokens), (TokenLogprob(-1.0, ()),) * len(tokens))
    return Drawn(tokens, logprobs) if error is None else lie

backends.fake.Drawn = drawn
"""


@pytest.mark.slow
@pytest.mark.parametrize("lies", [False, True])
def test_a_short_chaos(tmp_path: Path, lies: bool) -> None:
    """With a server that delivers what it drew of NaN, it is seen."""
    program = tmp_path / "paceline"
    root = Path(__file__).parents[2]
    program.write_text(
        f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(root)!r})\n{LIAR if lies else ''}\n{PROGRAM}\n"
    )
    program.chmod(0o755)
    faults = 30 if lies else 12  # enough for a NaN that is heard
    words = ["--backend", "fake", "--faults", faults, "--rate", 0.08, "--requests", 20, "--prompts", 4, "--json"]
    flags = [str(word) for word in (*words, "--max-tokens", 20, "--paceline", program, "--arg=--draft-tokens=0")]
    done = CliRunner().invoke(app, ["chaos", *flags])
    facts: dict[str, Any] = json.loads(done.stdout)
    missed = {bound["claim"] for bound in facts["bounds"] if bound["measured"]["median"] > 0 and bound["bound"] == 0}
    assert missed == ({f"requests: {Fate.OTHER_TEXT}"} if lies else set())
    assert done.exit_code == 1 or not lies
    assert facts["injected"]["kill -9"] >= 1
    assert sum(facts["injected"].values()) >= faults
    assert facts["fates"][Fate.SAME] > 0
