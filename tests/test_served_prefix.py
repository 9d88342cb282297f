"""The prefix cache of a real process: over turns, a restart, a kill -9, beside another daemon, for other keys; and the
operator's commands.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serving import MODEL, PATIENCE, PROGRAM, Served, serving

pytestmark = pytest.mark.slow

STORY = "A ferry leaves at dawn. " * 20
FAKE = ("--backend", "fake")
CONSTRAINED = {
    "type": "json_schema",
    "json_schema": {
        "name": "place",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
            "required": ["name", "people"],
            "additionalProperties": False,
        },
    },
}


def complete(served: Served, prompt: str, key: str = "", **fields: Any) -> tuple[str, int]:
    """Its text, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0} | fields
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    told = response.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def cache(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([PROGRAM, "cache", *words], capture_output=True, text=True, timeout=PATIENCE, check=False)


@contextmanager
def fake(folder: Path, *flags: str, **settings: Any) -> Iterator[Served]:
    words = (*FAKE, "--prefix-dir", str(folder), "--prefix-ssd", "100MB", *flags)
    with serving(Path("fake"), *words, **settings) as served:
        yield served


def test_a_prompt_that_comes_again_is_had_also_after_a_restart_and_a_kill(tmp_path: Path) -> None:
    with fake(tmp_path) as served:
        text, cached = complete(served, STORY)
        assert cached == 0
        assert complete(served, STORY) == (text, len(STORY) - 1)
        assert complete(served, STORY + text)[1] >= len(STORY) + 19
    with fake(tmp_path) as served:
        assert complete(served, STORY) == (text, len(STORY) - 1)
        assert served.metrics()["paceline_prefix_cache_restores_total"] > 0
        other = complete(served, STORY + "And then?")
        assert cache("flush", "--uds", served.uds).returncode == 0
        served.child.kill()
        served.child.wait(PATIENCE)
    with fake(tmp_path) as served:
        assert complete(served, STORY + "And then?") == (other[0], len(STORY) + 8)


def test_metrics_and_usage_say_the_same(tmp_path: Path) -> None:
    with fake(tmp_path) as served:
        told = [complete(served, STORY)[1], complete(served, STORY)[1], complete(served, "something else")[1]]
        metrics = served.metrics()
        assert metrics["paceline_prefix_cache_hits_total"] == sum(told) > 0
        assert metrics["paceline_prefix_cache_queries_total"] == 2 * len(STORY) + len("something else")
        assert metrics["paceline_prefix_cache_restored_tokens_total"] == sum(told)
        assert metrics["paceline_prefix_cache_failures_total"] == 0


def test_keys_and_salts_share_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    with fake(tmp_path / "prefix", "--api-key-file", str(keys)) as served:
        assert complete(served, STORY, "first")[1] == 0
        assert complete(served, STORY, "second")[1] == 0
        assert complete(served, STORY, "first", cache_salt="salt")[1] == 0
        assert complete(served, STORY, "first")[1] > 0
        assert complete(served, STORY, "first", cache_salt="salt")[1] > 0
        assert httpx2.get(f"{served.url}/v1/models").status_code == 401


def test_a_second_daemon_on_one_folder_reads_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fake(tmp_path / "prefix") as first:
        text, _ = complete(first, STORY)
        assert cache("flush", "--uds", first.uds).returncode == 0
        with fake(tmp_path / "prefix", log=log) as second:
            assert complete(second, STORY) == (text, len(STORY) - 1)
            assert second.metrics()["paceline_prefix_cache_writable"] == 0
            refused = cache("flush", "--uds", second.uds)
            assert refused.returncode == 1
            assert "not being written" in refused.stderr
    assert "WARNING" in log.read_text()


def test_the_operators_commands(tmp_path: Path) -> None:
    with fake(tmp_path) as served:
        text, _ = complete(served, STORY)
        told = json.loads(cache("ls", "--json", "--uds", served.uds).stdout)
        assert told["ram"]["pieces"] > len(STORY) // 64
        assert told["ram"]["bytes"] > 0
        assert "ram" in cache("ls", "--uds", served.uds).stdout
        assert cache("flush", "--uds", served.uds).stdout == "everything is written\n"
        assert json.loads(cache("ls", "--json", "--uds", served.uds).stdout)["ssd"]["pieces"] == told["ram"]["pieces"]
        assert cache("verify", "--uds", served.uds).returncode == 0
        damaged = next(tmp_path.glob("*/*.block"))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        assert cache("verify", "--uds", served.uds).returncode == 1
        assert cache("clear", "--uds", served.uds).returncode == 0
        assert json.loads(cache("ls", "--json", "--uds", served.uds).stdout)["ram"]["pieces"] == 0
        assert complete(served, STORY) == (text, 0)
        assert "in use" in cache("ls", "--prefix-dir", tmp_path).stdout
        assert cache("clear", "--prefix-dir", tmp_path).stdout.startswith("0 files"), "a daemon holds them"
    assert json.loads(cache("ls", "--json", "--prefix-dir", tmp_path).stdout)[0]["files"] > 0
    assert cache("verify", "--prefix-dir", tmp_path).returncode == 0
    assert cache("clear", "--prefix-dir", tmp_path).returncode == 0
    assert not list(tmp_path.glob("*/*.block"))
    refused = cache("ls", "--uds", tmp_path / "nobody")
    assert refused.returncode == 1
    assert "no daemon answers" in refused.stderr


def test_after_a_check_the_accounts_are_those_of_the_files_that_are_left(tmp_path: Path) -> None:
    with fake(tmp_path) as served:
        complete(served, STORY)
        assert cache("flush", "--uds", served.uds).returncode == 0
        files = sorted(tmp_path.glob("*/*.block"))
        for file in files[:3]:
            file.write_bytes(b"garbage")
        assert f"{len(files) - 3} files are good, 3 were damaged" in cache("verify", "--uds", served.uds).stdout
        told = json.loads(cache("ls", "--json", "--uds", served.uds).stdout)
        assert told["ssd"]["pieces"] == told["spill"]["files"] == len(files) - 3
        assert told["ssd"]["bytes"] == sum(file.stat().st_size for file in tmp_path.glob("*/*.block"))
        assert told["spill"]["damaged"] == 3


def test_a_folder_that_is_removed_is_missed_once_and_serving_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fake(tmp_path / "prefix", log=log) as served:
        text, _ = complete(served, STORY)
        assert cache("flush", "--uds", served.uds).returncode == 0
        shutil.rmtree(tmp_path / "prefix")
        complete(served, "another text, " * 20)
        refused = cache("flush", "--uds", served.uds)
        assert refused.returncode == 1
        assert complete(served, STORY) == (text, len(STORY) - 1)
        complete(served, "a third text, " * 20)
    assert log.read_text().count("until a restart") == 1


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("words")
    for words in (("ls",), ("verify",), ("clear",)):
        refused = cache(*words, "--prefix-dir", place)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: ")
        assert "Traceback" not in refused.stderr
    words = [PROGRAM, "serve", *FAKE, "--prefix-dir", place]
    serve = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert serve.returncode == 1
    assert "is no folder" in serve.stderr


def test_over_tcp_there_is_no_admin(tmp_path: Path) -> None:
    with fake(tmp_path) as served:
        assert httpx2.get(f"{served.url}/admin/cache").status_code == 404
        for verb in ("flush", "verify", "clear"):
            assert httpx2.post(f"{served.url}/admin/cache/{verb}", json={}).status_code == 404


def test_without_memory_there_is_no_cache_and_without_a_folder_none_on_the_disk(tmp_path: Path) -> None:
    with fake(tmp_path, "--prefix-ram", "0") as served:
        complete(served, STORY)
        assert complete(served, STORY)[1] == 0
        assert "no prefix cache" in cache("ls", "--uds", served.uds).stderr
    with serving(Path("fake"), *FAKE) as served:
        complete(served, STORY)
        assert complete(served, STORY)[1] > 0
        assert json.loads(cache("ls", "--json", "--uds", served.uds).stdout)["spill"] is None


def test_a_size_that_is_none_is_refused() -> None:
    words = [PROGRAM, "serve", *FAKE, "--prefix-ram", "much"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert refused.returncode == 2
    assert "is no size" in refused.stderr


def test_prompts_and_keys_are_not_in_the_files_names_or_modes(tmp_path: Path) -> None:
    with fake(tmp_path / "prefix") as served:
        complete(served, STORY)
        assert cache("flush", "--uds", served.uds).returncode == 0
        folder = next((tmp_path / "prefix").glob("*/"))
        assert (tmp_path / "prefix").stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


@pytest.mark.real_model
def test_smollm2_says_the_same_with_and_without_the_cache_and_after_a_kill(smollm2: Path, tmp_path: Path) -> None:
    """Turns of a conversation, free and constrained, greedy and at a temperature, with drafts on."""
    asks: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0, "response_format": CONSTRAINED},
    ]
    history = [{"role": "user", "content": f"{STORY}\n\nWhich place is this about?"}]
    turns = [history, [*history, {"role": "assistant", "content": "A harbour."}, {"role": "user", "content": "Where?"}]]

    def answers(served: Served) -> list[tuple[str, int]]:
        told = []
        for messages in turns:
            for fields in asks:
                reply = served.client.chat.completions.create(
                    model=MODEL, messages=messages, max_tokens=24, extra_body=fields
                )
                assert reply.usage is not None
                assert reply.usage.prompt_tokens_details is not None
                cached = reply.usage.prompt_tokens_details.cached_tokens or 0
                told.append((reply.choices[0].message.content or "", cached))
        return told

    with serving(smollm2, "--prefix-ram", "0", "--draft-tokens", "0") as served:
        expected = [text for text, _ in answers(served)]
    with serving(smollm2, "--prefix-dir", str(tmp_path)) as served:
        first = answers(served)
        assert [text for text, _ in first] == expected
        assert [cached > 100 for _, cached in first] == [False, True, True, True, True, True]
        assert cache("flush", "--uds", served.uds).returncode == 0
        os.kill(served.child.pid, signal.SIGKILL)
        served.child.wait(PATIENCE)
    with serving(smollm2, "--prefix-dir", str(tmp_path)) as served:
        again = answers(served)
        assert [text for text, _ in again] == expected
        assert all(cached > 100 for _, cached in again)
    with serving(smollm2, "--prefix-dir", str(tmp_path), "--kv-bits", "8", "--kv-group-size", "64") as served:
        assert answers(served)[0][1] == 0, "another way to keep keys and values: other blocks"
