"""A checkpoint larger than any machine: its headers are whole, its weights are holes that take no space on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from engine.architecture import build_skeleton
from tests.engine.tiny_models import byte_level_tokenizer, tiny_config

_HIDDEN, _WIDTH = 8192, 1 << 19


def write_huge_checkpoint(folder: Path) -> Path:
    """Write a model of 1.9 TiB in bfloat16, stored fused; returns its folder."""
    config = tiny_config(
        "mixtral", hidden_size=_HIDDEN, intermediate_size=_WIDTH, num_hidden_layers=10, dtype=torch.bfloat16
    )
    config.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    entries, end = {}, 0
    for name, parameter in build_skeleton(config, torch.bfloat16).named_parameters():
        entries[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [end, end + parameter.nbytes]}
        end += parameter.nbytes
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        os.truncate(file.fileno(), 8 + len(header) + end)
    return folder
