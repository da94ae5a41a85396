"""What ``finemoe profile`` found, as one object for programs, as tables for people, and as plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.budget import format_bytes
from engine.plots import Panel, Series
from finemoe_cli.console import write, write_table
from finemoe_cli.tables import OutputFormat, write_records

if TYPE_CHECKING:
    from engine.footprint import Fit, ModelFootprint
    from engine.planning import BudgetOutlook, Choice, Expectation
    from engine.prompts import PromptSet
    from engine.recall import Recall
    from engine.source import ModelSource
    from finemoe_cli.profiling import Measures, ProfileRun


@dataclass(frozen=True, slots=True)
class LiveCheck:
    """Decode steps in seconds, measured and as the replay of the same steps has them.

    Attributes:
        mean_seconds, median_seconds: of the steps as measured. The replay rests on medians: it is held to the median,
            which a busy machine changes less.
        median_stall: of the time that they waited for experts.
        replayed_seconds, replayed_stall: means of the replay.
    """

    steps: int
    mean_seconds: float
    median_seconds: float
    median_stall: float
    replayed_seconds: float
    replayed_stall: float

    @property
    def ratio(self) -> float:
        """Replayed over measured time."""
        return self.replayed_seconds / self.median_seconds


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything a profile rests on."""

    source: ModelSource
    prompts: PromptSet
    run: ProfileRun
    footprint: ModelFootprint
    fit: Fit
    context: int
    held_out_steps: int
    recall: Sequence[Recall]
    choice: Choice
    outlooks: Sequence[BudgetOutlook]
    enough: float | None
    live: LiveCheck | None
    seconds: float


def as_object(found: Findings) -> dict[str, Any]:
    """All of it; names end in their unit where they have one, shares are 0..1, rates bytes a second."""
    run = found.run
    measures = run.measures
    return {
        "model": found.source.name,
        "fingerprint": found.source.fingerprint.digest,
        "machine": measures.machine.to_dict(),
        "dataset": found.prompts.name,
        "dataset_identity": found.prompts.identity,
        "requests": len(run.trace.requests),
        "decode_steps": run.trace.decode_only().iterations,
        "held_out_steps": found.held_out_steps,
        "budget_bytes": run.budget_bytes,
        "budget_experts": run.slots,
        **_measures_object(measures, found),
        "fit": fit_object(found.footprint, found.fit, found.context),
        "recall": [
            {"predictor": r.predictor, "distance": r.distance, "recall": r.recall, "routed": r.routed}
            for r in found.recall
        ],
        "distances": [_expectation_object(e) for e in found.choice.curve],
        "policies": [_expectation_object(e) for e in found.choice.policies],
        "choice": {
            "policy": found.choice.policy,
            "distance": found.choice.distance,
            "reason": found.choice.reason,
        },
        "budgets": [_outlook_object(o, measures.hardware.expert_bytes) for o in found.outlooks],
        "enough": found.enough
        and {
            "share": found.enough,
            "bytes": round(found.enough * found.footprint.slots_bytes),
            "rule": enough_rule(),
        },
        "live_check": found.live
        and {
            "policy": "lru",
            "decode_steps": found.live.steps,
            "measured_mean_tpot_seconds": found.live.mean_seconds,
            "measured_median_tpot_seconds": found.live.median_seconds,
            "measured_median_stall_seconds": found.live.median_stall,
            "replayed_tpot_seconds": found.live.replayed_seconds,
            "replayed_stall_seconds": found.live.replayed_stall,
            "replayed_over_measured_median": found.live.ratio,
        },
        "profile_seconds": found.seconds,
    }


def fit_object(footprint: ModelFootprint, fit: Fit, context: int) -> dict[str, Any]:
    """Sizes and verdict for one machine."""
    return {
        "fits": fit.fits,
        "device_fits": fit.device_fits,
        "host_fits": fit.host_fits,
        "device_needed_bytes": fit.device_bytes,
        "host_needed_bytes": fit.host_bytes,
        "largest_budget_bytes": fit.budget_bytes,
        **size_object(footprint, context),
    }


def size_object(footprint: ModelFootprint, context: int) -> dict[str, Any]:
    return {
        "parameters": footprint.parameters,
        "expert_bytes": footprint.expert_bytes,
        "all_experts_bytes": footprint.experts_bytes,
        "dense_bytes": footprint.dense_bytes,
        "least_budget_bytes": footprint.least_budget_bytes,
        "kv_bytes_per_1k_tokens": round(1000 * footprint.cache_token_bytes),
        "kv_fixed_bytes": footprint.cache_fixed_bytes,
        "context_tokens": context,
        "kv_bytes": footprint.cache_bytes(context),
    }


