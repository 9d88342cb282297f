"""Text completions over real sockets: prompts of every kind, echo, several choices."""

import json
from typing import Any

import httpx2
import pytest

GREEDY = {"temperature": 0}


def complete(client: httpx2.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def streamed(client: httpx2.Client, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, **GREEDY, "stream": True, "stream_options": {"include_usage": True}, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def prompt(text: str) -> str:
    return f"[[{text}]]assistant: "


def test_a_reply_has_the_form_that_clients_read(client: httpx2.Client) -> None:
    reply = complete(client, prompt("hello"))
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert reply["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("kind", ["text", "texts", "tokens", "lists of tokens"])
def test_a_prompt_may_be_text_or_tokens_or_a_list_of_either(client: httpx2.Client, kind: str) -> None:
    text = prompt("same")
    tokens = list(text.encode())
    given = {"text": text, "texts": [text], "tokens": tokens, "lists of tokens": [tokens]}[kind]
    assert complete(client, given)["choices"][0]["text"] == "same"


def test_several_prompts_give_each_what_it_gets_alone(client: httpx2.Client) -> None:
    prompts = [prompt("first"), prompt("the second"), prompt("3rd")]
    reply = complete(client, prompts, temperature=1.3, seed=5, max_tokens=20)
    alone = [complete(client, one, temperature=1.3, seed=5, max_tokens=20) for one in prompts]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in reply["choices"]] == [one["choices"][0]["text"] for one in alone]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert reply["usage"][count] == sum(one["usage"][count] for one in alone)


def test_several_prompts_stream_with_their_indices_and_one_usage(client: httpx2.Client) -> None:
    stream = streamed(client, [prompt("first"), prompt("the second")])
    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    for chunk in stream[:-1]:
        (choice,) = chunk["choices"]
        assert reasons[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert (texts, reasons) == (["first", "the second"], ["stop", "stop"])
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"]["completion_tokens"] == len("first") + len("the second") + 2


@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_begins_with_the_prompt_streamed_or_not(client: httpx2.Client, as_tokens: bool) -> None:
    text = prompt("é!")
    given = list(text.encode()) if as_tokens else text
    whole = complete(client, given, echo=True)["choices"][0]["text"]
    stream = streamed(client, given, echo=True)
    assert whole == text + "é!"
    assert "".join(choice["text"] for chunk in stream for choice in chunk["choices"]) == whole


def test_stop_strings_are_not_looked_for_in_an_echoed_prompt(client: httpx2.Client) -> None:
    assert complete(client, prompt("a.b"), echo=True, stop="]")["choices"][0]["text"] == prompt("a.b") + "a.b"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([""], "prompt"),
        ([1, "a"], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([257], "prompt"),
        ([-1], "prompt"),
        ([[1], [10**30]], "prompt[1]"),
        (["a"] * 129, "prompt"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ({}, "prompt"),
        (None, "prompt"),
        ([None], "prompt[0]"),
    ],
)
def test_a_bad_prompt_is_a_400_that_names_it(client: httpx2.Client, given: object, field: str) -> None:
    response = client.post("/v1/completions", json={"prompt": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_a_missing_prompt_is_named(client: httpx2.Client) -> None:
    response = client.post("/v1/completions", json={})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_one_prompt_of_several_that_is_too_long_submits_none(client: httpx2.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": ["a", "x" * 9000]})
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("fields", "tokens"), [({"max_completion_tokens": 3}, 3), ({"max_tokens": 5}, 5)])
def test_the_newer_name_of_max_tokens_wins_here_too(client: httpx2.Client, fields: dict[str, int], tokens: int) -> None:
    body = {"prompt": "abcabc", "max_tokens": 20, "temperature": 0, "ignore_eos": True, **fields}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("value", [-1, "x", {}, 0])
def test_a_bad_max_completion_tokens_is_named(client: httpx2.Client, value: object) -> None:
    reply = client.post("/v1/completions", json={"prompt": "a", "max_completion_tokens": value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_completion_tokens")
