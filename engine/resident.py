"""A model as transformers itself runs it, all experts on the device: what every other figure is compared with."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from transformers import PreTrainedModel

from engine.architecture import model_class
from engine.budget import format_bytes
from engine.checkpoint import end_of_turn, load_tokenizer, quiet_transformers
from engine.devices import choose_device, choose_dtype, free_bytes
from engine.errors import CheckpointError, DeviceError
from engine.families import expert_parameters, is_experts_module
from engine.footprint import measure_model
from engine.generation import TokenLoop
from engine.observer import Iteration
from engine.source import ModelSource
from engine.steps import GenerationSettings, Step, Traffic


class ResidentModel:
    """Plain transformers behind the engine's token loop, so that both are timed by the same code.

    Attributes:
        default_implementation: the experts implementation that transformers chooses by itself.
        implementation: the one in use.
        expert_bytes: bytes of all experts.
    """

    def __init__(self, source: ModelSource, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self.default_implementation = self.implementation = str(model.config._experts_implementation)
        self.expert_bytes = sum(
            parameter.nbytes
            for module in model.modules()
            if is_experts_module(module)
            for parameter in expert_parameters(module).values()
        )
        tokenizer = load_tokenizer(source)
        nobody = _Nobody()
        self._loop = TokenLoop(
            model, tokenizer, nobody, nobody, end_of_turn(model, tokenizer), source.context_length, device
        )

    @classmethod
    def open(cls, source: ModelSource, *, device: str = "auto", dtype: str = "auto") -> ResidentModel:
        """Load a model whole.

        Raises:
            DeviceError: it does not fit the device.
            CheckpointError: transformers cannot load the weights.
        """
        chosen, precision = choose_device(device), choose_dtype(dtype, source.config)
        size = measure_model(source.config, precision, source.name)
        free = free_bytes(chosen)
        if free is not None and size.dense_bytes + size.experts_bytes > free:
            raise DeviceError(
                f"{source.name} takes {format_bytes(size.dense_bytes + size.experts_bytes)} with all its experts, and "
                f"{chosen} has {format_bytes(free)} free"
            )
        try:
            with quiet_transformers():
                model = model_class(source.config).from_pretrained(
                    source.folder,
                    config=source.config,
                    dtype=precision,
                    local_files_only=True,
                    use_safetensors=True,
                )
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{source.folder}: transformers cannot load the weights ({error}).") from error
        if chosen.type == "cpu":
            _own_experts(model)
        try:
            return cls(source, model.to(chosen).eval(), chosen)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{source.name}: the whole model does not fit on {chosen}") from error

    def use(self, implementation: str) -> None:
        """Run the experts by another implementation of transformers, such as ``eager``."""
        self._model.set_experts_implementation(implementation)
        self.implementation = implementation

    def generate(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> Generator[Step, None, None]:
        """Answer a batch of prompts; see ``TokenLoop.generate``. No step has expert traffic."""
        return self._loop.generate(prompts, settings)

    def drain(self) -> None:
        """Nothing runs beside the token loop."""


def _own_experts(model: PreTrainedModel) -> None:
    """Give the experts memory of their own.

    Left as loaded, they are views of the mapped file at whatever offset they have there, and a float32 product of the
    CPU's BLAS depends on that: eager then differs from itself in the last bit.
    """
    for module in model.modules():
        if is_experts_module(module):
            for parameter in expert_parameters(module).values():
                parameter.data = parameter.data.clone()


class _Nobody:
    """Listens to no iteration and has no traffic to tell of."""

    traffic = Traffic()

    def begin(self, iteration: Iteration) -> None:
        pass

    def settle_stalls(self) -> None:
        pass