def enough_rule() -> str:
    from engine.planning import STOPS_PAYING

    return f"the least budget of which twice as much gives less than {STOPS_PAYING:.0%} more tokens/s"


def fit_sentence(footprint: ModelFootprint, fit: Fit, context: int) -> str:
    """Whether a model fits, and what decides it."""
    device = (
        f"{format_bytes(fit.device_bytes)} on the device (dense part {format_bytes(footprint.dense_bytes)}, "
        f"{footprint.top_k + 1} experts {format_bytes(footprint.least_budget_bytes)}, "
        f"key/value cache of {context:,} tokens {format_bytes(footprint.cache_bytes(context))})"
    )
    host = f"{format_bytes(fit.host_bytes)} in host memory"
    if fit.fits:
        return f"yes: needs {device} and {host}; room for an expert budget of {format_bytes(fit.budget_bytes)}"
    lacking = [what for what, fits in ((device, fit.device_fits), (host, fit.host_fits)) if not fits]
    return f"no: needs {' and '.join(lacking)}, which is more than there is"


def write_text(found: Findings) -> None:
    """Tables and sentences."""
    run, choice = found.run, found.choice
    measures = run.measures
    link, layer, hardware = measures.link, measures.layer, measures.hardware
    fingerprint = found.source.fingerprint
    rate = format_rate
    write_table(
        {
            "model": f"{found.source.name}: {fingerprint.describe()}",
            "machine": measures.machine.describe(),
            "link": f"{rate(link.bandwidth)}, latency {link.latency_seconds * 1e6:.1f} us; an expert of "
            f"{format_bytes(hardware.expert_bytes)} in {link.samples[-1].seconds * 1e3:.3f} ms, "
            f"{hardware.copy_seconds * 1e3:.3f} ms with the engine's own work",
            "layer": f"{layer.layer_seconds * 1e3:.3f} ms with all experts resident: attention and gate "
            f"{layer.attention_seconds * 1e3:.3f}, experts {layer.experts_seconds * 1e3:.3f} "
            f"({layer.expert_seconds * 1e3:.3f} a product)",
            "reading": f"checkpoint {rate(measures.checkpoint_read_rate)}, host memory {rate(measures.host_read_rate)}",
            "loading": f"{measures.loading_seconds:.1f} s, {rate(_loading_rate(found))}",
            "fits": fit_sentence(found.footprint, found.fit, found.context),
            "recorded": f"{len(run.trace.requests)} requests of {found.prompts.name}, "
            f"{run.trace.decode_only().iterations} decode steps, {found.held_out_steps} of them held out",
            "replay": _live_sentence(found.live),
        }
    )
    budget = f"{run.slots} of {fingerprint.layers * fingerprint.experts} experts"
    _table("recall of routed experts among the K likeliest, by layers ahead", recall_rows(found.recall))
    _table(f"{choice.curve[0].policy} by prefetch distance, {budget}", [_expectation_row(e) for e in choice.curve])
    _table(f"policies at their best distance, {budget}", [_expectation_row(e) for e in choice.policies])
    _table("expected by budget", [_outlook_row(o, found) for o in found.outlooks])
    write("\n")
    write_table({"choice": choice.reason, "enough": _enough_sentence(found)})


def plot_panels(found: Findings) -> list[Panel]:
    """Expected tokens/s by budget, and stall by prefetch distance."""

    def speeds(name: str) -> list[tuple[float, float]]:
        cells = [(o.share, getattr(o, name)) for o in found.outlooks]
        return [(100 * share, cell.tokens_per_second) for share, cell in cells if cell is not None]

    curve = found.choice.curve
    return [
        Panel(
            f"{found.source.name}: expected speed",
            "expert budget [% of all experts]",
            "tokens/s",
            [
                Series(found.choice.policy, speeds("chosen")),
                Series("lru", speeds("baseline")),
                Series("knowing the future", speeds("bound"), dashed=True),
            ],
        ),
        Panel(
            f"{curve[0].policy} with {found.run.slots} experts on the device",
            "prefetch distance [layers]",
            "stall a token [ms]",
            [Series(curve[0].policy, [(e.distance or 0, _stall_ms(e)) for e in curve])],
        ),
    ]


