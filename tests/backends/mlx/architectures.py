"""A tiny configuration of every text architecture in mlx-lm, and a random model of it whose output is varied.

Every kind of layer that an architecture has is present, and what only long prompts reach in a real model is reached
within a hundred tokens: sliding windows and attention chunks hold 16 tokens, sparse attention picks 16.
"""

import copy
import importlib
import math
import re
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

VOCABULARY = 128
SLIDING_WINDOW = 16

Config = dict[str, Any]

# Fields that an architecture does not know are ignored, so what several ones share under different names is given in
# all of them.
_BASE: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
}
_GPT: Config = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_inner": 96,
    "n_head": 4,
    "n_kv_heads": 2,
    "n_positions": 4096,
    "n_ctx": 4096,
    "block_size": 4096,
    "rotary_dim": 8,
    "rope_theta": 10000.0,
    "layer_norm_epsilon": 1e-5,
    "layer_norm_eps": 1e-5,
}
_MIXED: Config = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": SLIDING_WINDOW,
    "sliding_window_pattern": 2,
}
# The first layer is dense, the second one chooses 2 of 4 experts.
_EXPERTS: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "mlp_only_layers": [0],
    "mlp_layer_types": ["dense", "sparse"],
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "score_function": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_enable_expert_bias": True,
}
_LATENT: Config = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_INDEXED: Config = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 16}
_YARN: Config = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_LONG_ROPE: Config = {
    "type": "longrope",
    "original_max_position_embeddings": 2048,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0],
    "short_mscale": 1.1,
    "long_mscale": 1.2,
}
_ROPE_BY_LAYER: Config = {
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        "full_attention": {"rope_theta": 100000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    },
}
_STATE_SPACE: Config = {
    "state_size": 16,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_conv_bias": True,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_expand": 2,
}
_DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "full_attention_interval": 2,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_SHORT_CONVOLUTION: Config = {
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_bias": True,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "use_expert_bias": True,
}
_GRANITE: Config = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}
_LONGCAT: Config = {
    "attention_method": "MLA",
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 64,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
# The last two of four layers attend to the keys and values of the first two.
_SHARED: Config = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": SLIDING_WINDOW,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "final_logit_softcapping": 30.0,
}
_CAPPED: Config = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 16.0,
}


def _wrapped(kind: str, text: Config) -> Config:
    """The configuration of a model for text and images, of which mlx-lm runs the text part."""
    return {"vocab_size": VOCABULARY, "text_config": {"model_type": kind} | text}


_GEMMA3 = _BASE | _MIXED | {"query_pre_attn_scalar": 16.0}
_LFM2 = _BASE | _SHORT_CONVOLUTION
_DEEPSEEK = _BASE | _EXPERTS | _LATENT | {"rope_scaling": _YARN}
_MINISTRAL3 = _BASE | _MIXED | {"rope_parameters": _YARN}
_QWEN3_5 = _BASE | _DELTA
_QWEN3_MOE = _BASE | _EXPERTS
_GEMMA4 = _BASE | _SHARED | {"global_head_dim": 32, "num_global_key_value_heads": 1}

