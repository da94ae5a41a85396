"""Choosing the device and the precision."""

from __future__ import annotations

import gc
from typing import Any

import torch

from engine.errors import DeviceError, UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where it is present, else the CPU; or ``cpu``, ``cuda``, ``cuda:N``.

    Raises:
        DeviceError: no such device here, or one finemoe cannot drive.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise DeviceError(f"no device named {name!r}: give auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"--device {name}: this machine shows no CUDA device to PyTorch {torch.__version__}; use --device cpu"
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}: only {torch.cuda.device_count()} CUDA device(s) are visible")
    return torch.device("cuda", index)


def choose_dtype(name: str, config: Any) -> torch.dtype:
    """``auto`` is the checkpoint's own precision (float32 where it names none).

    Raises:
        UsageError: an unknown precision.
    """
    if name == "auto":
        declared = getattr(config, "dtype", None)
        if isinstance(declared, str):
            declared = getattr(torch, declared, None)
        return declared if isinstance(declared, torch.dtype) else torch.float32
    if name not in _DTYPES:
        raise UsageError(f"unknown precision {name!r}: give auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def free_bytes(device: torch.device) -> int | None:
    """Bytes free on a CUDA device, PyTorch's own pool included; None on the CPU, where slots are plain host memory."""
    if device.type != "cuda":
        return None
    pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + pooled


def release_memory(device: torch.device) -> None:
    """Give back what models and engines that are gone have left, so that free memory is seen as free.

    Hooks and closures refer to them in circles, and what PyTorch's own pool keeps is not free for others.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
