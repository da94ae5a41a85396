"""``finemoe profile --fit-only``: whether a model fits, told by its configuration before any weight is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.budget import format_bytes
from finemoe_cli.console import note, write, write_json, write_table
from finemoe_cli.interrupts import ending_at_once
from finemoe_cli.opening import quiet_libraries
from finemoe_cli.profile_report import fit_object, size_object
from finemoe_cli.settings import Settings
from finemoe_cli.tables import OutputFormat, write_records

if TYPE_CHECKING:
    from engine.footprint import Fit, ModelFootprint
    from engine.hardware import Machine

ESTIMATE = (
    "estimated by bytes, not measured: a layer takes twice the time to read its weights, and every expert outside the "
    "largest budget is loaded when a token needs it, tokens choosing among experts evenly"
)
_COLUMNS = ("machine", "device memory", "fits", "largest budget", "of all experts", "tokens/s (estimate)")


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """Which machine is asked about; None for what this one, and the presets, have."""

    device_memory: int | None
    host_memory: int | None
    context: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A machine, what it has, and whether the model fits; without a speed where its link is unknown."""

    machine: str
    device_memory: int
    host_memory: int | None
    fit: Fit
    tokens_per_second: float | None


def answer_fit(settings: Settings, question: MemoryQuestion, as_json: bool) -> None:
    """Print sizes and verdicts.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: what the engine could not open either.
        UsageError: an unknown precision.
    """
    quiet_libraries()
    with ending_at_once():
        from engine.architecture import open_config
        from engine.devices import choose_dtype
        from engine.footprint import measure_model
        from engine.hub import find_config

    name = settings.model.text
    if settings.model.is_default:
        note("no model named: using the bundled demo model (another: --model)")
    config = open_config(find_config(name))
    dtype = choose_dtype(settings.dtype.text, config)
    footprint = measure_model(config, dtype, name)
    verdicts = _judge(settings, footprint, question)
    estimated = any(verdict.tokens_per_second for verdict in verdicts)
    precision = str(dtype).removeprefix("torch.")
    if as_json:
        write_json(
            {
                "model": name,
                "architecture": footprint.architecture,
                "dtype": precision,
                "layers": footprint.layers,
                "experts": footprint.experts,
                "top_k": footprint.top_k,
                **size_object(footprint, question.context),
                "machines": [_verdict_object(v, footprint, question.context) for v in verdicts],
                "estimate": ESTIMATE if estimated else None,
            }
        )
        return
    cache = footprint.cache_bytes(question.context)
    least = footprint.dense_bytes + footprint.least_budget_bytes + cache
    write_table(
        {
            "model": f"{name}: {footprint.architecture} {footprint.layers}x{footprint.experts} top-{footprint.top_k}",
            "parameters": f"{footprint.parameters / 1e9:.2f} billion, {precision}",
            "experts": f"{footprint.layers * footprint.experts} of {format_bytes(footprint.expert_bytes)}, "
            f"{format_bytes(footprint.experts_bytes)} in host memory",
            "dense part": format_bytes(footprint.dense_bytes),
            "key/value cache": f"{format_bytes(round(1000 * footprint.cache_token_bytes))} per 1,000 tokens, "
            f"{format_bytes(cache)} for {question.context:,}",
            "least on the device": f"{format_bytes(least)}: dense part, {footprint.top_k + 1} experts, key/value cache",
        }
    )
    write("\n")
    write_records([_verdict_row(v, footprint) for v in verdicts], OutputFormat.md, _COLUMNS)
    if estimated:
        write(f"\ntokens/s are {ESTIMATE}.\n")


def _judge(settings: Settings, footprint: ModelFootprint, question: MemoryQuestion) -> list[Verdict]:
    from engine.devices import choose_device
    from engine.footprint import check_fit
    from engine.hardware import MACHINES
    from engine.machine import device_memory_bytes, host_memory_bytes

    context = question.context
    if question.device_memory is not None:
        host = question.host_memory if question.host_memory is not None else host_memory_bytes()
        fit = check_fit(footprint, context, question.device_memory, host, shared=False)
        return [Verdict("as asked", question.device_memory, host, fit, None)]
    device = choose_device(settings.device.text)
    shared = device.type == "cpu"
    host = question.host_memory if question.host_memory is not None else host_memory_bytes()
    memory = host if shared else device_memory_bytes(device)
    here = check_fit(footprint, context, memory, host, shared)
    verdicts = [Verdict(f"this one, {device}", memory, host, here, None)]
    for name, machine in MACHINES.items():
        # Whatever the host of a preset has is the asker's to know; unless asked, it is taken to be enough.
        has = question.host_memory if question.host_memory is not None else footprint.experts_bytes
        fit = check_fit(footprint, context, machine.memory_bytes, has, shared=False)
        speed = _estimate_speed(footprint, machine, fit) if fit.fits else None
        verdicts.append(Verdict(name, machine.memory_bytes, question.host_memory, fit, speed))
    return verdicts


def _estimate_speed(footprint: ModelFootprint, machine: Machine, fit: Fit) -> float:
    from engine.hardware import ModelSize, estimate

    hardware = estimate(machine, ModelSize(footprint.expert_bytes, footprint.layer_bytes))
    missing = 1.0 - fit.budget_bytes / footprint.slots_bytes
    layer = hardware.layer_seconds + footprint.top_k * missing * hardware.copy_seconds
    return 1.0 / (footprint.layers * layer)


def _verdict_object(verdict: Verdict, footprint: ModelFootprint, context: int) -> dict[str, Any]:
    sizes = size_object(footprint, context)
    answers = {k: v for k, v in fit_object(footprint, verdict.fit, context).items() if k not in sizes}
    return {
        "machine": verdict.machine,
        "device_memory_bytes": verdict.device_memory,
        "host_memory_bytes": verdict.host_memory,
        **answers,
        "largest_budget_share": verdict.fit.budget_bytes / footprint.slots_bytes,
        "estimated_tokens_per_second": verdict.tokens_per_second,
    }


def _verdict_row(verdict: Verdict, footprint: ModelFootprint) -> dict[str, str]:
    fit = verdict.fit
    lacking = [where for where, fits in (("device", fit.device_fits), ("host", fit.host_fits)) if not fits]
    speed = verdict.tokens_per_second
    cells = (
        verdict.machine,
        format_bytes(verdict.device_memory),
        "yes" if fit.fits else f"no: {' and '.join(lacking)} memory",
        format_bytes(fit.budget_bytes) if fit.fits else "-",
        f"{fit.budget_bytes / footprint.slots_bytes:.0%}" if fit.fits else "-",
        f"{speed:.1f}" if speed is not None else "-",
    )
    return dict(zip(_COLUMNS, cells, strict=True))
