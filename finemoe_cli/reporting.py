"""One reply's figures in the words of the documentation, as a line for people or an object for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine.budget import format_bytes

if TYPE_CHECKING:
    from engine.steps import GenerationSummary, Traffic


def summary_line(summary: GenerationSummary, budget_bytes: int) -> str:
    """Tokens, speed, expert traffic and budget of one reply in one line."""
    total = summary.prefill + summary.decode
    moved = total.bytes_on_demand + total.bytes_prefetched
    return (
        f"{summary.prompt_tokens} + {summary.new_tokens} tokens, {summary.tokens_per_second:.1f} tokens/s, "
        f"TTFT {summary.ttft * 1e3:.0f} ms, TPOT {summary.tpot * 1e3:.1f} ms | "
        f"prefill {traffic_text(summary.prefill)} | decode {traffic_text(summary.decode)} | "
        f"moved {format_bytes(moved)}, wasted {format_bytes(total.bytes_wasted)} | "
        f"expert cache {budget_bytes:,} bytes"
    )


def traffic_text(traffic: Traffic) -> str:
    """``hit/late/miss 120/4/36 (75%)``; the share is of resident experts alone, as the paper counts."""
    counts = f"hit/late/miss {traffic.hits}/{traffic.late}/{traffic.misses}"
    return f"{counts} ({traffic.hit_rate:.0%})" if traffic.routed else counts


def traffic_object(traffic: Traffic) -> dict[str, Any]:
    return {**asdict(traffic), "hit_rate": traffic.hit_rate}


def summary_object(summary: GenerationSummary) -> dict[str, Any]:
    """The summary as JSON takes it; times in seconds, traffic by phase with the paper's hit rate."""
    return {
        **asdict(summary),
        "prefill": traffic_object(summary.prefill),
        "decode": traffic_object(summary.decode),
    }