def recall_rows(recall: Sequence[Recall]) -> list[dict[str, Any]]:
    """A row a predictor, a column a distance."""
    rows: dict[str, dict[str, Any]] = {}
    for cell in recall:
        rows.setdefault(cell.predictor, {"predictor": cell.predictor})[f"{cell.distance}"] = cell.recall
    return list(rows.values())


def format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _measures_object(measures: Measures, found: Findings) -> dict[str, Any]:
    layer = measures.layer
    return {
        "link": {
            "bandwidth_bytes_per_second": measures.link.bandwidth,
            "latency_seconds": measures.link.latency_seconds,
            "copies": [
                {"bytes": s.bytes, "median_seconds": s.seconds, "copies": s.copies} for s in measures.link.samples
            ],
        },
        "miss_seconds": measures.miss_seconds,
        "expert_copy_seconds": measures.hardware.copy_seconds,
        "layer_seconds": layer.layer_seconds,
        "layer_attention_and_gate_seconds": layer.attention_seconds,
        "layer_experts_seconds": layer.experts_seconds,
        "expert_product_seconds": layer.expert_seconds,
        "prefill_token_layer_seconds": measures.hardware.token_seconds,
        "layer_steps_timed": layer.steps,
        "layer_stall_subtracted": layer.stall_subtracted,
        "host_read_bytes_per_second": measures.host_read_rate,
        "checkpoint_read_bytes_per_second": measures.checkpoint_read_rate,
        "loading_seconds": measures.loading_seconds,
        "loading_bytes_per_second": _loading_rate(found),
    }


def _loading_rate(found: Findings) -> float:
    return (found.footprint.dense_bytes + found.footprint.experts_bytes) / found.run.measures.loading_seconds


def _expectation_object(e: Expectation) -> dict[str, Any]:
    outcome = e.outcome
    return {
        "policy": e.policy,
        "distance": e.distance,
        "hit": outcome.hit,
        "late": outcome.late,
        "miss": outcome.miss,
        "bytes_per_step": outcome.bytes_moved / outcome.iterations,
        "stall_seconds": outcome.stall_seconds / outcome.iterations,
        "expected_tpot_seconds": outcome.tpot_seconds,
    }


def _expectation_row(e: Expectation) -> dict[str, Any]:
    outcome = e.outcome
    return {
        "policy": e.policy,
        "distance": e.distance or "-",
        "hit": outcome.hit,
        "late": outcome.late,
        "miss": outcome.miss,
        "stall_ms": _stall_ms(e),
        "tpot_ms": outcome.tpot_seconds * 1e3,
    }


def _stall_ms(e: Expectation) -> float:
    return e.outcome.stall_seconds / e.outcome.iterations * 1e3


def _outlook_object(outlook: BudgetOutlook, expert_bytes: int) -> dict[str, Any]:
    speed = {
        name: cell and cell.tokens_per_second
        for name, cell in (("", outlook.chosen), ("lru_", outlook.baseline), ("bound_", outlook.bound))
    }
    return {
        "share": outlook.share,
        "bytes": outlook.capacity * expert_bytes,
        "experts": outlook.capacity,
        "fits_a_token": outlook.chosen is not None,
        **{f"{name}tokens_per_second": value for name, value in speed.items()},
    }


def _outlook_row(outlook: BudgetOutlook, found: Findings) -> dict[str, Any]:
    cells = {found.choice.policy: outlook.chosen, "lru": outlook.baseline, "bound": outlook.bound}
    return {
        "cache": f"{outlook.share:.0%}",
        "bytes": outlook.capacity * found.run.measures.hardware.expert_bytes,
        "experts": outlook.capacity,
        **{f"{name} tokens/s": "too small" if cell is None else cell.tokens_per_second for name, cell in cells.items()},
    }


def _live_sentence(live: LiveCheck | None) -> str:
    if live is None:
        return "not compared with the live engine: too little time"
    return (
        f"{live.replayed_seconds * 1e3:.2f} ms a token, {live.replayed_stall * 1e3:.2f} of it waiting, where the live "
        f"engine's median was {live.median_seconds * 1e3:.2f} and {live.median_stall * 1e3:.2f} "
        f"({live.ratio:.2f} of its time; lru, {live.steps} steps)"
    )


def _enough_sentence(found: Findings) -> str:
    if found.enough is None:
        return "no budget of the table holds the experts of one token"
    size = format_bytes(round(found.enough * found.footprint.slots_bytes))
    return f"from {found.enough:.0%} of the experts ({size}) on more memory stops paying: {enough_rule()}"


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    write(f"\n{title}\n\n")
    write_records(rows, OutputFormat.md, list(rows[0]))
