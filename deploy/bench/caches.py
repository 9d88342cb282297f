"""`caches`: what taking a draft back costs in every family of caches, and what a latent cache's wider window costs.

The models have random weights and the shape of small real ones. A recurrent state can be brought to the kept tokens in
three ways: the recurrent modules again over the kept rows (what the server does), the whole forward again over them, or
the kept tokens at the head of the next window, which then has no draft. All three are timed per token that comes out.
MLX is imported by the measurements only, after OpenBLAS.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.bench.options import Json, Pairs, say, warn_if_busy
from deploy.bench.report import Bound, bound_table, ratios, show
from deploy.bench.rounds import GREEDY, RAGGED
from scheduler.round import Window

if TYPE_CHECKING:
    from backends.mlx.verify import Forward

LANES, DRAFT, ROUNDS, CONTEXT = 8, 6, 8, 500
VOCABULARY = 8192
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_DELTA = {
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    "num_heads": 16,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "state_size": 64,
    "num_hidden_layers": 8,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": (0.001, 100.0),
    "time_step_rank": "auto",
}
_LATENT = {
    "num_hidden_layers": 4,
    "kv_lora_rank": 256,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": None,
    "first_k_dense_replace": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": _COMMON | {"num_hidden_layers": 6, "sliding_window": 512, "sliding_window_pattern": 3},
    "qwen3_5": _COMMON | _DELTA,
    "mamba2": _MAMBA,
    "deepseek_v3": _COMMON | _LATENT,
}


def caches(
    pairs: Pairs = 9,
    only: Annotated[str, typer.Option(help="Run the cases whose name holds this.")] = "",
    json: Json = False,
) -> None:
    """Time rounds over every family of caches, without a server and without a model on disk."""
    warn_if_busy()
    from backends.mlx.runtime import load_blas

    load_blas()
    bounds: list[Bound] = []
    for measure in CASES:
        if only in (measure.__doc__ or ""):
            found = measure(pairs)
            bounds += found
            for bound in found:
                say(f"{bound.claim}: {bound.measured}")
    show([bound_table("Caches (time over time)", bounds)], [], {"bounds": bounds}, as_json=json)
    raise typer.Exit(0 if all(bound.holds for bound in bounds) else 1)


def _forward(name: str) -> "Forward":
    import mlx.core as mx

    from backends.mlx.build import build_forward

    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name} | MODELS[name]))
    model.eval()
    mx.eval(model.parameters())
    return build_forward(model, VOCABULARY, name)


class _Lanes:
    """Lanes of one forward that grow by what they keep."""

    def __init__(self, forward: "Forward", lanes: int = LANES, context: int = CONTEXT) -> None:
        self._forward = forward
        self._context = context
        self._slots = range(lanes)
        self.starts = [0] * lanes

    def fill(self) -> None:
        """Begin anew, with so many tokens cached in each lane."""
        self._forward.reset()
        for start in range(0, self._context, 200):
            for slot in self._slots:
                self.run([self.window(slot, start, real=min(200, self._context - start), samples=False)])
                self._forward.keep({})
        self.starts = [self._context] * len(self._slots)

    def window(self, slot: int, start: int, *, real: int = 1, draft: int = 0, samples: bool = True) -> Window:
        tokens = tuple((7919 * (start + place) + slot) % VOCABULARY for place in range(real + draft))
        reach = start + real + draft + 1
        return Window(slot, str(slot), start, tokens[:real], samples, GREEDY, reach, draft=tokens[real:])

    def run(self, windows: Sequence[Window]) -> None:
        """One forward, read."""
        import mlx.core as mx

        verified = self._forward.run(windows, None)
        mx.eval(self._forward.buffers() if verified.logits is None else verified.logits)

    def draft(self, length: int) -> None:
        """One round in which all lanes draft."""
        self.run([self.window(slot, self.starts[slot], draft=length) for slot in self._slots])

    def keep(self, drafts: Sequence[int]) -> None:
        """Each lane keeps so many tokens of its draft."""
        self.starts = [start + 1 + kept for start, kept in zip(self.starts, drafts, strict=True)]
        self._forward.keep(dict(enumerate(self.starts)))

    def take_back(self) -> None:
        """All lanes go back to before their windows."""
        self._forward.keep(dict(enumerate(self.starts)))

    def again(self, rows: Sequence[int], *, samples: bool = False) -> None:
        """Feed so many tokens of each lane, once more, without a draft."""
        windows = [self.window(slot, self.starts[slot], real=rows[slot], samples=samples) for slot in self._slots]
        self.run(windows)
        self._forward.keep({})
        self.starts = [window.end for window in windows]


def _shifted(turn: int) -> list[int]:
    """What lanes keep takes turns, so that all grow alike."""
    return [RAGGED[(slot + turn) % LANES] for slot in range(LANES)]


def _cut(lanes: _Lanes, drafts: Callable[[int], Sequence[int]]) -> int:
    """Rounds in which lanes keep so much of their drafts; the tokens that came out."""
    tokens = 0
    for turn in range(ROUNDS):
        kept = drafts(turn)
        lanes.draft(DRAFT)
        lanes.keep(kept)
        tokens += sum(kept) + LANES
    lanes.draft(0)  # what the cut left to be computed
    lanes.keep([0] * LANES)
    return tokens


def _whole_forward(lanes: _Lanes) -> int:
    tokens = 0
    for turn in range(ROUNDS):
        kept = _shifted(turn)
        lanes.draft(DRAFT)
        lanes.take_back()
        lanes.again([1 + accepted for accepted in kept])
        tokens += sum(kept) + LANES
    lanes.draft(0)
    lanes.keep([0] * LANES)
    return tokens


def _catching_up(lanes: _Lanes) -> int:
    tokens = 0
    for turn in range(ROUNDS):
        kept = _shifted(turn)
        lanes.draft(DRAFT)
        lanes.take_back()
        lanes.again([2 + accepted for accepted in kept], samples=True)  # and the newest token behind them
        tokens += sum(kept) + 2 * LANES
    return tokens


def _compare(
    claim: str, lanes: _Lanes, pairs: int, most: float, ours: Callable[[], int], theirs: Callable[[], int]
) -> Bound:
    """Seconds a token (what the two return), ours over theirs, taking turns on lanes that grow on."""
    lanes.fill()
    taken: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        for way, times in zip((ours, theirs), taken, strict=True):
            start = time.perf_counter()
            tokens = way()
            if pair:
                times.append((time.perf_counter() - start) / tokens)
    return Bound(claim, LANES, ratios(*taken), most, at_most=True)


def _attention(pairs: int) -> list[Bound]:
    """window: taking drafts back over keeping them, rows alike."""
    lanes = _Lanes(_forward("gemma3_text"))
    even = [3] * LANES
    return [
        _compare(
            "sliding windows: ragged acceptance over even",
            lanes,
            pairs,
            1.03,
            lambda: _cut(lanes, _shifted),
            lambda: _cut(lanes, lambda _: even),
        ),
        _compare(
            "sliding windows: a round whose drafts are rejected over one whose drafts are kept",
            lanes,
            pairs,
            1.03,
            lambda: _cut(lanes, lambda _: [0] * LANES) and ROUNDS,
            lambda: _cut(lanes, lambda _: [DRAFT] * LANES) and ROUNDS,
        ),
    ]


def _states(pairs: int) -> list[Bound]:
    """recurrent: the three ways, per token, and the server's way over keeping all."""
    return _state(pairs, "qwen3_5", "gated delta and attention") + _state(pairs, "mamba2", "state space")


