"""The acceptance table: 250 schemas from the wild, each with valid and invalid values, token by token.

Enforced means that every valid value is accepted and may then end, and every invalid one is not; the rest are refused
with a reason; none is enforced and wrong.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.base import ModelInfo
from backends.grammar.base import Grammar, GrammarError
from backends.grammar.compile import GrammarCompiler
from backends.grammar.spec import ConstraintSpec, SpecKind
from backends.grammar.vocabulary import Vocabulary, load_vocabulary

SCHEMAS = Path(__file__).parents[3].parent / "shared" / "data" / "schemas.jsonl"
ENFORCED_AT_LEAST = 230
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(not SCHEMAS.exists(), reason="the shared schemas are not here"),
]


@pytest.fixture(scope="module")
def info(smollm2: Path) -> ModelInfo:
    config = json.loads((smollm2 / "config.json").read_text())
    stops = config["eos_token_id"]
    eos_tokens = frozenset(stops if isinstance(stops, list) else [stops])
    return ModelInfo("smollm2", str(smollm2), config["vocab_size"], 2048, eos_tokens, {}, "cpu", 0)


# ---- a value's text, its properties in the order of the schema -------------------------------------------------------


def targets(root: Any, schema: Any) -> Iterator[dict[str, Any]]:
    """A subschema, or what its reference names: beside which older drafts let nothing count."""
    while isinstance(schema, dict) and str(schema.get("$ref", "")).startswith("#"):
        if not any(f"draft-0{draft}" in str(root.get("$schema")) for draft in (3, 4, 6, 7)):
            yield schema
        reference, schema = schema["$ref"], root
        for part in reference.split("/")[1:]:
            schema = schema[part.replace("~1", "/").replace("~0", "~")]
    if isinstance(schema, dict):
        yield schema


def parts(root: Any, schemas: Sequence[Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    for schema in schemas:
        for target in targets(root, schema):
            yield target
            for word in ("allOf", "anyOf", "oneOf"):
                if depth < 6:
                    yield from parts(root, target.get(word, []), depth + 1)


def ordered(root: Any, schemas: Sequence[Any], value: Any) -> Any:
    known = list(parts(root, schemas))
    if isinstance(value, list):
        items = [schema["items"] for schema in known if isinstance(schema.get("items"), dict)]
        return [ordered(root, items, part) for part in value]
    if not isinstance(value, dict):
        return value
    named = [key for schema in known for key in schema.get("properties", {}) if key in value]
    return {
        key: ordered(
            root,
            [
                schema["properties"][key] if key in schema.get("properties", {}) else schema.get("additionalProperties")
                for schema in known
            ],
            value[key],
        )
        for key in dict.fromkeys((*named, *value))
    }


# ---- the table -------------------------------------------------------------------------------------------------------


class Times(msgspec.Struct):
    """In seconds."""

    compiles: list[float] = []
    first_fills: list[float] = []
    masks: list[float] = []


def accepted(grammar: Grammar, vocabulary: Vocabulary, text: str, times: Times) -> bool:
    matcher = grammar.matcher()
    row = np.zeros((len(vocabulary.tokens) + 31) // 32, dtype=np.int32)
    for index, token in enumerate((*vocabulary.split(text), vocabulary.stop_tokens[0])):
        start = perf_counter()
        matcher.fill(row)
        (times.masks if index else times.first_fills).append(perf_counter() - start)
        went = matcher.accept(token)
        assert went == bool(row[token // 32] >> token % 32 & 1)
        if not went:
            return False
    return True


def wrong_values(grammar: Grammar, vocabulary: Vocabulary, entry: Any, times: Times) -> list[str]:
    found = []
    for case in entry["tests"]:
        text = json.dumps(ordered(entry["schema"], [entry["schema"]], case["data"]), ensure_ascii=False)
        if accepted(grammar, vocabulary, text, times) != case["valid"]:
            found.append(f"{'refuses' if case['valid'] else 'accepts'} {text[:120]}")
    return found


def quantiles(seconds: Sequence[float]) -> str:
    ranked = sorted(seconds)
    middle, late = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
    return f"p50 {middle * 1e3:.2f}, p99 {late * 1e3:.1f}, max {ranked[-1] * 1e3:.1f} ms"


def test_the_table(info: ModelInfo, capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = load_vocabulary(info)
    compiler = GrammarCompiler(info)
    compiler.compile(ConstraintSpec(SpecKind.JSON_OBJECT))  # the process that vets is up
    times, refused, wrong = Times(), {}, {}
    entries = [json.loads(line) for line in SCHEMAS.read_text().splitlines()]
    try:
        for entry in entries:
            start = perf_counter()
            try:
                grammar = compiler.compile(ConstraintSpec(SpecKind.JSON_SCHEMA, json.dumps(entry["schema"])))
            except GrammarError as error:
                refused[entry["name"]] = str(error)
                continue
            times.compiles.append(perf_counter() - start)
            found = wrong_values(grammar, vocabulary, entry, times)
            if found:
                wrong[entry["name"]] = found
        stats = compiler.stats
    finally:
        compiler.close()
    enforced = len(entries) - len(refused) - len(wrong)
    table = [
        f"\n\n{len(entries)} schemas: {enforced} enforced, {len(refused)} refused, {len(wrong)} wrong",
        *(f"  refused {name}: {reason}" for name, reason in refused.items()),
        *(f"  wrong {name}: {found}" for name, found in wrong.items()),
        f"compile     {quantiles(times.compiles)}",
        f"first mask  {quantiles(times.first_fills)}",
        f"other masks {quantiles(times.masks)}",
        f"cache       {stats.cache.bytes / 2**20:.1f} MiB in {stats.cache.entries} grammars\n",
    ]
    with capsys.disabled():
        sys.stdout.write("\n".join(table))
    assert wrong == {}
    assert enforced >= ENFORCED_AT_LEAST
    assert all("#" in reason for reason in refused.values())
