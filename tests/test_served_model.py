"""The whole of it: `paceline serve` as a process of its own, SmolLM2, real clients; the README line by line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import MODEL, PATIENCE, Served, free_port, growth, serving

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Repeat this word for word: The quick brown fox jumps over the lazy dog, then sleeps under a tree.", {}),
    ("Why is the sky blue?", {}),
    ("Write a short poem about rain.", {"temperature": 0.9, "seed": 7}),
    ("List the numbers from one to twenty, then list the numbers from one to twenty again.", {}),
    ("What is the capital of Italy, and what is it known for?", {"temperature": 0.7, "seed": 11}),
    ("Copy this line three times: red green blue red green blue red green blue.", {}),
    ("Explain in two sentences what a compiler does.", {"temperature": 1.0, "seed": 2**63}),
    ("Say hello in five languages.", {}),
)


def ask(served: Served, place: int, max_tokens: int = 40) -> tuple[str, Any]:
    """Stream one of `ASKS`; its text and usage."""
    prompt, settings = ASKS[place]
    stream = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        **{"temperature": 0.0, **settings},
    )
    text, usage = "", None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


@pytest.fixture(scope="module")
def drafting(smollm2: Path) -> Iterator[Served]:
    with serving(smollm2, "--draft-tokens", "6", "--no-pace") as served:
        yield served


def all_at_once(served: Served, places: Sequence[int]) -> list[tuple[str, Any]]:
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(partial(ask, served), places))


def test_eight_clients_with_drafts_get_what_each_gets_alone_without(smollm2: Path, drafting: Served) -> None:
    places = range(len(ASKS))
    with serving(smollm2, "--draft-tokens", "0") as plain:
        alone = [ask(plain, place)[0] for place in places]
    before = drafting.metrics()
    together = [text for text, _ in all_at_once(drafting, places)]
    grown = growth(before, drafting.metrics())
    assert together == alone
    assert all(alone)
    lanes = grown["paceline_lanes_per_round_sum"] / grown["paceline_lanes_per_round_count"]
    accepted = grown["paceline_spec_decode_num_accepted_tokens_total"]
    rejected = grown["paceline_spec_decode_num_draft_tokens_total"] - accepted
    assert lanes >= 4
    assert accepted > 0
    assert rejected > 0


def test_metrics_add_up_with_the_usage_of_the_same_requests(drafting: Served) -> None:
    before = drafting.metrics()
    usages = [usage for _, usage in all_at_once(drafting, (0, 3, 5, 7))]
    grown = growth(before, drafting.metrics())
    assert grown["paceline_prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
    assert grown["paceline_generation_tokens_total"] == sum(usage.completion_tokens for usage in usages)
    assert grown["paceline_request_success_total"] == len(usages)
    drafts = [usage.model_extra.get("speculation", {"drafted": 0, "accepted": 0}) for usage in usages]
    assert grown.get("paceline_spec_decode_num_draft_tokens_total", 0) == sum(draft["drafted"] for draft in drafts)
    assert grown.get("paceline_spec_decode_num_accepted_tokens_total", 0) == sum(draft["accepted"] for draft in drafts)


def test_promtool_has_nothing_to_say_after_real_traffic(drafting: Served) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    ask(drafting, 0)
    text = httpx2.get(f"{drafting.url}/metrics").content
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_curl_and_the_openai_client_stream_the_same_over_the_unix_socket(drafting: Served) -> None:
    if (curl := shutil.which("curl")) is None:
        pytest.skip("curl is not installed")
    body = {"messages": [{"role": "user", "content": ASKS[1][0]}], "max_tokens": 40, "temperature": 0, "stream": True}
    words = [curl, "-sN", "--unix-socket", drafting.uds, "http://localhost/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    lines = subprocess.run(words, capture_output=True, check=True, timeout=PATIENCE).stdout.decode().splitlines()
    frames = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    deltas = [json.loads(frame)["choices"][0]["delta"] for frame in frames[:-1]]
    transport = httpx2.HTTPTransport(uds=str(drafting.uds))
    with httpx2.Client(transport=transport) as http:
        over_unix = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
        stream = over_unix.chat.completions.create(model=MODEL, **body)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == text == ask(drafting, 1)[0]
    assert drafting.uds.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_killed_client_frees_its_lane_within_a_round(drafting: Served, moment: str) -> None:
    prompt = "All work and no play. " * (500 if moment == "prefill" else 1)
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "ignore_eos": True, "max_tokens": 2000}
    client = subprocess.Popen([sys.executable, "-c", CLIENT, f"{drafting.url}/v1/chat/completions", json.dumps(body)])
    before = rounds(drafting, moment)
    wait_until(lambda: rounds(drafting, moment) >= before + 2)
    client.kill()
    client.wait()
    at_kill = rounds(drafting)
    wait_until(lambda: drafting.metrics()["paceline_num_requests_running"] == 0)
    assert rounds(drafting) - at_kill < 2


CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request): pass
"""


def test_after_a_kill_9_the_next_server_takes_over_port_and_socket(smollm2: Path, tmp_path: Path) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pl") as scratch:
        uds = Path(scratch) / "s"
        with serving(smollm2, port=port, uds=uds) as first:
            os.kill(first.child.pid, signal.SIGKILL)
            first.child.wait()
        assert uds.exists()
        with serving(smollm2, port=port, uds=uds) as second:
            assert ask(second, 1, max_tokens=4)[1].completion_tokens == 4


def rounds(served: Served, kind: str | None = None) -> float:
    """How many rounds there were, of one kind or of all."""
    families = text_string_to_metric_families(httpx2.get(f"{served.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "paceline_rounds_total"]
    return sum(sample.value for sample in samples if kind in (None, sample.labels["kind"]))


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
