"""Synthetic shapes small enough to run at once, one a family: 3 layers, 6 experts, top 2."""

from __future__ import annotations

from typing import Any

from engine.synthetic import SyntheticShape

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 5000,
}

TINY = {
    "mixtral": SyntheticShape(
        "mixtral", {**_SMALL, "intermediate_size": 32, "num_local_experts": 6}, "intermediate_size"
    ),
    "qwen2_moe": SyntheticShape(
        "qwen2_moe",
        {**_SMALL, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 6},
        "moe_intermediate_size",
    ),
    "phimoe": SyntheticShape(
        "phimoe", {**_SMALL, "intermediate_size": 32, "num_local_experts": 6}, "intermediate_size"
    ),
    "qwen3_moe": SyntheticShape(
        "qwen3_moe", {**_SMALL, "moe_intermediate_size": 32, "num_experts": 6, "head_dim": 16}, "moe_intermediate_size"
    ),
}
