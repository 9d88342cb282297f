"""Settings, choices and logprobs over real sockets, in both dialects, whole and streamed."""

import json
import math
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from tests.api.servers import running

WARM = {"temperature": 1.2, "seed": 11, "max_tokens": 24, "ignore_eos": True}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], **fields}
    return {"prompt": f"{text}assistant: ", **fields}


def whole(client: httpx2.Client, path: str, text: str, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json=body_of(path, text, **fields))
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def streamed(client: httpx2.Client, path: str, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = body_of(path, text, stream=True, stream_options={"include_usage": True}, **fields)
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def said(choice: dict[str, Any]) -> str:
    """The text of a choice, whole or in a chunk."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content") or "")


def texts(reply: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(reply["choices"])))
    return [said(choice) for choice in reply["choices"]]


# ---- choices


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_choices_differ_and_the_first_is_what_comes_alone(client: httpx2.Client, path: str) -> None:
    alone = texts(whole(client, path, "talk", **WARM))
    four = texts(whole(client, path, "talk", n=4, **WARM))
    sixteen = texts(whole(client, path, "talk", n=16, **WARM))
    assert (four[:1], sixteen[:4]) == (alone, four)
    assert len(set(sixteen)) == 16


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_choices_stream_by_their_index_and_count_their_prompt_once(client: httpx2.Client, path: str) -> None:
    reply = whole(client, path, "talk", n=3, **WARM)
    chunks = streamed(client, path, "talk", n=3, **WARM)
    joined = ["", "", ""]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        joined[choice["index"]] += said(choice)
    assert joined == texts(reply)
    alone = whole(client, path, "talk", **WARM)["usage"]
    for usage in (reply["usage"], chunks[-1]["usage"]):
        assert usage["prompt_tokens"] == alone["prompt_tokens"]
        assert usage["completion_tokens"] == 3 * 24
        assert usage["total_tokens"] == alone["prompt_tokens"] + 3 * 24


def test_choice_c_of_prompt_p_is_number_p_times_n_plus_c(client: httpx2.Client) -> None:
    prompts = ["talk", "walk", "[[said]]assistant: "]
    reply = whole(client, TEXT, "", n=2, **{**WARM, "prompt": prompts})
    alone = [whole(client, TEXT, "", n=2, **{**WARM, "prompt": prompt}) for prompt in prompts]
    assert texts(reply) == [text for one in alone for text in texts(one)]
    assert reply["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in prompts)


def test_greedy_choices_are_all_the_same(client: httpx2.Client) -> None:
    assert texts(whole(client, CHAT, "[[same]]", n=3, temperature=0)) == ["same"] * 3


def test_an_echoed_prompt_begins_every_choice(client: httpx2.Client) -> None:
    assert texts(whole(client, TEXT, "[[x]]", n=2, temperature=0, echo=True)) == ["[[x]]assistant: x"] * 2


def test_metrics_count_a_prompt_once_as_usage_does() -> None:
    with running(engine=EngineConfig(draft_tokens=4, max_lanes=3)) as server, server.client() as client:
        usages = [whole(client, CHAT, "talk", n=5, **WARM)["usage"]]
        usages.append(whole(client, TEXT, "", n=2, **{**WARM, "prompt": ["one", "two", "three"]})["usage"])
        usages.append(streamed(client, CHAT, "[[a. b]]", n=2, temperature=0, stop=".")[-1]["usage"])
        counted: dict[str, float] = {}
        for family in text_string_to_metric_families(client.get("/metrics").text):
            for sample in family.samples:
                counted[sample.name] = counted.get(sample.name, 0.0) + sample.value
    assert counted["paceline_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert counted["paceline_generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert counted["paceline_request_success_total"] == 5 + 6 + 2


# ---- settings


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"temperature": 0}, {"top_k": 1, "n": 2}],
    ids=lambda fields: next(iter(fields)),
)
def test_settings_that_leave_the_likeliest_alone_say_what_greedy_says(
    client: httpx2.Client, fields: dict[str, Any]
) -> None:
    assert set(texts(whole(client, CHAT, "say [[häuser]]", **{"temperature": 2, **fields}))) == {"häuser"}


def test_a_bias_forbids_and_forces(client: httpx2.Client) -> None:
    banned = whole(client, CHAT, "say [[banana]]", temperature=0, max_tokens=6, logit_bias={str(ord("a")): -100})
    assert "a" not in texts(banned)[0]
    forced = whole(client, CHAT, "say [[banana]]", temperature=0, max_tokens=5, logit_bias={str(ord("x")): 100})
    assert texts(forced) == ["xxxxx"]


def test_penalties_change_what_is_said(client: httpx2.Client) -> None:
    plain = texts(whole(client, CHAT, "talk", **WARM))
    for fields in ({"frequency_penalty": 2}, {"presence_penalty": -2}, {"repetition_penalty": 1.8}):
        assert texts(whole(client, CHAT, "talk", **fields, **WARM)) != plain


# ---- logprobs


def entries(reply: dict[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = reply["choices"][0]["logprobs"]["content"]
    return content


TEXTS = ["plain", "häuser 漢字 🦄", "🦄🦄"]


@pytest.mark.parametrize("text", TEXTS)
def test_each_token_of_a_chat_has_its_text_its_bytes_and_its_rivals(client: httpx2.Client, text: str) -> None:
    reply = whole(client, CHAT, f"say [[{text}]]", temperature=0, logprobs=True, top_logprobs=3)
    told = entries(reply)
    assert len(told) == reply["usage"]["completion_tokens"] - 1  # the end is counted, not listed
    assert bytes(byte for entry in told for byte in entry["bytes"]).decode() == text == texts(reply)[0]
    for entry in told:
        assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        rivals = [rival["logprob"] for rival in entry["top_logprobs"]]
        assert len(rivals) == 3
        assert rivals == sorted(rivals, reverse=True)
        assert sum(map(math.exp, rivals)) <= 1 + 1e-6


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [None, "r 漢", "🦄", "STOP"])
@pytest.mark.parametrize("limit", [None, 3])
def test_a_streams_logprobs_are_those_of_the_whole_and_come_with_their_text(
    client: httpx2.Client, text: str, stop: str | None, limit: int | None
) -> None:
    asked = {"temperature": 0, "logprobs": True, "top_logprobs": 2, "stop": stop, "max_tokens": limit}
    reply = whole(client, CHAT, f"say [[{text} ST]]", **asked)
    content: list[dict[str, Any]] = []
    shown, bare = "", ""
    for chunk in streamed(client, CHAT, f"say [[{text} ST]]", **asked)[:-1]:
        (choice,) = chunk["choices"]
        shown += said(choice)
        if choice["logprobs"] is not None:
            content += choice["logprobs"]["content"]
            spelled = bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="ignore")
            bare = shown.rstrip("\N{REPLACEMENT CHARACTER}")
            assert spelled.startswith(bare)
    assert shown == texts(reply)[0]
    assert content == entries(reply)
    finished = limit is None and (stop is None or stop not in text)
    assert len(content) == reply["usage"]["completion_tokens"] - finished


def test_tokens_of_a_text_stand_beside_their_offsets(client: httpx2.Client) -> None:
    asked = {"temperature": 0, "logprobs": 2}
    reply = whole(client, TEXT, "[[aé🦄.]]", **asked)
    told = reply["choices"][0]["logprobs"]
    assert told["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert told["tokens"] == ["a", *["\N{REPLACEMENT CHARACTER}"] * 6, "."]
    assert [told["token_logprobs"][place] for place in (0, 7)] == [
        told["top_logprobs"][place][told["tokens"][place]] for place in (0, 7)
    ]
    joined: dict[str, list[Any]] = {name: [] for name in told}
    for chunk in streamed(client, TEXT, "[[aé🦄.]]", **asked)[:-1]:
        part = chunk["choices"][0]["logprobs"]
        for name in told if part else ():
            joined[name] += part[name]
    assert joined == told


def test_without_rivals_only_the_drawn_token_is_told(client: httpx2.Client) -> None:
    assert all(entry["top_logprobs"] == [] for entry in entries(whole(client, CHAT, "[[ab]]", logprobs=True, seed=1)))
    told = whole(client, TEXT, "[[ab]]", logprobs=0, seed=1)["choices"][0]["logprobs"]
    assert [list(top) for top in told["top_logprobs"]] == [[token] for token in told["tokens"]]


def test_drafts_do_not_show_in_logprobs() -> None:
    asked = {**WARM, "logprobs": True, "top_logprobs": 4, "frequency_penalty": 0.5, "top_p": 0.9}
    told = []
    for drafted in (0, 5):
        with running(engine=EngineConfig(draft_tokens=drafted)) as server, server.client() as client:
            told.append(whole(client, CHAT, "ab ab ab ab ab", **asked)["choices"])
    assert told[0] == told[1]


def test_every_choice_has_its_own_logprobs(client: httpx2.Client) -> None:
    for choice in whole(client, CHAT, "talk", n=3, logprobs=True, **WARM)["choices"]:
        spelled = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
        assert spelled.decode(errors="replace") == said(choice)
