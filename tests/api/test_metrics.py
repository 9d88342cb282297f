"""Counters: names that dashboards know, sums that agree with usage, a format that promtool passes."""

import math
import shutil
import subprocess
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import LatencyHistogram, RequestMetrics, RequestRecord
from engine.config import EngineConfig
from scheduler.events import Finished
from scheduler.request import FinishReason, Timing, Usage
from tests.api.servers import RunningServer, running


def scrape(client: httpx2.Client) -> dict[str, float]:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def total(samples: dict[str, float], name: str) -> float:
    """Over all labels."""
    return sum(value for key, value in samples.items() if key.partition("{")[0] == name)


def ended(reason: FinishReason, completion: int) -> Finished:
    return Finished("r", reason, Usage(prompt_tokens=5, completion_tokens=completion), Timing(1.0, 1.5, 2.0, 4.0))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say(server: RunningServer, client: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "say [[ab ab ab ab]]"}], "temperature": 0}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    text = client.get("/metrics").content
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False, timeout=60)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_the_names_are_vllms_under_our_prefix(client: httpx2.Client) -> None:
    text = client.get("/metrics").text
    types = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE paceline_")}
    gauges = ["num_requests_running", "num_requests_waiting", "model_info", "grammar_cache_bytes"]
    counters = ["prompt_tokens", "generation_tokens", "request_success", "rounds", "spec_decode_num_drafts"]
    counters += ["spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
    counters += ["spec_decode_num_accepted_tokens_per_pos", "spec_decode_num_draft_tokens_per_pos"]
    counters += ["grammar_cache_hits", "grammar_cache_misses", "grammar_cache_evictions"]
    counters += ["grammar_refused", "grammar_killed"]
    gauges += ["ready", "memory_bytes"]
    counters += ["requests_refused", "num_preemptions", "failed_forwards"]
    gauges += ["prefix_cache_bytes", "prefix_cache_max_bytes", "prefix_cache_blocks"]
    counters += ["prefix_cache_queries", "prefix_cache_hits", "prefix_cache_evictions", "prefix_cache_refused"]
    counters += ["prefix_cache_restored_tokens"]
    histograms = ["time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"]
    histograms += ["request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"]
    histograms += ["lanes_per_round", "rows_per_round", "draft_rows_per_round"]
    expected = {f"paceline_{name}": "gauge" for name in gauges}
    expected |= {f"paceline_{name}_total": "counter" for name in counters}
    expected |= {f"paceline_{name}": "histogram" for name in histograms}
    assert types == expected


def test_totals_grow_by_exactly_what_usage_says() -> None:
    """Ends by token, by limit, by a stop string in a draft, streamed and not, several prompts at once."""
    bodies: list[dict[str, Any]] = [
        {"prompt": "[[ab ab ab ab ab]]assistant: "},
        {"prompt": "[[ab ab ab ab ab]]assistant: ", "max_tokens": 7},
        {"prompt": "[[ab ab ab ab. ab ab]]assistant: ", "stop": "b. a"},
        {"prompt": ["[[one]]assistant: ", "[[two two two two]]assistant: "], "stop": ["o t"]},
        {"prompt": "talk", "temperature": 1, "seed": 3, "max_tokens": 50, "ignore_eos": True},
    ]
    with running(engine=EngineConfig(draft_tokens=5)) as server, server.client() as client:
        usages = [client.post("/v1/completions", json={"temperature": 0, **body}).json()["usage"] for body in bodies]
        samples = scrape(client)
        assert total(samples, "paceline_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
        assert total(samples, "paceline_generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
        assert total(samples, "paceline_request_success_total") == 6
        told = [usage["speculation"] for usage in usages if "speculation" in usage]
        assert told
        for name, field in (("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):
            expected = sum(one[field] for one in told)
            assert total(samples, f"paceline_spec_decode_num_{name}_total") == expected > 0
            assert total(samples, f"paceline_spec_decode_num_{name}_per_pos_total") == expected
        rounds = total(samples, "paceline_rounds_total")
        assert samples["paceline_lanes_per_round_count"] == samples["paceline_rows_per_round_count"] == rounds > 0
        first = samples["paceline_time_to_first_token_seconds_count"]
        assert first == samples["paceline_e2e_request_latency_seconds_count"] == 6
        assert samples["paceline_num_requests_running"] == 0
        assert first + samples["paceline_inter_token_latency_seconds_count"] <= total(
            samples, "paceline_generation_tokens_total"
        )


def test_positions_begin_at_zero_and_have_a_source(server: RunningServer, client: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "say [[abc abc abc abc]]"}], "temperature": 0}
    client.post("/v1/chat/completions", json=body)
    keys = [key for key in scrape(client) if key.startswith("paceline_spec_decode_num_accepted_tokens_per_pos_total")]
    assert any("{position=0}{source=" in key for key in keys)


@given(st.lists(st.floats(0, 100), max_size=30))
def test_a_histogram_counts_each_observation_in_the_first_bucket_that_holds_it(seconds: list[float]) -> None:
    histogram = LatencyHistogram("h", "", (1.0, 10.0))
    for one in seconds:
        histogram.observe(one)
    assert histogram.counts == [
        sum(one <= 1 for one in seconds),
        sum(1 < one <= 10 for one in seconds),
        sum(one > 10 for one in seconds),
    ]
    assert math.isclose(histogram.total, sum(seconds))


def test_tokens_are_counted_as_delivered_and_the_rest_at_the_end() -> None:
    metrics = RequestMetrics()
    record = RequestRecord(metrics, arrived=0.0)
    record.deliver(1)
    record.deliver(4)
    assert (metrics.generation_tokens, metrics.prompt_tokens) == (4, 0)
    record.finish(ended(FinishReason.STOP, completion=5))
    assert (metrics.generation_tokens, metrics.prompt_tokens) == (5, 5)
    assert sum(metrics.first_token.counts) == 1
    assert sum(metrics.inter_token.counts) == 3


def test_queue_prefill_and_decode_times_are_the_engines() -> None:
    metrics = RequestMetrics()
    RequestRecord(metrics, arrived=0.0).finish(ended(FinishReason.LENGTH, completion=1))
    assert (metrics.queue.total, metrics.prefill.total, metrics.decode.total) == (0.5, 0.5, 2.0)


def test_a_client_that_left_counts_once_as_cancelled_and_a_finished_one_does_not() -> None:
    metrics = RequestMetrics()
    RequestRecord(metrics, arrived=0.0).abandon(FinishReason.CANCELLED)
    done = RequestRecord(metrics, arrived=0.0)
    done.finish(ended(FinishReason.STOP, completion=1))
    done.abandon(FinishReason.CANCELLED)
    assert {reason: count for reason, count in metrics.finished.items() if count} == {
        FinishReason.CANCELLED: 1,
        FinishReason.STOP: 1,
    }
