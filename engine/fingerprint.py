"""The identity of a model, which a store of expert maps belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What must agree for expert maps of one model to be of use to another.

    Attributes:
        architecture: class name of the causal language model.
        layers: L, the number of MoE layers (dense layers are not counted).
        experts: J, experts a layer.
        top_k: K, experts routed a token.
        hidden_size: h, length of a semantic embedding.
        config_hash: hash of the configuration without fields that change no result.
        weights_hash: hash of the safetensors index and of every shard's header.
        tokenizer_hash: hash of the tokenizer's files.
    """

    architecture: str
    layers: int
    experts: int
    top_k: int
    hidden_size: int
    config_hash: str
    weights_hash: str
    tokenizer_hash: str

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that name the model in stores and reports."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelFingerprint:
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})

    def same_shape(self, other: ModelFingerprint) -> bool:
        """Whether maps and embeddings of the two models have equal shapes (L, J and h agree)."""
        return (self.layers, self.experts, self.hidden_size) == (
            other.layers,
            other.experts,
            other.hidden_size,
        )

    def describe(self) -> str:
        return f"{self.architecture} {self.layers}x{self.experts} top-{self.top_k} ({self.digest})"
