"""How many bytes of experts may live on the device: the ``--cache`` setting."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from engine.errors import BudgetError

ACCEPTED = "a size such as 6GiB, 512MiB or 1.5GB, a share of all experts such as 25%, bytes, or auto"

CPU_AUTO_SHARE: Final = Decimal("0.25")
RESERVE_SHARE: Final = Decimal("0.1")
RESERVE_BYTES: Final = 1 << 30

_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_QUANTITY: Final = re.compile(r"(\d{1,18}(?:\.\d{1,18})?|\.\d{1,18})\s*([a-z]*|%)", re.ASCII | re.IGNORECASE)
_AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class ExpertBudget:
    """A parsed budget, before the model's size and the device's memory are known.

    Exactly one of ``size`` and ``share`` is set; with neither, the budget is automatic.

    Attributes:
        text: what the user wrote, without surrounding blanks.
        size: bytes.
        share: fraction of the bytes of all experts, in (0, 1].
    """

    text: str
    size: int | None = None
    share: Decimal | None = None

    @classmethod
    def parse(cls, text: str) -> ExpertBudget:
        """Read ``6GiB``, ``512MiB``, ``1.5GB``, ``25%``, ``1048576`` or ``auto`` (any case).

        Raises:
            BudgetError: unreadable, zero, negative, or more than 100%.
        """
        text = text.strip()
        if text.lower() == _AUTO:
            return cls(text)
        match = _QUANTITY.fullmatch(text)
        unit = match[2].lower() if match else None
        if match is None or unit is None or (unit != "%" and unit not in _UNITS):
            raise BudgetError(f"cannot read the expert budget {text!r}; give {ACCEPTED}")
        number = Decimal(match[1])
        if unit == "%":
            if not 0 < number <= 100:
                raise BudgetError(f"the expert budget {text} is not above 0% and at most 100%")
            return cls(text, share=number / 100)
        size = int(number * _UNITS[unit])
        if size < 1:
            raise BudgetError(f"the expert budget {text} is less than one byte; give {ACCEPTED}")
        return cls(text, size=size)

    @property
    def is_automatic(self) -> bool:
        """Whether the budget waits for the device's free memory."""
        return self.size is None and self.share is None

    def resolve(self, total_bytes: int, free_bytes: int | None) -> int:
        """Turn the budget into bytes for one model on one device.

        ``auto`` is what the device has free less a reserve for activations and the key/value cache (a
        tenth of it, at least 1 GiB), and at most all experts. Where no device memory is separate from the
        host's it is a quarter of all experts: on a CPU the slots are a second copy, so a larger budget
        costs memory that the experts' first copy needs.

        Args:
            total_bytes: bytes of all experts of the model.
            free_bytes: free bytes of the device once the dense part is on it; None on a CPU.

        Returns:
            Bytes for device slots, at most ``total_bytes``. Whether they hold one layer's K experts is the
            cache's to judge.

        Raises:
            BudgetError: ``auto`` on a device with no more free bytes than the reserve.
        """
        if self.size is not None:
            return min(self.size, total_bytes)
        if self.share is not None:
            return int(self.share * total_bytes)
        if free_bytes is None:
            return int(CPU_AUTO_SHARE * total_bytes)
        reserve = max(RESERVE_BYTES, int(RESERVE_SHARE * free_bytes))
        if free_bytes <= reserve:
            raise BudgetError(
                f"the device has {format_bytes(free_bytes)} free, not enough beside a reserve of "
                f"{format_bytes(reserve)}; give a size instead of auto, or free memory on the device"
            )
        return min(free_bytes - reserve, total_bytes)


def format_bytes(count: int) -> str:
    """A byte count in binary units for people, rounded: ``1.50 GiB``; below 1 KiB exact: ``512 bytes``."""
    if count < 1024:
        return f"{count} byte" if count == 1 else f"{count} bytes"
    value = count / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if round(value, 2) < 1024:
            return f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
