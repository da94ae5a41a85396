"""What ``finemoe profile`` found, as one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.adaptive import AdaptivePlan
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
    plan: AdaptivePlan
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
            "adaptive": None if found.plan.settings is None else asdict(found.plan.settings),
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

    return f"the least budget from which on twice as much gives less than {STOPS_PAYING:.0%} more tokens/s"


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
        "loading_bytes_per_second": loading_rate(found),
    }


def loading_rate(found: Findings) -> float:
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
        "stall_seconds": e.stall_seconds,
        "decision_seconds": e.decision_seconds,
        "expected_tpot_seconds": e.tpot_seconds,
    }


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
