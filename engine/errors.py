"""The tree of errors every package raises; only ``finemoe_cli`` turns them into text and exit codes."""

from __future__ import annotations

from pathlib import Path


class FinemoeError(Exception):
    """Anything finemoe refuses or fails at. The message is one line: what is wrong, where, what to do."""


class UsageError(FinemoeError):
    """The request itself cannot be served as asked (exit code 2)."""


class BudgetError(UsageError):
    """The expert budget is unreadable, or too small for one token of the model."""


class DeviceError(UsageError):
    """The requested device does not exist on this machine, or has no memory for a whole model."""


class MemoryShortageError(FinemoeError):
    """A model does not fit the memory that is free, or memory ran out; the message gives sizes and what to change."""


class PromptError(UsageError):
    """The prompt is empty or longer than the model's context."""


class ModelNotFoundError(UsageError):
    """Neither a local folder nor a repository of that name could be opened."""


class UnsupportedModelError(UsageError):
    """The model is dense, or its family does not dispatch its experts through the experts interface."""


class CheckpointError(FinemoeError):
    """A checkpoint's files are missing, truncated, or hold other tensors than the model expects."""


class DatasetError(FinemoeError):
    """A prompt file or hub data set cannot be read; ``path`` and ``line`` locate the fault where known."""

    def __init__(self, message: str, path: str | Path | None = None, line: int | None = None) -> None:
        where = "" if path is None else f"{path}: " if line is None else f"{path}, line {line}: "
        super().__init__(where + message)
        self.path = path
        self.line = line


class EngineClosedError(FinemoeError):
    """The engine has been closed and generates no more."""


class GenerationError(FinemoeError):
    """The model's logits are no numbers to choose a token by."""


class CaptureError(FinemoeError):
    """A model cannot be decoded by the device alone; the message completes "the host decides in every layer, as"."""


class TransferError(FinemoeError):
    """Copying an expert to the device failed."""


class TraceError(UsageError):
    """A routing trace is unreadable, or lacks what a policy or the replay needs."""


class PolicyError(UsageError):
    """No policy has that name, or it needs what the trace does not hold."""


class PlotError(UsageError):
    """A plot cannot be written where or as it was asked for."""


class LosslessError(FinemoeError):
    """The engine generated other tokens than transformers' eager experts do."""
