"""What the replay must know of a machine and a model: sizes, speeds and times."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import UsageError


@dataclass(frozen=True, slots=True)
class Hardware:
    """One link and one model's layer on one device.

    Attributes:
        expert_bytes: size of an expert.
        bandwidth: of the link from the host, bytes/s.
        latency: seconds before a copy's first byte.
        layer_seconds: c, computing one layer with every expert resident; half before the gate has decided.
        chunk_bytes: size of the pieces a prefetch is copied in; it stops for a miss at the end of a piece. 0 stops it
            anywhere.
        token_seconds: what each further token of a prefill adds to a layer's computing time.
    """

    expert_bytes: int
    bandwidth: float
    latency: float
    layer_seconds: float
    chunk_bytes: int
    token_seconds: float = 0.0

    def layer_time(self, tokens: int) -> float:
        """Seconds to compute one layer for so many tokens with every expert resident."""
        return self.layer_seconds + (tokens - 1) * self.token_seconds

    @property
    def copy_seconds(self) -> float:
        """t, one expert over an idle link."""
        return self.latency + self.expert_bytes / self.bandwidth

    @property
    def chunk_seconds(self) -> float:
        return self.chunk_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and its bus.

    Attributes:
        bandwidth: of the link, bytes/s.
        latency: of a copy, seconds.
        memory_bytes: of the device.
        memory_bandwidth: of the device, bytes/s.
        flops: dense 16-bit operations a second by the data sheet.
    """

    bandwidth: float
    latency: float
    memory_bytes: int
    memory_bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of an expert, and bytes a decode step reads a layer: attention and the K routed experts, 16 bits."""

    expert_bytes: int
    layer_bytes: int


MACHINES = {
    "rtx3090": Machine(bandwidth=25e9, latency=10e-6, memory_bytes=24 << 30, memory_bandwidth=936e9, flops=71e12),
    "rtx4090": Machine(bandwidth=25e9, latency=10e-6, memory_bytes=24 << 30, memory_bandwidth=1008e9, flops=165e12),
    "a100": Machine(bandwidth=25e9, latency=10e-6, memory_bytes=80 << 30, memory_bandwidth=2039e9, flops=312e12),
    "h200": Machine(bandwidth=55e9, latency=10e-6, memory_bytes=140 << 30, memory_bandwidth=4800e9, flops=990e12),
}

MODEL_SIZES = {
    "mixtral": ModelSize(expert_bytes=352_321_536, layer_bytes=788_529_152),
    "phi3.5": ModelSize(expert_bytes=157_286_400, layer_bytes=398_458_880),
    "qwen1.5": ModelSize(expert_bytes=17_301_504, layer_bytes=171_966_464),
    "gpt-oss": ModelSize(expert_bytes=13_219_200, layer_bytes=105_897_600),
}

# Measured on an H200 with everything resident: 13.7 ms for Mixtral's 32 layers, 5.5 ms for Qwen1.5's 24.
_OVER_BYTES_BOUND = 2.0
_LAUNCH_SECONDS = 80e-6
# What prefills usually reach of the data sheet's operations.
_EFFICIENCY = 0.5
_CHUNK_BYTES = 4 << 20


def preset(name: str) -> Hardware:
    """Hardware by ``MACHINE/MODEL``, such as ``h200/qwen1.5``.

    The link's figures of the H200 are measured, those of the others nominal for their bus. The layer time is an
    estimate from the bytes a decode step reads and a fixed time for small operations, what a prefill's tokens add one
    from their arithmetic; give measured ones where known.

    Raises:
        UsageError: unknown name.
    """
    machine_name, _, model_name = name.partition("/")
    if machine_name not in MACHINES or model_name not in MODEL_SIZES:
        raise UsageError(
            f"no hardware preset {name!r}: join one of {', '.join(MACHINES)} and one of {', '.join(MODEL_SIZES)} "
            "by a slash, such as h200/qwen1.5"
        )
    return estimate(MACHINES[machine_name], MODEL_SIZES[model_name])


def estimate(machine: Machine, model: ModelSize) -> Hardware:
    """A model on a machine by the bytes it moves, as ``preset`` does it; nothing of it is measured."""
    return Hardware(
        expert_bytes=model.expert_bytes,
        bandwidth=machine.bandwidth,
        latency=machine.latency,
        layer_seconds=_LAUNCH_SECONDS + _OVER_BYTES_BOUND * model.layer_bytes / machine.memory_bandwidth,
        chunk_bytes=_CHUNK_BYTES,
        # Two bytes a weight, two operations a weight and token.
        token_seconds=model.layer_bytes / (_EFFICIENCY * machine.flops),
    )
