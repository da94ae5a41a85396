"""Page-locking of host memory for CUDA, piece by piece."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch


class PageLocks:
    """Pieces of memory that are page-locked by any thread and let go together.

    Once the system has refused a piece no further one is asked for: what is locked in part is let go by ``conclude``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = torch.cuda.cudart()
        self._guard = threading.Lock()
        self._addresses: list[int] = []
        self._status = 0

    def lock(self, piece: torch.Tensor) -> None:
        """Page-lock a piece on a page boundary, for as long as the caller keeps it; fastest once it has been written.

        Locking waits for the system alone, so that several threads may do it side by side.
        """
        if self._status:
            return
        with torch.cuda.device(self._device):
            status = int(self._runtime.cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
            if status:
                _clear_cuda_error(self._device)
        with self._guard:
            if status:
                self._status = status
            else:
                self._addresses.append(piece.data_ptr())

    def conclude(self) -> int:
        """The CUDA status of what was refused, 0 if nothing was; after a refusal nothing stays locked."""
        if self._status:
            self.release()
        return self._status

    def release(self) -> None:
        """Let go of everything locked so far; idempotent."""
        with self._guard:
            while self._addresses:
                self._runtime.cudaHostUnregister(self._addresses.pop())


def _clear_cuda_error(device: torch.device) -> None:
    """Let the refused call's error surface here; it would else be raised by the next, unrelated CUDA call."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