def _state(pairs: int, name: str, words: str) -> list[Bound]:
    lanes = _Lanes(_forward(name))
    return [
        _compare(
            f"{words}: a round that is cut over one that is kept whole",
            lanes,
            pairs,
            2.0,
            lambda: _cut(lanes, _shifted) and ROUNDS,
            lambda: _cut(lanes, lambda _: [DRAFT] * LANES) and ROUNDS,
        ),
        _compare(
            f"{words}: a token by the recurrence again over the whole forward again",
            lanes,
            pairs,
            1.0,
            lambda: _cut(lanes, _shifted),
            lambda: _whole_forward(lanes),
        ),
        _compare(
            f"{words}: a token by the recurrence again over catching up",
            lanes,
            pairs,
            1.1,
            lambda: _cut(lanes, _shifted),
            lambda: _catching_up(lanes),
        ),
    ]


def _latent(pairs: int) -> list[Bound]:
    """latent: 4 rows over one at 2,000 tokens."""
    forward = _forward("deepseek_v3")
    found = []
    for count in (1, 4):
        lanes = _Lanes(forward, count, 2000)
        lanes.fill()

        def wide(draft: int, lanes: _Lanes = lanes) -> int:
            for _ in range(6):
                lanes.draft(draft)
            return 6

        taken: tuple[list[float], list[float]] = ([], [])
        for pair in range(pairs + 1):
            for draft, times in zip((3, 0), taken, strict=True):
                start = time.perf_counter()
                wide(draft)
                if pair:
                    times.append(time.perf_counter() - start)
        claim = "latent attention: windows of 4 over windows of 1, 2,000 tokens"
        most = 1.5 if count == 1 else 2.0  # 16 rows over 2,000 keys are work for a CPU
        found.append(Bound(claim, count, ratios(*taken), most, at_most=True))
    return found


CASES: tuple[Callable[[int], list[Bound]], ...] = (_attention, _states, _latent)
