"""Counting expert traffic while it happens."""

from __future__ import annotations

from engine.steps import Traffic


class TrafficMeter:
    """Mutable totals behind ``Traffic``: a layer counts a dozen times, which a frozen value is too slow for."""

    __slots__ = ("bytes_on_demand", "bytes_prefetched", "bytes_wasted", "hits", "late", "misses", "stall_seconds")

    def __init__(self) -> None:
        self.hits = self.late = self.misses = 0
        self.bytes_on_demand = self.bytes_prefetched = self.bytes_wasted = 0
        self.stall_seconds = 0.0

    def read(self) -> Traffic:
        return Traffic(
            self.hits,
            self.late,
            self.misses,
            self.bytes_on_demand,
            self.bytes_prefetched,
            self.bytes_wasted,
            self.stall_seconds,
        )
