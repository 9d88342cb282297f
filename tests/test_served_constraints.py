"""Sampling settings, constraints and tools on SmolLM2 in one batch, with drafts: each as it is alone without them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx2
import jsonschema
import pytest
from pydantic import BaseModel, Field

from tests.serving import MODEL, Served, free_port, growth, serving

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int
    role: Literal["cook", "pilot", "nurse"]
    likes: list[Literal["tea", "coffee", "rain"]] = Field(max_length=3)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["cook", "pilot", "nurse"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("Why is the sky blue?", {}),
    "seeded": ("Write a short poem about rain.", {"temperature": 0.9, "seed": 7}),
    "nucleus": ("Tell me a story.", {"temperature": 1.0, "seed": 3, "top_p": 0.8}),
    "top k": ("Tell me a joke.", {"temperature": 1.2, "seed": 4, "top_k": 20, "min_p": 0.02}),
    "penalised": (
        "List words.",
        {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ),
    "biased": ("Say yes or no.", {"logit_bias": {"30": 5, "2": -100, "28": -3}}),
    "logprobs": ("What is the capital of Italy?", {"logprobs": True, "top_logprobs": 3}),
    "warm logprobs": ("What is the capital of Italy?", {"temperature": 1.0, "seed": 9, "logprobs": True}),
    "schema": ("Describe a person as JSON.", {"response_format": schema_format(PERSON)}),
    "seeded schema": (
        "Describe a person as JSON.",
        {"response_format": schema_format(PERSON), "temperature": 1.0, "seed": 11, "frequency_penalty": 0.2},
    ),
    "json object": ("Describe a person as JSON.", {"response_format": {"type": "json_object"}}),
    "regex": ("Give me a date.", {"structured_outputs": {"regex": r"\d{4}-(0[1-9]|1[0-2])-\d\d"}}),
    "choice": ("Is water wet?", {"structured_outputs": {"choice": ["yes, it is", "no, it is not"]}}),
    "ebnf": ("Compute.", {"structured_outputs": {"grammar": 'root ::= [0-9]+ " + " [0-9]+ " = " [0-9]+'}}),
    "tool": ("What is the weather in Rome?", {"tools": [WEATHER], "tool_choice": "required"}),
    "copy": ("Copy this three times: red green blue red green blue red green blue.", {"temperature": 0.3, "seed": 1}),
}


def ask(served: Served, name: str) -> dict[str, Any]:
    """The one choice of a reply that is not streamed."""
    prompt, settings = ASKS[name]
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 48, "temperature": 0.0, **settings}
    response = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


@pytest.fixture(scope="module")
def drafting(smollm2: Path) -> Iterator[Served]:
    with serving(smollm2, "--draft-tokens", "5", "--no-pace", "--max-lanes", "16") as served:
        yield served


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Iterator[Served]:
    with serving(smollm2, "--draft-tokens", "0", "--max-lanes", "1") as served:
        yield served


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """Tool calls have random ids."""
    for call in choice["message"].get("tool_calls") or ():
        del call["id"]
    return {name: value for name, value in choice.items() if name != "logprobs"}


def test_a_mixed_batch_gives_each_what_it_gets_alone_without_drafts(plain: Served, drafting: Served) -> None:
    alone = {name: ask(plain, name) for name in ASKS}
    before = drafting.metrics()
    with ThreadPoolExecutor(len(ASKS)) as pool:
        together = dict(zip(ASKS, pool.map(lambda name: ask(drafting, name), ASKS), strict=True))
    grown = growth(before, drafting.metrics())
    assert grown["paceline_lanes_per_round_sum"] / grown["paceline_lanes_per_round_count"] > 4
    accepted = grown["paceline_spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < grown["paceline_spec_decode_num_draft_tokens_total"]
    for name in ASKS:
        mine, its = together[name].get("logprobs"), alone[name].get("logprobs")
        assert (mine is None) == (its is None)
        if mine is not None:
            for one, other in zip(mine["content"], its["content"], strict=True):
                assert one["token"] == other["token"]
                assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
    assert {name: without_ids(choice) for name, choice in together.items()} == {
        name: without_ids(choice) for name, choice in alone.items()
    }


def test_what_is_constrained_is_what_it_must_be(drafting: Served) -> None:
    for name in ("schema", "seeded schema"):
        choice = ask(drafting, name)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert ask(drafting, "choice")["message"]["content"] in ("yes, it is", "no, it is not")
    date = ask(drafting, "regex")["message"]["content"]
    assert (len(date), date[4], date[7]) == (10, "-", "-")


def test_six_with_one_schema_at_once(drafting: Served) -> None:
    """The same schema, six seeds; one compiles it, all share it."""

    def one(seed: int) -> str:
        body = {
            "messages": [{"role": "user", "content": "Describe a person as JSON."}],
            "response_format": schema_format(PERSON),
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 80,
        }
        reply = httpx2.post(f"{drafting.url}/v1/chat/completions", json=body, timeout=120).json()
        return str(reply["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(one, range(6)))
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1


def test_n_choices_are_those_of_their_own_keys(drafting: Served, plain: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "Tell me a joke."}],
        "temperature": 1.0,
        "seed": 21,
        "max_tokens": 20,
    }
    several = httpx2.post(f"{drafting.url}/v1/chat/completions", json={**body, "n": 3}, timeout=120).json()
    one = httpx2.post(f"{plain.url}/v1/chat/completions", json=body, timeout=120).json()
    texts = [choice["message"]["content"] for choice in several["choices"]]
    assert texts[0] == one["choices"][0]["message"]["content"]
    assert len(set(texts)) == 3
    assert several["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


# ---- the openai client -----------------------------------------------------------------------------------------------


def test_parse_gives_a_pydantic_object(drafting: Served) -> None:
    reply = drafting.client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Anna, a pilot of 41, who likes tea, as JSON."}],
        response_format=Person,
        max_tokens=200,
        temperature=0,
    )
    assert reply.choices[0].finish_reason == "stop"
    person = reply.choices[0].message.parsed
    assert isinstance(person, Person)
    assert reply.usage is not None
    assert (reply.usage.model_extra or {})["speculation"]["sources"]["grammar"]["accepted"]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_a_forced_tool_call(drafting: Served, choice: Any) -> None:
    reply = drafting.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice=choice,
        max_tokens=100,
        temperature=0,
        parallel_tool_calls=False,
    )
    (call,) = reply.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])  # type: ignore[index]
    assert reply.choices[0].finish_reason == "tool_calls"


def test_streamed_tool_arguments_are_those_of_the_whole(drafting: Served) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "temperature": 0,
    }
    whole = drafting.client.chat.completions.create(**settings)
    name, fragments, ids = "", [], set()
    for chunk in drafting.client.chat.completions.create(**settings, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.index == 0
            if delta.id:
                ids.add(delta.id)
                name = delta.function.name
            fragments.append(delta.function.arguments or "")
    call = whole.choices[0].message.tool_calls[0]
    assert (name, "".join(fragments), len(ids)) == (call.function.name, call.function.arguments, 1)
    assert len(fragments) > 2


# ---- torch -----------------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import json, os, signal, sys, threading, time, urllib.request
from api import cli

URL = sys.argv.pop(1)

def wait():
    while True:
        time.sleep(0.1)
        try:
            return urllib.request.urlopen(URL + "/health")
        except OSError:
            pass

def ask():
    wait()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    body["response_format"] = {"type": "json_object"}
    head = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(URL + "/v1/chat/completions", json.dumps(body).encode(), head)).read()
    print("torch" in sys.modules, "xgrammar" in {name.partition(".")[0] for name in sys.modules}, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=ask, daemon=True).start()
cli.main()
"""


def test_a_process_that_has_served_a_constrained_request_holds_no_torch(smollm2: Path) -> None:
    port = free_port()
    words = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        f"http://127.0.0.1:{port}",
        "serve",
        str(smollm2),
        "--port",
        str(port),
    ]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
    assert "False True" in ran.stdout, ran.stderr[-2000:]
    assert ran.returncode == 0
