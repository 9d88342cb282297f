"""`schemas`: what constraints cost, in process: compiling each schema of a file, and the masks of a document under it.

The file has JSON lines with "schema" and "tests", a list of {"valid", "data"}. Each document that a schema allows is
walked token by token as a lane would, every mask computed anew. No model is loaded, only its vocabulary.
"""

import json as json_text
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from backends.base import MaskWords, ModelInfo
from backends.grammar.base import Grammar, GrammarError
from backends.grammar.compile import GrammarCompiler
from backends.grammar.spec import ConstraintSpec, SpecKind
from deploy.bench.options import Json, Model, say, warn_if_busy
from deploy.bench.report import Bound, Spread, bound_table, percentile, show

if TYPE_CHECKING:
    from api.text import Tokenizer

SCHEMAS = Path(__file__).parents[3] / "shared" / "data" / "schemas.jsonl"
MOST_MASK_MS = 50.0
MOST_CACHE_BYTES = 256 << 20


def schemas(
    model: Model,
    file: Annotated[Path, typer.Option(help="JSON lines with schemas.", exists=True, dir_okay=False)] = SCHEMAS,
    json: Json = False,
) -> None:
    """Time compilation, first tokens and masks over many schemas."""
    warn_if_busy()
    from api.text import load_tokenizer

    config = json_text.loads((model / "config.json").read_text())
    eos = config["eos_token_id"]
    stops = frozenset([eos] if isinstance(eos, int) else eos)
    info = ModelInfo("bench", str(model), config["vocab_size"], 0, stops, {}, "", 0)
    tokenizer, compiler = load_tokenizer(info), GrammarCompiler(info)
    compiler.compile(ConstraintSpec(SpecKind.JSON_OBJECT))  # the vocabulary is read once per process, not per schema
    rows = [json_text.loads(line) for line in file.read_text().splitlines()]
    costs = Costs()
    for row in rows:
        costs.observe(compiler, tokenizer, info.vocab_size, row)
    cached = compiler.stats.cache
    compiler.close()
    bounds = [
        Bound("the slowest mask, ms", 1, _only(1e3 * max(costs.masks)), MOST_MASK_MS, at_most=True),
        Bound("compiled grammars, MiB", 1, _only(cached.bytes / 2**20), MOST_CACHE_BYTES / 2**20, at_most=True),
    ]
    notes = [
        f"{len(rows)} schemas, {costs.refused} refused; {cached.entries} kept, {cached.evictions} evicted",
        *costs.told(),
    ]
    show([bound_table("Constraints", bounds)], notes, {"bounds": bounds, "notes": notes}, as_json=json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) else 1)


class Costs:
    """Times in seconds, over all schemas so far."""

    def __init__(self) -> None:
        self.compiles: list[float] = []
        self.first_masks: list[float] = []
        """From a schema to the first mask of its document."""
        self.masks: list[float] = []
        self.refused = 0

    def observe(self, compiler: GrammarCompiler, tokenizer: "Tokenizer", vocabulary: int, row: dict[str, Any]) -> None:
        """Compile one schema and walk the documents that it allows."""
        begun = time.perf_counter()
        try:
            grammar = compiler.compile(ConstraintSpec(SpecKind.JSON_SCHEMA, json_text.dumps(row["schema"])))
        except GrammarError as error:
            self.refused += 1
            say(f"refused: {row['name']}: {error}")
            return
        self.compiles.append(time.perf_counter() - begun)
        words = np.zeros(-(-vocabulary // 32), dtype=np.int32)
        for place, test in enumerate(test for test in row["tests"] if test["valid"]):
            self._walk(grammar, tokenizer.encode(json_text.dumps(test["data"]), special=False), words)
            if place == 0:
                self.first_masks.append(self.compiles[-1] + self._first)

    def _walk(self, grammar: Grammar, tokens: list[int], words: MaskWords) -> None:
        matcher = grammar.matcher()
        for place, token in enumerate(tokens):
            begun = time.perf_counter()
            matcher.fill(words)
            self.masks.append(time.perf_counter() - begun)
            if place == 0:
                self._first = self.masks[-1]
            if not matcher.accept(token):  # a key out of the schema's order, another spelling: the rest tells nothing
                break

    def told(self) -> list[str]:
        """The times, for people."""
        named = (("compile", self.compiles), ("schema to first mask", self.first_masks), ("one mask", self.masks))
        return [
            f"{name}: p50 {_ms(values, 0.5)}, p99 {_ms(values, 0.99)}, most {_ms(values, 1.0)}"
            for name, values in named
        ]


def _ms(values: list[float], share: float) -> str:
    value = percentile(values, share)
    return "-" if value is None else f"{1e3 * value:.2f} ms"


def _only(value: float) -> Spread:
    return Spread(value, value, value)
