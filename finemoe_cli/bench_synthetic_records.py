"""Records of ``finemoe bench --synthetic``, which name themselves in every format, and the table that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from engine.steps import Step
from finemoe_cli.bench_records import NO_STORE, show_mebibytes

COLUMNS = (
    "policy",
    "by",
    "cache",
    "n",
    "ttft",
    "tpot",
    "hit/late/miss",
    "in place",
    "copied",
    "link",
    "bound",
    "x",
)
"""What the table shows; see ``caption``."""

REPLAYED, RANDOM = "replayed", "random"

_LINK_FIELDS = (
    "link_gb_s",
    "step_bytes_in_place",
    "step_bytes_copied",
    "link_ms",
    "resident_tpot_ms",
    "bound_ms",
    "times_bound",
    "prefill_link_ms",
)
_MOVED = ("bytes_on_demand", "bytes_prefetched")


@dataclass(frozen=True, slots=True)
class SyntheticIdentity:
    """What a synthetic model is made of.

    Attributes:
        shape: its name.
        layers, layers_in_full: that are run, and of the real model.
        routing: ``REPLAYED`` or ``RANDOM``.
        routing_trace: file of the trace, or "bundled"; None where routing is random.
        routing_model, routing_origin: what the trace says of itself.
    """

    shape: str
    layers: int
    layers_in_full: int
    routing: str
    routing_trace: str | None
    routing_model: str
    routing_origin: str

    def fields(self) -> dict[str, Any]:
        return {
            "synthetic": self.shape,
            "weights": "synthetic",
            "layers": self.layers,
            "layers_in_full": self.layers_in_full,
            "routing": self.routing,
            "routing_trace": self.routing_trace,
            "routing_model": self.routing_model,
            "routing_origin": self.routing_origin,
        }


@dataclass(frozen=True, slots=True)
class LinkBound:
    """What a step cannot be faster than, were all copies behind the computation.

    Attributes:
        bandwidth: measured, bytes/s.
        resident_seconds: a decode step with all experts resident, by the same executor; None where not measured.
    """

    bandwidth: float
    resident_seconds: float | None


def link_fields(
    requests: Sequence[Sequence[Step]], by_device: bool, bound: LinkBound | None
) -> dict[str, float | None]:
    """What the steps of some requests moved a step and a prefill, and the times that follow from it, by name.

    All None where no ``bound`` is known, as of a model that moves nothing, or nothing was decoded.
    Bytes of misses are read in place by the device's executor and copied by the host's.
    """
    decode, prefill = (
        [step for steps in requests for step in steps if step.phase == phase] for phase in ("decode", "prefill")
    )
    if bound is None or not decode:
        return dict.fromkeys(_LINK_FIELDS)
    missed, ahead = (mean(getattr(step.traffic, name) for step in decode) for name in _MOVED)
    link = (missed + ahead) / bound.bandwidth
    resident = bound.resident_seconds
    least = None if resident is None else resident + link
    took = mean(step.seconds for step in decode)
    first = sum(getattr(step.traffic, name) for step in prefill for name in _MOVED)
    values = (
        bound.bandwidth / 1e9,
        missed if by_device else 0.0,
        ahead if by_device else missed + ahead,
        link * 1e3,
        None if resident is None else resident * 1e3,
        None if least is None else least * 1e3,
        None if least is None else took / least,
        first / len(prefill) / bound.bandwidth * 1e3,
    )
    return dict(zip(_LINK_FIELDS, values, strict=True))


def caption(record: Mapping[str, Any]) -> str:
    """What stands above a table of such records."""
    shape = record["synthetic"]
    if record["layers"] < record["layers_in_full"]:
        shape += f", {record['layers']} of {record['layers_in_full']} layers"
    routing = "random routing"
    if record["routing"] == REPLAYED:
        routing = f"replayed routing of {record['routing_model']} ({record['routing_trace']})"
    return (
        f"{shape}, {record['dtype']}: synthetic weights, {routing}.\n"
        "What it answers means nothing and is not compared. Times in ms; of a decode step: percent of routed experts,\n"
        "MiB read in place and copied, link (their time on it), bound (that and a step all resident), x (tpot over it)."
    )


def shorten_synthetic(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a line of the table."""
    policy = "resident" if record["policy"].startswith("resident") else record["policy"]
    state = record["store_state"]
    shares = [record["hit"], record["late"], record["miss"]]
    return {
        "policy": policy if state == NO_STORE else f"{policy} {state}",
        "by": record["executor"].removesuffix("-driven").removeprefix("transformers ").removesuffix("_mm"),
        "cache": record["cache"],
        "n": record["new_tokens"],
        "ttft": _show_time(record["ttft_ms"]),
        "tpot": _show_time(record["tpot_ms"]),
        "hit/late/miss": "/".join(f"{share * 100:.0f}" for share in shares if share is not None) or None,
        "in place": show_mebibytes(record["step_bytes_in_place"]),
        "copied": show_mebibytes(record["step_bytes_copied"]),
        "link": _show_time(record["link_ms"]),
        "bound": _show_time(record["bound_ms"]),
        "x": None if record["times_bound"] is None else f"{record['times_bound']:.2f}",
    }


def _show_time(milliseconds: float | None) -> str | None:
    if milliseconds is None:
        return None
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.1f}"
