"""Not-a-numbers in every slot that a copy may be written to next: whoever reads one too late is seen."""

from __future__ import annotations

import pytest
import torch

from engine.slot_ledger import SlotLedger
from engine.slot_life import Displaced, SlotState


def poison_free_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Poison slots as they become free; returns the growing list of them."""
    poisoned: list[int] = []
    close_order = SlotLedger._close_order

    def close_and_poison(self: SlotLedger, slot: int, void: bool) -> list[Displaced]:
        displaced = close_order(self, slot, void)
        if self.state(slot) == SlotState.FREE:
            fill(self, slot)
            poisoned.append(slot)
        return displaced

    monkeypatch.setattr(SlotLedger, "_close_order", close_and_poison)
    return poisoned


def fill(ledger: SlotLedger, slot: int) -> None:
    from engine.copy_streams import CudaCopies, HostCopies

    copies = ledger._copies
    assert isinstance(copies, CudaCopies | HostCopies)
    memory = copies._slots.bytes_of(slot, 0, copies._host.expert_bytes)
    if isinstance(copies, HostCopies):
        memory.fill_(255)
        return
    with torch.cuda.stream(copies._stream):
        memory.fill_(255)
    copies._stream.synchronize()
