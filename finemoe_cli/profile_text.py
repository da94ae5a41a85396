"""What ``finemoe profile`` found, as sentences, tables and plots for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.budget import format_bytes
from engine.plots import Panel, Series
from finemoe_cli.console import write, write_table
from finemoe_cli.profile_report import Findings, LiveCheck, enough_rule, loading_rate
from finemoe_cli.tables import OutputFormat, write_records

if TYPE_CHECKING:
    from engine.footprint import Fit, ModelFootprint
    from engine.planning import BudgetOutlook, Expectation
    from engine.recall import Recall


def _fit_sentence(footprint: ModelFootprint, fit: Fit, context: int) -> str:
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
    write_table(
        {
            "model": f"{found.source.name}: {fingerprint.describe()}",
            "machine": measures.machine.describe(),
            "link": f"{_format_rate(link.bandwidth)}, latency {link.latency_seconds * 1e6:.1f} us; an expert of "
            f"{format_bytes(hardware.expert_bytes)} in {link.samples[-1].seconds * 1e3:.3f} ms, "
            f"{hardware.copy_seconds * 1e3:.3f} ms with the engine's own work",
            "layer": f"{layer.layer_seconds * 1e3:.3f} ms with all experts resident: attention and gate "
            f"{layer.attention_seconds * 1e3:.3f}, experts {layer.experts_seconds * 1e3:.3f} "
            f"({layer.expert_seconds * 1e3:.3f} a product)",
            "reading": f"checkpoint {_format_rate(measures.checkpoint_read_rate)}, "
            f"host memory {_format_rate(measures.host_read_rate)}",
            "loading": f"{measures.loading_seconds:.1f} s, {_format_rate(loading_rate(found))}",
            "fits": _fit_sentence(found.footprint, found.fit, found.context),
            "recorded": f"{len(run.trace.requests)} requests of {found.prompts.name}, "
            f"{run.trace.decode_only().iterations} decode steps, {found.held_out_steps} of them held out",
            "replay": _live_sentence(found.live),
        }
    )
    budget = f"{run.slots} of {fingerprint.layers * fingerprint.experts} experts"
    _table("recall of routed experts among the K likeliest, by layers ahead", _recall_rows(found.recall))
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
            [Series(curve[0].policy, [(e.distance or 0, e.stall_seconds * 1e3) for e in curve])],
        ),
    ]


def _recall_rows(recall: Sequence[Recall]) -> list[dict[str, Any]]:
    """A row a predictor, a column a distance."""
    rows: dict[str, dict[str, Any]] = {}
    for cell in recall:
        rows.setdefault(cell.predictor, {"predictor": cell.predictor})[f"{cell.distance}"] = cell.recall
    return list(rows.values())


def _format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _expectation_row(e: Expectation) -> dict[str, Any]:
    outcome = e.outcome
    return {
        "policy": e.policy,
        "distance": e.distance or "-",
        "hit": outcome.hit,
        "late": outcome.late,
        "miss": outcome.miss,
        "stall_ms": e.stall_seconds * 1e3,
        "decide_ms": e.decision_seconds * 1e3,
        "tpot_ms": e.tpot_seconds * 1e3,
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
