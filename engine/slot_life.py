"""The life of a device slot while kernels find experts through a table of addresses.

The device runs one token after the other, and no token waits for the host. Its own stream is the only one that
writes the table: a layer's ``resolve`` reads the entries of the routed experts once, before the layer's kernels, and
``settle`` carries out what has come of it, behind them. The host leaves words in page-locked memory that these two
look at, and learns from the letter of each layer what they did; letters tell everything in the order it happened, so
after the letter of a layer the books below are what the table was when that layer was resolved. A copy stream writes
bytes to slots that no entry points to. States of a slot, what moves it on, and where to:

    FREE      nothing points to it, and no kernel reads it.
              admit: a copy of an expert's bytes is queued                                -> FILLING
              offer: an offer without a victim is left for the device                     -> OFFERED
    FILLING   the copy stream writes it.
              poll: the copy is done; an order to point the expert's entry to it is left  -> POINTING
    POINTING  its bytes are there, and the order waits.
              letter: the order was carried out                                           -> HELD
              letter: it was void, as the expert had landed in another slot meanwhile     -> FREE
    HELD      the expert's entry points to it.
              admit, of an expert that is worth more: an order back home is left          -> LEAVING
              offer: an offer with its expert as the victim is left                       -> OFFERED
    LEAVING   its expert may still be read, until the order is carried out.
              letter: it was; the layer it was carried out behind had ended by then       -> FREE
    OFFERED   a missing expert may land in it; until then the expert it holds, if any, is read as before.
              letter: one landed: ``resolve`` had pointed the victim's entry home, and the
              layer's kernels write what they read of the newcomer to the slot            -> LANDING
              letter: it was passed over, because that layer read the victim              -> HELD
    LANDING   the kernels of one layer write it; ``settle`` points the newcomer's entry to it behind them.
              letter of any later layer                                                   -> HELD

So no slot is written while a kernel may read it, and no entry ever points to bytes that are not there: whatever the
copy stream writes was unreachable when its copy was queued, and what kernels write is ordered by their own stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class SlotState(IntEnum):
    """Where a slot stands in its life."""

    FREE = 0
    FILLING = 1
    POINTING = 2
    HELD = 3
    LEAVING = 4
    OFFERED = 5
    LANDING = 6


class CopyStream(Protocol):
    """Carries out copies one after the other."""

    def fill(self, key: int, slot: int) -> int:
        """Queue an expert's bytes into a slot; return the copy's ticket, counted from 1."""
        ...

    def completed(self) -> int:
        """The last ticket that is done; those before it are, too."""
        ...


class OrderBook(Protocol):
    """What is left for the device to read; each kind is taken in the order it was left in."""

    def offer(self, partition: int, slot: int, victim: int) -> None: ...

    def point(self, key: int, slot: int) -> None: ...

    def point_home(self, key: int, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Landings:
    """What one layer's letter tells of slots; see ``engine.mailbox.GateLetter``.

    Attributes:
        landed: slot -> key of the experts written to slots by this layer.
    """

    landed: Mapping[int, int]
    offers_taken: int
    orders_done: int
    orders_void: int


@dataclass(frozen=True, slots=True)
class Displaced:
    """An expert that has lost its slot, or not got it, and whether it had been copied ahead of time for nothing."""

    key: int
    unused: bool
