"""Every shared schema, live: SmolLM2 writes a document for each that can be enforced, eight at a time and with drafts.

Skipped where the data is absent.
"""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from tests.serving import Served, growth, serving

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SCHEMAS = Path(__file__).parents[2] / "shared" / "data" / "schemas.jsonl"
AT_ONCE = 8


def write(served: Served, row: dict[str, Any]) -> tuple[str, str]:
    """How a document ended: `refused`, `stop` or `length`; and its text. The model is shown one to copy."""
    examples = [json.dumps(test["data"]) for test in row["tests"] if test["valid"]]
    example = min(examples, key=len) if examples else "{}"
    body = {
        "messages": [{"role": "user", "content": f"Write this JSON document again, exactly as it is:\n{example}"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": row["schema"]}},
        "max_tokens": 64 + len(example) // 2,
        "temperature": 0,
    }
    response = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=300)
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "response_format", response.text
        return "refused", response.json()["error"]["message"]
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["finish_reason"], choice["message"]["content"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not SCHEMAS.exists(), reason="the shared data is not here")
def test_documents_that_end_are_valid_and_nearly_all_end(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in SCHEMAS.read_text().splitlines()]
    with serving(smollm2, "--draft-tokens", "8", "--max-lanes", str(AT_ONCE)) as served:
        before = served.metrics()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            written = list(pool.map(lambda row: write(served, row), rows))
        grown = growth(before, served.metrics())
    ends = Counter(end for end, _ in written)
    with capsys.disabled():
        print(f"\n{len(rows)} schemas, live: {dict(ends)}; {grown['paceline_generation_tokens_total']:.0f} tokens")  # noqa: T201
    for row, (end, text) in zip(rows, written, strict=True):
        if end == "stop":
            jsonschema.validate(json.loads(text), row["schema"])
    assert ends["refused"] <= 20
    assert ends["stop"] >= 0.9 * (ends["stop"] + ends["length"])
