"""Opening a model's configuration and building its skeleton; refusing what the engine cannot offload."""

from __future__ import annotations

import copy
import difflib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from engine.errors import CheckpointError, UnsupportedModelError
from engine.families import MoELayer, find_moe_layers

_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_NAMED_MODEL_TYPES = 12


def open_config(location: Path) -> PreTrainedConfig:
    """The transformers configuration of a model folder, or in a file such as its config.json.

    Raises CheckpointError if config.json is missing or unreadable, UnsupportedModelError if the installed
    transformers has no causal language model of that type or the checkpoint is quantised.
    """
    file = location / "config.json" if location.is_dir() else location
    try:
        raw = json.loads(file.read_text())
        model_type = str(raw["model_type"])
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{location}: no config.json, so this is no model folder; give the folder that holds one."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: not a model configuration ({error!r}); download it again.") from error
    if model_type not in CONFIG_MAPPING_NAMES:
        reason = "needs its own code (trust_remote_code)" if "auto_map" in raw else "is unknown"
        raise UnsupportedModelError(
            f"{location}: model type {model_type!r} {reason}; transformers {transformers.__version__} lacks it. "
            + _what_works(model_type)
        )
    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=False)
    except (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file}: not a configuration of {model_type} ({reason}); download it again.") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{location}: {model_type} is no causal language model. " + _what_works(model_type))
    if not model_class(config)._can_set_experts_implementation():
        raise _unsupported(config, str(location))
    if getattr(config, "quantization_config", None):
        method = raw.get("quantization_config", {}).get("quant_method", "unknown method")
        raise UnsupportedModelError(
            f"{location}: the checkpoint is quantised ({method}); finemoe keeps weights as they are and reads "
            "float32, bfloat16 or float16 ones, so give such a version of the model."
        )
    return config


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The causal language model class of a configuration that ``open_config`` accepted."""
    chosen = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return chosen[0] if isinstance(chosen, tuple) else chosen


def build_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model on the meta device: all names, shapes and dtypes, no memory."""
    try:
        with torch.device("meta"):
            # A copy, because transformers writes dtype and implementations into the configuration it is given.
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    except (AssertionError, AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{config.name_or_path}: config.json describes no {config.model_type} that can be built "
            f"({type(error).__name__}: {error}); check it against the model's original."
        ) from error


def require_moe_layers(skeleton: PreTrainedModel, name: str) -> tuple[MoELayer, ...]:
    """The MoE layers of a skeleton; raises UnsupportedModelError, naming the family, if the engine cannot run them.

    Raises CheckpointError if the configuration's K is not among 1..J.
    """
    config = skeleton.config
    layers = find_moe_layers(skeleton)
    if not layers:
        raise _unsupported(config, name)
    shapes = {(layer.num_experts, layer.top_k) for layer in layers}
    if len(shapes) > 1:
        listed = ", ".join(f"{experts} top-{top_k}" for experts, top_k in sorted(shapes))
        raise UnsupportedModelError(
            f"{name}: MoE layers of {config.model_type} differ in experts ({listed}); expert maps need equal layers."
        )
    ((experts, top_k),) = shapes
    if not 1 <= top_k <= experts:
        raise CheckpointError(
            f"{name}: config.json has a token take {top_k} of a layer's {experts} experts; check it against the "
            "model's original."
        )
    return layers


def supported_model_types() -> tuple[str, ...]:
    """Model types of the installed transformers whose code uses the experts interface, in alphabetical order."""
    models = Path(transformers.__file__).parent / "models"
    return tuple(
        model_type
        for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        if any(
            "@use_experts_implementation" in file.read_text(encoding="utf-8")
            for file in (models / model_type_to_module_name(model_type)).glob("modeling_*.py")
        )
    )


def _unsupported(config: PreTrainedConfig, name: str) -> UnsupportedModelError:
    experts = _expert_count(config)
    reason = (
        f"has {experts} experts a layer, but its family does not run them through transformers' experts interface"
        if experts > 1
        else "is a dense model, there are no experts to offload"
    )
    return UnsupportedModelError(f"{name}: {config.model_type} {reason}. " + _what_works(config.model_type))


def _what_works(model_type: str) -> str:
    """One sentence with the supported model types, the closest names first."""
    supported = supported_model_types()
    close = difflib.get_close_matches(model_type, supported, n=_NAMED_MODEL_TYPES // 2, cutoff=0.5)
    named = sorted([*close, *(other for other in supported if other not in close)][:_NAMED_MODEL_TYPES])
    return f"Model types that work: {', '.join(named)} and {len(supported) - len(named)} more."


def _expert_count(config: Any) -> int:
    """The largest number of experts a configuration or one of its parts speaks of."""
    parts = [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]
    counts = [getattr(part, attribute, None) for part in parts for attribute in _EXPERT_COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)
