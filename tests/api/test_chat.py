"""Chat completions over real sockets: shapes, text, limits, usage."""

import json
from typing import Any

import httpx2
import pytest

from api.openai.shapes import usage_object

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def ask(text: str, **fields: Any) -> dict[str, Any]:
    """A body; the Parrot repeats what stands in double brackets."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def chat(client: httpx2.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def chunks(client: httpx2.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a stream, which must end in [DONE]."""
    response = client.post("/v1/chat/completions", json={**body, **STREAM})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(stream: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in stream for choice in chunk["choices"])


def end_of(stream: list[dict[str, Any]]) -> str | None:
    reasons: list[str | None] = [choice["finish_reason"] for chunk in stream for choice in chunk["choices"]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return reasons[-1]


def test_a_reply_has_the_form_that_clients_read(client: httpx2.Client) -> None:
    reply = chat(client, ask("say [[hello]]"))
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake"
    assert reply["id"].startswith("chatcmpl-")
    assert isinstance(reply["created"], int)
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_a_stream_has_a_role_then_content_then_a_reason_then_usage(client: httpx2.Client) -> None:
    stream = chunks(client, ask("say [[abc]]"))
    deltas = [chunk["choices"][0]["delta"] for chunk in stream[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta.keys() == {"content"} for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in stream[:-1]] == [None] * (len(deltas) - 1) + ["stop"]
    assert stream[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in stream[:-1])
    assert stream[-1]["usage"]["completion_tokens"] == 4


def test_the_heading_stays_the_same_through_all_chunks(client: httpx2.Client) -> None:
    stream = chunks(client, ask("say [[abc]]"))
    headings = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in stream}
    assert len(headings) == 1
    assert headings.pop()[3] == "chat.completion.chunk"


def test_usage_comes_only_if_it_was_asked_for(client: httpx2.Client) -> None:
    response = client.post("/v1/chat/completions", json=ask("say [[a]]", stream=True))
    assert "usage" not in response.text
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "text", ["plain", "häuser 漢字 🦄", "e\u0301 👩‍👩‍👧", '"quoted" \\ and\nlines\t\u2028', "<|im_end|>"]
)
def test_streamed_deltas_joined_are_the_text_that_is_not_streamed(client: httpx2.Client, text: str) -> None:
    body = ask(f"say [[{text}]]")
    stream = chunks(client, body)
    assert text_of(stream) == text == chat(client, body)["choices"][0]["message"]["content"]


def test_no_chunk_ever_holds_half_a_character(client: httpx2.Client) -> None:
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks(client, ask("[[🦄é🦄]]"))[:-1]]
    assert (contents[0], contents[-1]) == ("", None)
    assert all(content and set(content) <= {"🦄", "é"} for content in contents[1:-1])


def test_a_character_cut_off_by_the_limit_is_delivered_at_the_end(client: httpx2.Client) -> None:
    body = ask("say [[a🦄]]", max_tokens=3)
    stream = chunks(client, body)
    assert text_of(stream) == "a\N{REPLACEMENT CHARACTER}" == chat(client, body)["choices"][0]["message"]["content"]
    assert end_of(stream) == "length"


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 10**9}, 11),
        ({"max_tokens": 10**30}, 11),
        ({}, 11),
    ],
)
def test_the_newer_limit_wins_and_the_context_caps_it(
    client: httpx2.Client, fields: dict[str, int], tokens: int
) -> None:
    reply = chat(client, ask("say [[0123456789]]", **fields))
    assert reply["usage"]["completion_tokens"] == tokens
    assert reply["choices"][0]["finish_reason"] == ("length" if tokens < 11 else "stop")


@pytest.mark.parametrize("limit", [None, 10**9])
def test_a_reply_takes_at_most_what_the_context_leaves(client: httpx2.Client, limit: int | None) -> None:
    reply = chat(client, ask("x" * 8000, ignore_eos=True, max_tokens=limit))
    assert reply["usage"]["total_tokens"] == 8192
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(client: httpx2.Client) -> None:
    overhead = len("user: \nassistant: ")
    fits = client.post("/v1/chat/completions", json=ask("x" * (8191 - overhead)))
    assert fits.status_code == 200
    response = client.post("/v1/chat/completions", json=ask("x" * (8192 - overhead)))
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"].count("8192") == 2


