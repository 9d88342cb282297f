"""What the prefix cache is held against: what could be reused, to the token; and that too much is a fault."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from backends.fake import FakeBackend
from deploy.bench.__main__ import app
from deploy.bench.client import Endpoint, Load, Record
from deploy.bench.everything import IN_PAIRS
from deploy.bench.prefix import CASES, GOALS, PROMPT, Outcome, unlike
from deploy.bench.prefix_asking import Answer, ask, random_tokens, token_prompt
from deploy.bench.prefix_inside import INDEXED, RESTORED, copy_times, index_times, insert
from deploy.bench.prefix_traffic import (
    ANSWER,
    CLIENTS,
    MESSAGE,
    SYSTEM,
    TURNS,
    Asked,
    Script,
    account,
    play,
    reusable,
    shared,
    spared_too_much,
    tokenizer_of,
    told_of,
)
from deploy.bench.report import Spread
from deploy.bench.servers import ServerError
from scheduler.pieces import BLOCK_TOKENS, root_of
from scheduler.prefix import PrefixIndex
from tests.deploy.streams import DONE, HEAD, Speaker, delta, event, speaking

T = TypeVar("T")

LOAD = Load(1, 4, Endpoint.COMPLETIONS, timeout_s=20.0)
RECORD = Record("p", 0.0, 3.0, 1.0, 2.0, (), 4, 1000, 4, 0.25, "text", "length", None)


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def turn(
    prompt: Sequence[int],
    answer: Sequence[int] = (),
    *,
    sent: float = 0.0,
    first: float | None = None,
    ended: float | None = None,
    reused: int = 0,
) -> Asked:
    """It gets its first token a second after it was sent, and is over in another one."""
    first_at = sent + 1 if first is None else first
    ended_at = first_at + 1 if ended is None else ended
    return Asked(0, 0, tuple(prompt), tuple(answer), len(answer), sent, first_at, ended_at, reused)


# ---- what could be reused --------------------------------------------------------------------------------------------


def test_what_could_be_reused_is_common_with_what_was_committed_but_for_a_block_and_the_last_token() -> None:
    early = turn(range(500), range(500, 600), sent=0)
    longer = turn((*range(600), 7, 8, 9), sent=5)
    parted = turn((*range(300), 7, 8, 9), sent=5)
    again = turn(range(500), sent=5)
    short = turn(range(70), sent=5)
    assert reusable(longer, [early, longer]) == 600 - BLOCK_TOKENS
    assert reusable(parted, [early, parted]) == 300 - BLOCK_TOKENS
    assert reusable(again, [early, again]) == 499 - BLOCK_TOKENS
    assert reusable(short, [early, short]) == 69 - BLOCK_TOKENS
    assert reusable(turn(range(20), sent=5), [early]) == 0
    assert reusable(turn(range(7, 500), sent=5), [early]) == 0
    assert reusable(longer, []) == 0


def test_of_a_request_that_is_being_answered_only_the_prompt_is_committed_and_before_its_first_token_nothing() -> None:
    early = turn(range(500), range(500, 600), sent=0, first=2, ended=8)
    could = [reusable(turn(range(600), sent=at), [early]) for at in (1.9, 2.0, 7.9, 8.0)]
    assert could == [0, 500 - BLOCK_TOKENS, 500 - BLOCK_TOKENS, 599 - BLOCK_TOKENS]


def test_the_longest_of_all_committed_texts_counts() -> None:
    texts = [turn(range(length)) for length in (100, 400, 200)]
    assert reusable(turn(range(1000), sent=9), texts) == 400 - BLOCK_TOKENS


tokens = st.lists(st.integers(0, 1), max_size=8)


@given(tokens, tokens)
def test_what_two_texts_share_is_their_longest_common_beginning(left: list[int], right: list[int]) -> None:
    assert shared(left, right) == max(n for n in range(9) if left[:n] == right[:n] and n <= min(len(left), len(right)))


def test_an_account_adds_up_and_no_surplus_makes_up_for_a_miss() -> None:
    first = turn(range(1000), reused=0)
    good = turn((*range(800), *[7] * 200), sent=5, reused=800)
    missed = turn((*range(900), *[8] * 100), sent=5, reused=100)
    told = account([first, good, missed])
    assert (told.prompt, told.reused) == (3000, 900)
    assert told.reusable == 800 - BLOCK_TOKENS + 900 - BLOCK_TOKENS
    assert told.fulfilled == 800 - BLOCK_TOKENS + 100
    assert told.share == told.fulfilled / told.reusable < GOALS["traffic"].bound < told.reused / 900


def test_to_be_spared_more_than_anybody_had_sent_is_a_fault() -> None:
    known = turn(range(500), range(500, 550), sent=0, ended=100)
    beside = turn(range(520), sent=0.5, reused=519)
    beyond = turn((*range(500), 7, 7, 7, 7), sent=0.5, reused=501)
    before = turn(range(500), sent=0, first=0.4, reused=10)
    assert spared_too_much([known, beside, replace(beyond, reused=500)]) == []
    assert spared_too_much([known, beside, beyond]) == [beyond]
    assert spared_too_much([replace(known, sent_at=0.4), before]) == [before]
    assert spared_too_much([replace(beside, sent_at=0)]) != [], "itself is nobody"


def test_people_are_told_of_first_and_later_turns_apart() -> None:
    first = turn(range(1000), range(48))
    later = replace(turn(range(1000), sent=5, first=5.25, reused=999), turn=1, drawn=48)
    lines = list(told_of([[first, later]]))
    assert "0.499 of 2000 prompt tokens" in lines[0]
    assert f"{BLOCK_TOKENS} of those" in lines[0]
    assert "first turns' time to first token p50 1000 ms" in lines[1]
    assert "later turns' time to first token p50 250 ms" in lines[2]
    assert "1 of 2 answers" in lines[3]


# ---- what agents say -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte, and two special ones."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<start>", "<end>"])
    return made


def test_all_agents_begin_alike_and_say_different_things(tokenizer: Tokenizer) -> None:
    script, other = Script(tokenizer, "0 of 2"), Script(tokenizer, "1 of 2")
    assert len(script.system()) == SYSTEM
    assert script.system() == Script(tokenizer, "0 of 2").system()
    assert shared(script.system(), other.system()) == 0
    messages = [tuple(script.message(client, turn)) for client in range(CLIENTS) for turn in range(TURNS)]
    assert all(message.endswith("\n\nAssistant:") for message in map(tokenizer.decode, messages))
    words = {message[len("\n\nUser 0-0: ") : -len("\n\nAssistant:")] for message in messages}
    assert len(words) == CLIENTS * TURNS
    assert {len(each) for each in words} == {MESSAGE}
    assert [tokenizer.id_to_token(token) for token in script.special] == ["<start>", "<end>"]


def reply(text: str, *, cached: int | None, tokens: int = 4) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    usage = {"completion_tokens": tokens, "prompt_tokens": 9, **details}
    pieces = b"".join(delta(letter) for letter in text)
    return HEAD + pieces + delta("", "length") + event({"choices": [], "usage": usage}) + DONE


def test_every_turn_is_all_that_was_said_before_and_a_new_message(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, "0 of 1")
    all_are_here = asyncio.Barrier(CLIENTS)

    async def answering(number: int, writer: asyncio.StreamWriter) -> None:
        if number < CLIENTS:
            await all_are_here.wait()
        writer.write(reply(f"answer {number}", cached=number))

    async def both() -> tuple[list[Asked], Speaker]:
        async with speaking(answering) as speaker:
            return await play(speaker.target, script, LOAD), speaker

    asked, speaker = run_on_uvloop(both())
    assert [(each.client, each.turn) for each in asked] == [(c, t) for c in range(CLIENTS) for t in range(TURNS)]
    assert speaker.most == CLIENTS, "all began at the same time"
    bodies = [msgspec.json.decode(body) for _, _, body in speaker.requests]
    assert sorted(body["prompt"] for body in bodies) == sorted(list(each.prompt) for each in asked)
    assert {body["max_tokens"] for body in bodies} == {ANSWER}
    assert all(body["logit_bias"] == {str(token): -100 for token in script.special} for body in bodies)
    for each in asked:
        number = [body["prompt"] for body in bodies].index(list(each.prompt))
        assert (tokenizer.decode(list(each.answer)), each.reused, each.drawn) == (f"answer {number}", number, 4)
        said = asked[asked.index(each) - 1] if each.turn else None
        before = [*said.prompt, *said.answer] if said else script.system()
        assert list(each.prompt) == [*before, *script.message(each.client, each.turn)]
        assert each.sent_at < each.first_at <= each.ended_at
        assert said is None or said.ended_at <= each.sent_at


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"has no tokenizer\.json"):
        tokenizer_of(tmp_path)


# ---- asking ----------------------------------------------------------------------------------------------------------


def ask_one(*parts: bytes, load: Load = LOAD, hang: float = 0.0) -> tuple[Answer, dict[str, Any]]:
    async def saying(number: int, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
        await asyncio.sleep(hang)

    async def both() -> tuple[Answer, dict[str, Any]]:
        async with speaking(saying) as speaker:
            answer = await ask(speaker.target, token_prompt("p", (5, 6, 7), seed=3), load)
            line, _, body = speaker.requests[0]
            assert line == "POST /v1/completions HTTP/1.1"
            return answer, msgspec.json.decode(body)

    return run_on_uvloop(both())


@pytest.mark.parametrize(("cached", "expected"), [(999, 999), (0, 0), (None, 0)])
def test_tokens_are_sent_and_what_was_cached_is_read(cached: int | None, expected: int) -> None:
    answer, body = ask_one(reply("text", cached=cached))
    assert (answer.cached, answer.record.text, answer.record.tokens) == (expected, "text", 4)
    assert (body["prompt"], body["seed"], body["temperature"], body["stream"]) == ([5, 6, 7], 3, 0, True)
    assert answer.ttft_s == answer.record.ttft_s
    assert answer.record.started_at < answer.first_at <= answer.record.ended_at


def test_an_answer_without_text_is_there_at_its_end() -> None:
    answer, _ = ask_one(reply("", cached=1))
    assert answer.first_at == answer.record.ended_at
    assert answer.ttft_s > 0


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ((b"HTTP/1.1 400 Bad\r\nContent-Length: 5\r\n\r\nwrong",), "p: HTTP 400: wrong"),
        ((HEAD, delta("a")), "without a finish reason"),
        ((b"nonsense\r\n\r\n",), "not understood"),
    ],
)
def test_a_request_that_fails_is_an_error(parts: tuple[bytes, ...], complaint: str) -> None:
    with pytest.raises(ServerError, match=complaint):
        ask_one(*parts)


def test_a_request_is_given_up_after_its_timeout() -> None:
    with pytest.raises(ServerError, match=r"timed out after 0\.2 s"):
        ask_one(HEAD, delta("a"), load=replace(LOAD, timeout_s=0.2), hang=30.0)


def test_random_prompts_are_of_ordinary_tokens_and_begin_differently() -> None:
    prompts = [random_tokens(PROMPT, seed) for seed in range(20)]
    assert all(len(prompt) == PROMPT and min(prompt) >= 1_000 and max(prompt) <= 40_000 for prompt in prompts)
    assert len({prompt[:2] for prompt in prompts}) == 20
    assert random_tokens(PROMPT, 3) == prompts[3]


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_every_bound() -> None:
    told = {name: (goal.clients, goal.bound, goal.at_most) for name, goal in GOALS.items()}
    assert told == {
        "repeat": (1, 0.04, True),
        "restart": (1, 0.08, True),
        "traffic": (8, 0.90, False),
        "spill": (8, 0.95, False),
        "match": (1, 1.0, True),
        "insert": (1, 1.0, True),
        "copy": (4, 5.0, True),
    }
    assert list(CASES) == ["repeat", "restart", "traffic", "spill", "index", "copy"]
    for goal in GOALS.values():
        better, worse = (goal.bound * factor for factor in ((0.9, 1.1) if goal.at_most else (1.1, 0.9)))
        assert goal.held_against(Spread(better, worse, worse)).holds
        assert not goal.held_against(Spread(worse, better, better)).holds


def test_a_case_is_good_if_its_bounds_hold_and_nothing_was_wrong() -> None:
    good, bad = (GOALS["copy"].held_against(Spread(median, 1.0, 99.0)) for median in (5.0, 5.1))
    assert Outcome((good, good), ("a note",)).good
    assert not Outcome((good, bad)).good
    assert not Outcome((good,), faults=("another text",)).good


def test_another_answer_and_another_count_of_cached_tokens_are_faults() -> None:
    cold, warm = Answer(RECORD, 0), Answer(RECORD, PROMPT - 1)
    assert list(unlike("repeat", [cold], [warm])) == []
    other = replace(warm, record=replace(RECORD, text="other"))
    assert list(unlike("repeat", [cold, cold], [warm, other])) == ["repeat, pair 2: 'other' in place of 'text'"]
    short, early = replace(warm, cached=960), replace(cold, cached=64)
    assert list(unlike("repeat", [early], [short])) == [
        "repeat, pair 1: 64 tokens cached in place of 0",
        "repeat, pair 1: 960 tokens cached in place of 999",
    ]


def test_it_belongs_to_all_benchmarks() -> None:
    assert "prefix" in IN_PAIRS


def test_there_is_no_other_case(tmp_path: Path) -> None:
    done = bench("prefix", tmp_path, "--only", "copying")
    assert done.exit_code == 2
    assert "there is no case 'copying'" in done.stderr


@pytest.mark.parametrize("case", ["repeat", "restart", "traffic", "spill"])
def test_a_daemon_that_does_not_start_ends_the_bench_with_exit_code_2(
    tmp_path: Path, tokenizer: Tokenizer, case: str
) -> None:
    program = tmp_path / "paceline"
    program.write_text("#!/bin/sh\necho cannot load the model\nexit 3\n")
    program.chmod(0o755)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    done = bench("prefix", tmp_path, "--paceline", program, "--only", case)
    assert done.exit_code == 2
    assert "cannot load the model" in done.stderr


# ---- in process ------------------------------------------------------------------------------------------------------


def test_the_index_is_told_every_block() -> None:
    index, root = PrefixIndex(INDEXED), root_of("bench")
    text = random_tokens(INDEXED, 1)
    insert(index, root, text)
    assert [piece.end for piece in index.match(root, text).pieces] == list(range(64, INDEXED + 1, 64))
    assert index.match(root, (*text[:200], 1)).length == 192


@pytest.mark.parametrize("kept", [1, 3])
def test_every_text_is_timed_once_also_where_there_is_no_room_for_all(kept: int) -> None:
    times = index_times(3, kept=kept)
    assert len(times.matches) == len(times.inserts) == 3
    assert min(*times.matches, *times.inserts) > 0


def test_the_index_case_reports_what_it_measured(tmp_path: Path) -> None:
    done = bench("prefix", tmp_path, "--only", "index", "--json")
    facts = json.loads(done.stdout)
    assert [bound["claim"].partition(":")[0] for bound in facts["bounds"]] == ["index", "index"]
    holds = all(bound["measured"]["median"] <= bound["bound"] == 1.0 for bound in facts["bounds"])
    assert done.exit_code == (0 if holds else 1)
    assert facts["faults"] == []


def test_every_copy_beside_lanes_that_decode_is_timed() -> None:
    copied = copy_times(FakeBackend(), 2)
    assert copied.spared == [RESTORED - 1] * 2
    assert len(copied.seconds) == len(copied.sizes) >= 2
    assert sum(copied.sizes) == 2 * (RESTORED - 1) * 12, "a token and a state each, of the fake"
    assert len(copied.waits) == 2
    assert min(*copied.seconds, *copied.waits) > 0