ARCHITECTURES: dict[str, Config] = {
    "Klear": _BASE | _EXPERTS,
    "afm7": {
        "vocab_size": VOCABULARY,
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 1.5,
    },
    "afmoe": _BASE | _EXPERTS | _MIXED,
    "apertus": _BASE | {"post_norm": True, "qk_norm": True},
    "baichuan_m1": _BASE
    | {
        "sliding_window": SLIDING_WINDOW,
        "sliding_window_layers": [0],
        "num_swa_attention_heads": 2,
        "num_swa_key_value_heads": 1,
        "conv_window": 2,
    },
    "bailing_hybrid": _BASE | _EXPERTS | _LATENT | {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe": _BASE | _EXPERTS,
    "bailing_moe_linear": _BASE | _EXPERTS | {"num_key_value_heads": 4, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": _BASE | _EXPERTS | _LATENT | {"layer_group_size": 2, "short_conv_kernel_size": 4},
    "bitnet": _BASE,
    "cohere": _BASE | {"logit_scale": 1.0},
    "cohere2": _BASE | _MIXED | {"logit_scale": 1.0},
    "dbrx": {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek": _BASE | _EXPERTS,
    "deepseek_v2": _DEEPSEEK | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK | _INDEXED,
    # Layer 0 has only the window, 1 compresses and indexes, 2 uses what 1 chose, 3 chooses among 1's candidates.
    "deepseek_v41": _BASE
    | _EXPERTS
    | _LATENT
    | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": SLIDING_WINDOW,
        "compress_ratios": (0, 4, 4, 4),
        "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1, 3),
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 5,
        "candidate_block_size": 2,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
    },
    "dots1": _BASE | _EXPERTS,
    "ernie4_5": _BASE,
    "ernie4_5_moe": _BASE
    | _EXPERTS
    | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "exaone": _BASE | {"num_layers": 2},
    "exaone4": _BASE | _MIXED | {"sliding_window_pattern": "LG"},
    "exaone_moe": _BASE | _EXPERTS | _MIXED | {"is_moe_layer": [False, True]},
    "falcon_h1": _BASE | _STATE_SPACE | {"mamba_rms_norm": True, "lm_head_multiplier": 1.0},
    "gear": _BASE
    | _CAPPED
    | {
        "num_hidden_layers": 3,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "sliding_window": SLIDING_WINDOW,
    },
    "gemma": _BASE,
    "gemma2": _BASE | _CAPPED,
    "gemma3": _wrapped("gemma3_text", _GEMMA3),
    "gemma3_text": _GEMMA3,
    "gemma3n": _wrapped(
        "gemma3n_text",
        _BASE
        | _SHARED
        | {
            "rope_local_base_freq": 1000.0,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "laurel_rank": 8,
        },
    ),
    "gemma4": _wrapped(
        "gemma4_text",
        _GEMMA4
        | _EXPERTS
        | {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4_text": _GEMMA4,
    "glm": _BASE,
    "glm4": _BASE,
    "glm4_moe": _BASE | _EXPERTS,
    "glm4_moe_lite": _BASE | _EXPERTS | _LATENT,
    "glm_moe_dsa": _BASE
    | _EXPERTS
    | _LATENT
    | _INDEXED
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": _BASE | {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": _BASE | _EXPERTS | _MIXED | {"rope_scaling": _YARN},
    "gptj": _GPT,
    "granite": _BASE | _GRANITE,
    "granitemoe": _BASE | _EXPERTS | _GRANITE,
    "granitemoehybrid": _BASE | _EXPERTS | _STATE_SPACE | _GRANITE | {"layer_types": ["mamba", "attention"]},
    "helium": _BASE,
    "hunyuan": _BASE
    | _EXPERTS
    | {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 4.0},
    },
    "hunyuan_v1_dense": _BASE | {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 4.0}},
    "internlm2": _BASE,
    "internlm3": _BASE | {"qkv_bias": True},
    "iquestloopcoder": _BASE | {"loop_num": 2, "loop_window_size": SLIDING_WINDOW},
    "jamba": _BASE
    | _EXPERTS
    | _STATE_SPACE
    | {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k25": _wrapped("deepseek_v3", _DEEPSEEK),
    "kimi_k3": _wrapped(
        "kimi_linear",
        _BASE
        | _EXPERTS
        | _LATENT
        | {
            "num_hidden_layers": 3,
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2],
                "gate_lower_bound": -5.0,
            },
            "attn_res_block_size": 2,
            "mla_use_output_gate": True,
            "num_expert_group": 2,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
        },
    ),
    "kimi_linear": _BASE
    | _EXPERTS
    | _LATENT
    | {
        "model_max_length": 4096,
        "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1]},
        "num_expert_group": 2,
    },
    "kimi_vl": _wrapped("deepseek_v3", _DEEPSEEK),
    "laguna": _BASE
    | _EXPERTS
    | _MIXED
    | _ROPE_BY_LAYER
    | {
        "num_attention_heads_per_layer": [4, 2],
        "moe_router_score_func": "sqrtsoftplus",
        "moe_router_logit_softcapping": 30.0,
    },
    "lfm2": _LFM2,
    "lfm2-vl": _wrapped("lfm2", _LFM2),
    "lfm2_moe": _LFM2 | _EXPERTS,
    "lille-130m": _GPT,
    "llama": _BASE | _MIXED,
    # Only the fourth layer sees more than its chunk; its temperature changes after every 32 tokens.
    "llama4": _wrapped(
        "llama4_text",
        _BASE
        | _EXPERTS
        | {
            "num_hidden_layers": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": SLIDING_WINDOW,
            "floor_scale": 32,
        },
    ),
    "llama4_text": _BASE | {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0]},
    "longcat_flash": _BASE | _EXPERTS | _LATENT | _LONGCAT,
    "longcat_flash_ngram": _BASE
    | _EXPERTS
    | _LATENT
    | _LONGCAT
    | {"ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": _BASE | _STATE_SPACE | {"time_step_rank": 4},
    "mamba2": _BASE
    | _STATE_SPACE
    | {"num_heads": 8, "intermediate_size": 128, "time_step_limit": (0.001, 100.0), "time_step_rank": "auto"},
    "mellum": _BASE | _EXPERTS | _MIXED | _ROPE_BY_LAYER,
    "mimo": _BASE,
    "mimo_v2_flash": _BASE
    | _EXPERTS
    | {
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "sliding_window_size": SLIDING_WINDOW,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "head_dim": 32,
        "v_head_dim": 16,
        "swa_head_dim": 32,
        "swa_v_head_dim": 16,
        "swa_rope_theta": 1000.0,
        "attention_value_scale": 0.7,
        "layernorm_epsilon": 1e-5,
    },
    "minicpm": _BASE | {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 4.0},
    "minicpm3": _BASE
    | _LATENT
    | {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 4.0, "rope_scaling": _LONG_ROPE},
    "minimax": _BASE | _EXPERTS,
    "minimax_m3_vl": _wrapped(
        "minimax_m3",
        _BASE
        | _EXPERTS
        | {
            "intermediate_size": 64,
            "dense_intermediate_size": 96,
            "layer_types": ["full_attention", "sparse_attention"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        },
    ),
    "ministral3": _MINISTRAL3,
    "mistral3": _wrapped("ministral3", _BASE | {"rope_parameters": _YARN}),
    "mistral4": _BASE | _EXPERTS | _LATENT | {"rope_parameters": _YARN},
    "mixtral": _BASE | _EXPERTS,
    "muse_glimmer": _BASE | _MIXED | {"output_multiplier": 1.0, "final_logit_softcapping": 30.0},
    "muse_spark": _wrapped(
        "muse_spark_text",
        _BASE
        | _EXPERTS
        | _MIXED
        | {
            "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0],
            "mlp_layer_types": ["sparse", "sparse"],
            "num_shared_experts": 0,
            "moe_hidden_size": 32,
            "output_multiplier": 1.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "nanbeige": _BASE | {"num_loops": 2},
    "nanochat": _BASE,
    "nemotron": _BASE | {"hidden_act": "relu2"},
    "nemotron-nas": _BASE
    | {
        "num_hidden_layers": 4,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        ],
    },
    "nemotron_h": _BASE
    | _EXPERTS
    | _STATE_SPACE
    | {"num_hidden_layers": 4, "hybrid_override_pattern": ["M", "*", "-", "E"]},
    "olmo": {
        "vocab_size": VOCABULARY,
        "embedding_size": VOCABULARY,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "mlp_hidden_size": 192,
    },
    "olmo2": _BASE,
    "olmo3": _BASE | _MIXED,
    "olmo_hybrid": _BASE | _DELTA | {"layer_types": ["linear_attention", "full_attention"]},
    "olmoe": _BASE | _EXPERTS,
    "openelm": {
        "vocab_size": VOCABULARY,
        "model_dim": 64,
        "head_dim": 16,
        "num_transformer_layers": 2,
        "num_query_heads": [4, 8],
        "num_kv_heads": [2, 4],
        "ffn_multipliers": [1.0, 2.0],
        "ffn_dim_divisor": 32,
    },
    "phi": _BASE,
    "phi3": _BASE,
    # Its code masks tokens from 100,256 to 100,351 by number: a smaller vocabulary is written to beyond its end.
    "phi3small": _BASE
    | {
        "vocab_size": 100352,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "dense_attention_every_n_layers": 2,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 4,
    },
    "phimoe": _BASE | _EXPERTS | {"rope_scaling": _LONG_ROPE},
    "phixtral": {
        "num_vocab": VOCABULARY,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
    },
    "pixtral": _wrapped("llama", _BASE),
    "plamo": _BASE | {"n_shared_head": 2},
    "plamo2": _BASE | {"hidden_size_per_head": 16, "mamba_d_state": 16, "mamba_num_heads": 4},
    "plamo3": _BASE | _MIXED,
    # The rotation needs 512 inputs at least: only a feed-forward layer is that wide.
    "prism_hadamard_qwen35": _wrapped("qwen3_5", _QWEN3_5 | {"hidden_size": 128, "intermediate_size": 512})
    | {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.embed_tokens", "embedding": True, "dtype": "float16", "block": 0},
            {"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 512},
            {"path": "model.layers.1.mlp.up_proj", "embedding": False, "dtype": "float16", "block": 0},
        ],
    },
    "qwen": _BASE | {"kv_channels": 16, "intermediate_size": 192},
    "qwen2": _BASE,
    "qwen2_moe": _BASE | _EXPERTS,
    "qwen2_vl": _wrapped("qwen2", _BASE),
    "qwen3": _BASE | {"tie_word_embeddings": True},
    "qwen3_5": _wrapped("qwen3_5", _QWEN3_5),
    "qwen3_5_moe": _wrapped("qwen3_5_moe", _QWEN3_5 | _EXPERTS),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN3_5 | _EXPERTS,
    "qwen3_vl": _wrapped("qwen3", _BASE),
    "qwen3_vl_moe": _wrapped("qwen3_moe", _QWEN3_MOE),
    "recurrent_gemma": _BASE
    | {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": SLIDING_WINDOW,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    "rwkv7": _BASE | {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "seed_oss": _BASE | {"attention_bias": True},
    "smollm3": _BASE | {"no_rope_layers": [1, 0]},
    "solar_open": _BASE | _EXPERTS,
    "spark2_5": _BASE | _MIXED | _ROPE_BY_LAYER,
    "stablelm": _BASE | {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": _BASE,
    "step3p5": _BASE
    | _MIXED
    | {
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
        "partial_rotary_factors": [1.0, 0.5],
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "moe_layers_enum": "1",
        "swiglu_limits": [0.0, 7.0],
    },
    "talkie": _BASE,
    "telechat3": _BASE,
    "youtu_llm": _BASE | _LATENT,
}

NOT_ON_CPU: dict[str, str] = {
    "bitnet": "[metal_kernel] No Metal back-end.",
    "muse_spark": "[metal_kernel] No Metal back-end.",
    "olmo": "SystemExit: 1 (without hf_olmo; with it, Cannot perform inplace addition on an mlx.core.array and str)",
}
"""Architectures that do not run here, and what mlx or mlx-lm says about it."""

ATTENTION, FEED_FORWARD, HEAD = "attention", "feed_forward", "head"
QUERY_KEY_NORM, POST_NORM = "query_key_norm", "post_norm"
GAINS = {ATTENTION: 4.0, FEED_FORWARD: 4.0, HEAD: 4.0, QUERY_KEY_NORM: 2.0, POST_NORM: 1.0}
"""How much larger than mlx's initial values the weights are. Embeddings are left small beside what the layers add, else
a model repeats the token that it just read; where queries and keys are normalised, their norms' weights make attention
look at anything in particular.
"""
_OWN_GAINS: dict[str, dict[str, float]] = {
    "cohere": {QUERY_KEY_NORM: 4.0},
    "gemma2": {POST_NORM: 4.0},
    "gemma3n": {POST_NORM: 4.0},
    "gpt2": {ATTENTION: 8.0},
    "nemotron_h": {ATTENTION: 1.5},
    "recurrent_gemma": {ATTENTION: 2.0},
    # Attention and feed-forward layers side by side.
    "gpt_neox": {ATTENTION: 8.0},
    "gptj": {ATTENTION: 8.0},
    "phi": {ATTENTION: 8.0},
    # Queries and keys are normalised without weights: attention is near an average, which hardly changes by a token.
    "llama4_text": {FEED_FORWARD: 16.0},
    "nanochat": {ATTENTION: 2.5, FEED_FORWARD: 6.0},
    "talkie": {FEED_FORWARD: 16.0},
}
NOISE = 0.2
"""Standard deviation of what every vector gets added: norms, biases, sinks, the corrections of routers."""

SLOWNESS = 5.0
"""What is taken from the biases under the decay of recurrent states: they last for tens of tokens, not for a few."""

_DECAY = re.compile(r"dt_bias|dt_proj\.bias|recurrent_param|w_lora\.lora\.2\.bias")
_KINDS = (
    (re.compile(r"q(uery)?_?(layer)?norm|k(ey)?_?(layer)?norm|\b[qk]_weight"), QUERY_KEY_NORM),
    (re.compile(r"post_\w+_(layer)?norm"), POST_NORM),
    (re.compile(r"\b(lm_head|embed_out|output\.weight)"), HEAD),
    (re.compile(r"attn|attention|mixer|temporal_block"), ATTENTION),
)


def tiny_model(name: str, seed: int = 0, **config: Any) -> nn.Module:
    """An evaluated float32 model; the same one for the same arguments. `config` replaces fields of the architecture."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    fields = copy.deepcopy(ARCHITECTURES[name]) | config
    if "text_config" in fields:
        fields["text_config"] |= config
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict({"model_type": name} | fields))
    gains = GAINS | _OWN_GAINS.get(name, {})
    kept = _kept(model)

    def lively(path: str, weight: mx.array) -> mx.array:
        return weight if path in kept else _lively(path, weight, gains)

    model.update(cast(dict[str, Any], tree_map_with_path(lively, model.parameters())))
    model.eval()
    mx.eval(model.parameters())
    return model


def _kept(model: nn.Module) -> set[str]:
    """The parameters that need no gain: embeddings, and the packed weights, which are filled here."""
    kept: set[str] = set()
    for path, layer in model.named_modules():
        if "scales" in layer:
            _fill_codes(layer)
            kept.update(f"{path}.{leaf}" for leaf in layer.parameters())
        elif isinstance(layer, nn.Embedding):
            kept.add(f"{path}.weight")
    return kept


def _fill_codes(layer: nn.Module) -> None:
    """Random 2-bit codes that stand for weights around zero, and random signs of the inputs."""
    layer.weight = mx.random.randint(0, 2**32 - 1, layer.weight.shape, mx.uint32)
    layer.scales = mx.full(layer.scales.shape, 1 / 16, layer.scales.dtype)
    layer.biases = -1.5 * layer.scales
    if "signs" in layer:
        layer.signs = mx.where(mx.random.bernoulli(0.5, layer.signs.shape), 1.0, -1.0)


def _lively(path: str, weight: mx.array, gains: dict[str, float]) -> mx.array:
    kind = next((kind for pattern, kind in _KINDS if pattern.search(path)), FEED_FORWARD)
    if kind == QUERY_KEY_NORM:  # Those that start at 0 are added to 1, but for cohere's.
        weight = weight * gains[kind] if weight.any() else weight + gains[kind] - 1
    elif kind == POST_NORM:
        weight = weight * gains[kind]
    elif max(weight.shape, default=1) < weight.size and "A_log" not in path:
        if not weight.any():
            weight = mx.random.normal(weight.shape) / math.sqrt(math.prod(weight.shape[1:]))
        return weight * gains[kind]
    elif _DECAY.search(path):
        weight = weight - SLOWNESS
    return weight + NOISE * mx.random.normal(weight.shape)
