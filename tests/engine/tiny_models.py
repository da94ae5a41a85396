"""Tiny random MoE models of many families, saved as checkpoints that the engine opens like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.architecture import supported_model_types

VOCABULARY = 320
EOS_ID = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": EOS_ID,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}
_LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24, "n_shared_experts": 1}
_SMALL = {"num_experts": 8, "moe_intermediate_size": 24}

_FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_SMALL, "num_dense_layers": 1, "sliding_window": 64, "global_attn_every_n_layers": 2},
    "aria_text": {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1},
    "deepseek_v2": {**_GROUPED, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1, "head_dim": 8},
    "deepseek_v3": {**_GROUPED, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "dots1": {**_GROUPED, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    "exaone_moe": {**_SMALL, "n_group": 1, "topk_group": 1, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "flex_olmo": {"num_experts": 8},
    "gemma4_text": {
        **_SMALL,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm4_moe": {**_GROUPED, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 64},
    "granitemoe": {"num_local_experts": 8},
    "granitemoehybrid": {
        "num_local_experts": 8,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "jamba": {
        "num_experts": 8,
        "num_hidden_layers": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {
        **_SMALL,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "use_expert_bias": True,
    },
    "minimax": {
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 16,
    },
    "minimax_m2": {"num_local_experts": 8, "rotary_dim": 8},
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
    "nemotron_h": {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "olmoe": {"num_experts": 8},
    "phimoe": {"num_local_experts": 8, "sliding_window": None},
    "qwen2_moe": {
        **_SMALL,
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {**_SMALL, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_next": {
        **_SMALL,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "solar_open": {**_GROUPED, "n_group": 1, "topk_group": 1},
}

TINY_FAMILIES: tuple[str, ...] = tuple(sorted(_FAMILIES.keys() & set(supported_model_types())))
"""The families that ``build_tiny_model`` can build with the installed transformers."""


def build_tiny_model(
    family: str,
    folder: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """Save a tiny random model of a family, with a byte-level tokenizer, and return its folder.

    ``changes`` override fields of the configuration.
    """
    config = tiny_config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _spread_weights(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a tiny model of a family; ``changes`` override its fields."""
    return CONFIG_MAPPING[family](**(_COMMON | _FAMILIES[family] | changes))


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes and three special tokens; any text survives encoding and decoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens(["<|end|>", "<|start|>", "<|pad|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>", pad_token="<|pad|>"
    )


def _spread_weights(model: torch.nn.Module) -> None:
    """Redraw what families initialise to constants or near zero, so that tokens differ and routing is diverse."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        leaf = name.rpartition(".")[2]
        if leaf in ("A_log", "dt_bias", "D", "inv_freq") or not tensor.is_floating_point():
            continue
        if "bias" in leaf or "sinks" in leaf:
            tensor.data.normal_(0.0, 0.1)
        elif "norm" in name or "scale" in leaf:
            tensor.data.uniform_(0.8, 1.2)
        elif tensor.dim() > 1:
            tensor.data.normal_(0.0, 1.0 if "embed" in name else tensor.shape[-1] ** -0.5)
