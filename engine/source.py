"""What a model name stands for: files, configuration, and the fingerprint that its expert maps belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from engine.architecture import build_skeleton, open_config, require_moe_layers
from engine.errors import CheckpointError
from engine.fingerprint import ModelFingerprint
from engine.hub import find_model_folder
from engine.shards import INDEX_NAME, Shard, find_shards, read_shard

_VOLATILE_FIELDS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded; nothing of its weights is in memory yet.

    Attributes:
        name: the model as the user named it.
        folder: local folder with its files.
        config: its transformers configuration.
        shards: its safetensors files, headers checked.
        fingerprint: identity for stores of expert maps; the same wherever the folder lies.
        context_length: tokens that a sequence may have; None where the configuration sets no bound.
    """

    name: str
    folder: Path
    config: PreTrainedConfig
    shards: tuple[Path, ...]
    fingerprint: ModelFingerprint
    context_length: int | None


def resolve_model(name: str) -> ModelSource:
    """Find a model by name (``demo``, a folder, a hub id), check its files and compute its fingerprint.

    Reads configuration and headers only. Raises ModelNotFoundError, UnsupportedModelError or CheckpointError.
    """
    folder = find_model_folder(name)
    try:
        return _read_source(name, folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: cannot be read ({error.strerror or error}).") from error


def _read_source(name: str, folder: Path) -> ModelSource:
    config = open_config(folder)
    shards = [read_shard(file) for file in find_shards(folder)]
    skeleton = build_skeleton(config, torch.bfloat16)
    layers = require_moe_layers(skeleton, name)
    text_config = config.get_text_config()
    fingerprint = ModelFingerprint(
        architecture=type(skeleton).__name__,
        layers=len(layers),
        experts=layers[0].num_experts,
        top_k=layers[0].top_k,
        hidden_size=skeleton.get_input_embeddings().embedding_dim,
        config_hash=_hash_config(folder / "config.json"),
        weights_hash=_hash_weights(folder, shards),
        tokenizer_hash=_hash_files(folder / file for file in _TOKENIZER_FILES),
    )
    return ModelSource(
        name=name,
        folder=folder,
        config=config,
        shards=tuple(shard.file for shard in shards),
        fingerprint=fingerprint,
        context_length=getattr(text_config, "max_position_embeddings", None),
    )


def _hash_config(file: Path) -> str:
    """Hash of a configuration file without what depends on who saved it, when, where and in which precision."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key not in _VOLATILE_FIELDS}
        return value

    return _digest([json.dumps(strip(json.loads(file.read_text())), sort_keys=True).encode()])


def _hash_weights(folder: Path, shards: Iterable[Shard]) -> str:
    """Hash of the safetensors index, where there is one, and of every shard's header."""
    index = folder / INDEX_NAME
    parts = [index.read_bytes()] if index.is_file() else []
    return _digest([*parts, *(shard.header for shard in shards)])


def _hash_files(files: Iterable[Path]) -> str:
    """Hash of the names and contents of those files that exist."""
    return _digest(part for file in files if file.is_file() for part in (file.name.encode(), file.read_bytes()))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]
