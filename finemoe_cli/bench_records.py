"""From measured steps to the records of ``finemoe bench``, and to the table that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from engine.benchmarking import StoreState, Workload
from engine.decoding import ExecutorChoice
from engine.live_policies import SEARCHING, TAUGHT
from engine.measures import Distribution, RequestMeasures
from engine.steps import Traffic
from engine.token_gaps import Difference
from engine.traces import RoutingTrace
from finemoe_cli.bench_plan import DRIVEN, describe_row
from finemoe_cli.bench_stores import BenchStore
from store.bench_runs import BenchRecord

NO_STORE = "-"

COLUMNS = (
    "policy",
    "by",
    "store",
    "cache",
    "p+n",
    "ttft_ms",
    "tpot_ms",
    "hit",
    "late",
    "miss",
    "MiB",
    "wasted",
    "stall_ms",
)
"""What the table shows: by whom experts are run; hits and bytes are of decode, MiB those moved in a repetition."""


@dataclass(frozen=True, slots=True)
class Row:
    """One combination as it ran.

    Attributes:
        policy: its name.
        state: of the policy's store; None where it has none.
        cache: the budget as written.
        executor: what ran the experts.
        budget_bytes, slots: what the budget came to.
        distance: d; None where nothing is loaded ahead.
    """

    policy: str
    state: StoreState | None
    cache: str
    executor: str
    budget_bytes: int
    slots: int
    distance: int | None

    @property
    def by_device(self) -> bool:
        return self.executor == DRIVEN[ExecutorChoice.DEVICE]

    def describe(self) -> str:
        executor = ExecutorChoice.DEVICE if self.by_device else ExecutorChoice.HOST
        return describe_row(self.policy, self.state, self.cache, executor)


def describe_knowledge(row: Row, store: BenchStore, history: RoutingTrace | None) -> dict[str, Any]:
    """What a row's policy knew when a repetition began: the maps of a store, or recorded iterations; else None."""
    searches = row.policy in SEARCHING and row.state is not None
    return {
        "store": store.location if searches else None,
        "store_id": store.id if searches else None,
        "store_maps": (len(store.maps) if row.state.filled else 0) if searches and row.state else None,
        "map_capacity": store.maps.capacity if searches else None,
        "taught_iterations": history.iterations if history is not None and row.policy in TAUGHT else None,
    }


def describe_tokens(difference: Difference | None) -> dict[str, Any]:
    """Whether a row's tokens are the reference's; places are counted from 0, None where there is no difference."""
    return {
        "tokens_equal": difference is None,
        "differing_prompts": 0 if difference is None else difference.prompts,
        "differing_prompt": None if difference is None else difference.prompt,
        "differing_token": None if difference is None else difference.token,
        "reference_gap": None if difference is None else difference.gap,
    }


def make_record(
    row: Row,
    workload: Workload,
    measures: RequestMeasures,
    repetitions: int,
    about: Mapping[str, Any],
    identity: Mapping[str, Any],
) -> BenchRecord:
    """A row's record: its figures, and all that is needed to measure them again.

    Args:
        about: how its tokens compare, and what its policy knew.
        identity: what the records of a run share.
    """
    settings = {
        "cache": row.cache,
        "slots": row.slots,
        "prompt_length": workload.prompt_length,
        "prompt_tokens": sum(map(len, workload.tests)) / len(workload.tests),
        "new_tokens": workload.new_tokens,
        "test_prompts": len(workload.tests),
        "warm_up_prompts": len(workload.warm_up),
        "repetitions": repetitions,
        "distance": row.distance,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        **identity,
    }
    return BenchRecord(
        policy=row.policy,
        executor=row.executor,
        store_state=row.state.name if row.state else NO_STORE,
        budget_bytes=row.budget_bytes,
        seed=identity["seed"],
        settings={name: value for name, value in settings.items() if name != "seed"},
        measures=measures_of(measures, repetitions, has_traffic=row.distance is not None),
    )


def measures_of(measures: RequestMeasures, repetitions: int, has_traffic: bool) -> dict[str, Any]:
    """The figures of a record: times in milliseconds, traffic of decode, and of prefill by ``prefill_``.

    A time's own name holds its mean, ``_deviation``, ``_p50``, ``_p90`` and ``_p99`` the rest. hit, late and miss are
    shares of routed experts; bytes are of one repetition. What was not measured is None.
    """
    return {
        **_spread("ttft_ms", measures.ttft, 1e3),
        **_spread("tpot_ms", measures.tpot, 1e3),
        **_spread("tokens_per_second", measures.tokens_per_second, 1.0),
        **_traffic("", measures.decode if has_traffic else None, repetitions),
        **_spread("stall_ms", measures.decode_stall if has_traffic else None, 1e3),
        **_traffic("prefill_", measures.prefill if has_traffic else None, repetitions),
        **_spread("prefill_stall_ms", measures.prefill_stall if has_traffic else None, 1e3),
    }


def shorten_record(record: dict[str, Any]) -> dict[str, Any]:
    """A record as a line of the table."""
    prompt = record["prompt_length"] or f"~{record['prompt_tokens']:.0f}"
    return {
        # Whose experts a resident row runs stands beside it.
        "policy": record["policy"].removesuffix("-eager"),
        "by": record["executor"].removesuffix("-driven").removeprefix("transformers "),
        "store": record["store_state"],
        "cache": record["cache"],
        "p+n": f"{prompt}+{record['new_tokens']}",
        "ttft_ms": _rounded(record["ttft_ms"]),
        "tpot_ms": _rounded(record["tpot_ms"]),
        "hit": _percent(record["hit"]),
        "late": _percent(record["late"]),
        "miss": _percent(record["miss"]),
        "MiB": show_mebibytes(record["bytes_moved"]),
        "wasted": show_mebibytes(record["wasted_bytes"]),
        "stall_ms": _rounded(record["stall_ms"]),
    }


def _spread(name: str, values: Distribution | None, scale: float) -> dict[str, float | None]:
    if values is None:
        return {name: None, **{f"{name}_{part}": None for part in ("deviation", "p50", "p90", "p99")}}
    return {
        name: values.mean * scale,
        f"{name}_deviation": values.deviation * scale,
        f"{name}_p50": values.p50 * scale,
        f"{name}_p90": values.p90 * scale,
        f"{name}_p99": values.p99 * scale,
    }


def _traffic(prefix: str, traffic: Traffic | None, repetitions: int) -> dict[str, float | None]:
    names = ("hit", "late", "miss", "routed", "bytes_moved", "bytes_prefetched", "wasted_bytes")
    if traffic is None or not traffic.routed:
        return {prefix + name: None for name in names}
    shares = (count / traffic.routed for count in (traffic.hits, traffic.late, traffic.misses))
    moved = traffic.bytes_on_demand + traffic.bytes_prefetched
    totals = (traffic.routed, moved, traffic.bytes_prefetched, traffic.bytes_wasted)
    values = (*shares, *(round(total / repetitions) for total in totals))
    return {prefix + name: value for name, value in zip(names, values, strict=True)}


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def show_mebibytes(count: int | None) -> str | None:
    return None if count is None else f"{count / 2**20:,.1f}"
