"""What profiling a model on a machine leaves behind, in the form the catalog keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.budget import format_bytes
from engine.hardware import Hardware


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """What must agree for times measured on one machine to hold on another.

    Attributes:
        device: name of the GPU, or "cpu".
        memory_gib: whole GiB of the GPU's memory, or of the host's where there is none.
        link: between host memory and device, such as "PCIe 32.0 GT/s x16"; "memory" on a CPU.
        cpu: its model name.
        cores: those the process may use.
        torch: version of PyTorch.
        dtype: what the model computes with.
    """

    device: str
    memory_gib: int
    link: str
    cpu: str
    cores: int
    torch: str
    dtype: str

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that name the machine in the catalog."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> MachineIdentity:
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})

    def describe(self) -> str:
        memory = format_bytes(self.memory_gib << 30)
        return f"{self.device}, {memory}, {self.link}; {self.cpu} x {self.cores}; torch {self.torch}, {self.dtype}"


@dataclass(frozen=True, slots=True)
class Profile:
    """The choices for one model on one machine, and all that was measured for them.

    Attributes:
        machine: where it was measured.
        hardware: the measured link, sizes and layer time, as a replay takes them.
        policy: name of the policy of the lowest expected TPOT.
        distance: d, the prefetch distance chosen with it.
        cache: the expert budget for which both were chosen, as written.
        report: everything measured, as ``finemoe profile --json`` prints it.
    """

    machine: MachineIdentity
    hardware: Hardware
    policy: str
    distance: int
    cache: str
    report: Mapping[str, Any]