def test_usage_counts_the_prompt_the_tokens_and_the_final_end(client: httpx2.Client) -> None:
    usage = chat(client, ask("say [[hello]]") | {"cache_salt": "nobody else's"})["usage"]
    assert usage["prompt_tokens"] == len("user: say [[hello]]\nassistant: ")
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }


def test_usage_tells_what_was_drafted_and_accepted(client: httpx2.Client) -> None:
    usage = chat(client, ask("say [[ab cd ab cd ab cd ab cd]]"))["usage"]
    speculation = usage["speculation"]
    (source,) = speculation["sources"].values()
    assert source["drafts"] > 0
    assert 0 < speculation["accepted"] <= speculation["drafted"]
    assert speculation["drafted"] == sum(source["drafted"])
    assert speculation["accepted"] == sum(source["accepted"])
    assert len(source["drafted"]) == len(source["accepted"])


def test_no_drafts_no_speculation() -> None:
    assert "speculation" not in usage_object([])


@pytest.mark.parametrize("stop", ["lo w", ["xyz", "lo w"], ["w", "lo w"], "l"])
def test_a_stop_string_split_over_tokens_ends_the_text_before_it(client: httpx2.Client, stop: str | list[str]) -> None:
    said = "hello world"
    stops = [stop] if isinstance(stop, str) else stop
    end = min(said.find(one) + len(one) for one in stops if one in said)
    cut = min(said.find(one) for one in stops if one in said)
    body = ask(f"say [[{said}]]", stop=stop)
    reply, stream = chat(client, body), chunks(client, body)
    assert reply["choices"][0]["message"]["content"] == text_of(stream) == said[:cut]
    assert reply["choices"][0]["finish_reason"] == end_of(stream) == "stop"
    assert reply["usage"]["completion_tokens"] == stream[-1]["usage"]["completion_tokens"] == end


@pytest.mark.parametrize(("limit", "reason"), [(None, "stop"), (6, "length")])
def test_a_stop_string_only_begun_is_delivered(client: httpx2.Client, limit: int | None, reason: str) -> None:
    body = ask("say [[hello STO]]" if limit is None else "say [[abcSTOP]]", stop="STOP", max_tokens=limit)
    stream = chunks(client, body)
    assert text_of(stream) == ("hello STO" if limit is None else "abcSTO")
    assert end_of(stream) == reason


def test_a_stop_string_completed_by_the_last_token_outranks_the_limit(client: httpx2.Client) -> None:
    reply = chat(client, ask("say [[abc.def]]", stop=".", max_tokens=4))
    assert reply["choices"][0]["message"]["content"] == "abc"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 4


def test_a_seed_repeats_and_another_differs(client: httpx2.Client) -> None:
    def text(seed: int | None) -> str:
        body = ask("talk", temperature=1.5, max_tokens=40, ignore_eos=True, seed=seed)
        return str(chat(client, body)["choices"][0]["message"]["content"])

    assert text(7) == text(7)
    assert text(-1) == text(2**64 - 1)
    assert len({text(1), text(2), text(None), text(None)}) == 4


def test_ignore_eos_goes_on_to_the_limit(client: httpx2.Client) -> None:
    reply = chat(client, ask("say [[ab]]", ignore_eos=True, max_tokens=9))
    assert reply["usage"]["completion_tokens"] == 9
    assert reply["choices"][0]["finish_reason"] == "length"


def test_content_may_come_in_parts_and_unknown_fields_are_ignored(client: httpx2.Client) -> None:
    parts = [{"type": "text", "text": "say"}, {"type": "text", "text": "[[yes]]", "cache_control": {}}]
    body = {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": parts, "name": "me"},
        ],
        "temperature": 0,
        "user": "u",
        "store": False,
        "metadata": {"a": 1},
        "whatever": [1, {"deep": None}],
    }
    assert chat(client, body)["choices"][0]["message"]["content"] == "yes"


def test_values_that_change_nothing_are_taken(client: httpx2.Client) -> None:
    harmless = {
        "n": 1,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "stop": None,
        "stream": None,
        "seed": None,
        "prediction": {"type": "content", "content": "x"},
    }
    assert chat(client, ask("[[ok]]", **harmless))["choices"][0]["message"]["content"] == "ok"
