"""Whether decode steps are driven by the device or by the host, and why."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch

from engine.errors import CaptureError, UnsupportedModelError, UsageError
from engine.generation import TrafficMeter
from engine.host_steps import HostSteps, Steps
from engine.sampling import Sampler
from engine.steps import Traffic

if TYPE_CHECKING:
    from engine.device_decoder import DeviceDecoder


class ExecutorChoice(StrEnum):
    """Who drives decode steps: ``auto`` is the device wherever it can."""

    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


def choose_executor(name: str) -> ExecutorChoice:
    """An executor by name.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        return ExecutorChoice(name)
    except ValueError:
        raise UsageError(f"no executor {name!r}: give {', '.join(ExecutorChoice)}") from None


def drives_itself(choice: ExecutorChoice, device: torch.device) -> bool:
    """Whether the device is to drive decode steps, as far as can be told without a model.

    Raises:
        UsageError: it is to, but cannot on this device.
    """
    capable = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if choice is ExecutorChoice.DEVICE and not capable:
        raise UsageError(f"the device-driven executor needs a CUDA device, not {device}: give --executor host or auto")
    return choice is ExecutorChoice.DEVICE or (choice is ExecutorChoice.AUTO and device.type == "cuda")


class Drainable(Protocol):
    """What may still be working on the iterations the host drove."""

    def drain(self) -> None: ...


class DeviceDecoding:
    """Decode steps by the device; a model it cannot drive is left to the host, with one warning that says why.

    Args:
        build: makes the decoder when it is first needed.
        matcher: has to be idle before the decoder's steward runs its policy.
    """

    def __init__(self, build: Callable[[], DeviceDecoder], matcher: Drainable | None) -> None:
        self._build = build
        self._matcher = matcher
        self._decoder: DeviceDecoder | None = None
        self._refused = False

    @property
    def traffic(self) -> Traffic:
        return Traffic() if self._decoder is None else self._decoder.traffic

    @property
    def refused(self) -> bool:
        """Whether the model has turned out to need the host in every layer."""
        return self._refused

    def follow(self, prefill: HostSteps, new_tokens: int, sample: Sampler) -> Steps | None:
        if self._refused:
            return None
        try:
            if self._decoder is None:
                _require_triton()
                self._decoder = self._build()
            inputs = prefill.batch.inputs()
            if not self._decoder.accepts(len(inputs["input_ids"])):
                return None
            if self._matcher is not None:
                self._matcher.drain()
            ((name, cache),) = prefill.cache.items()
            return self._decoder.begin(name, cache, inputs, new_tokens, sample)
        except (CaptureError, UnsupportedModelError) as reason:
            self._refused = True
            warnings.warn(f"the host decides in every layer of this model: {reason}", RuntimeWarning, stacklevel=2)
            return None

    def close(self) -> None:
        """End a reply that was left without being closed."""
        if self._decoder is not None:
            self._decoder.close()


def _require_triton() -> None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise CaptureError(f"Triton, which compiles its kernels, cannot be imported ({error})") from error


class JointTraffic:
    """The traffic of prefills and of decode steps, whoever drives them."""

    def __init__(self, host: TrafficMeter, device: DeviceDecoding | None) -> None:
        self._host = host
        self._device = device

    @property
    def traffic(self) -> Traffic:
        return self._host.traffic if self._device is None else self._host.traffic + self._device.traffic

    def settle_stalls(self) -> None:
        self._host.settle_stalls()
