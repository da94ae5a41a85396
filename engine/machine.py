"""Which machine this is, and how much memory it has."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from engine.profiles import MachineIdentity

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def identify_machine(device: torch.device, dtype: torch.dtype) -> MachineIdentity:
    """The machine as a profile of ``device`` and ``dtype`` is filed under."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return MachineIdentity(
        device=gpu.name if gpu else "cpu",
        memory_gib=device_memory_bytes(device) >> 30,
        link=_bus(gpu) if gpu else "memory",
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch=torch.__version__,
        dtype=str(dtype).removeprefix("torch."),
    )


def device_memory_bytes(device: torch.device) -> int:
    """Memory of the device in all; on the CPU that of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory_bytes()


def host_memory_bytes() -> int:
    """Main memory in all, or what a container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        # Without a limit the file says "max", which is no number.
        return min(total, int(_CGROUP_LIMIT.read_text()))
    return total


def _bus(gpu: Any) -> str:
    """Class of the GPU's link, "PCIe" alone where the system does not tell."""
    folder = _PCI_DEVICES / f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        speed = (folder / "max_link_speed").read_text().split(" PCIe")[0].strip()
        return f"PCIe {speed} x{(folder / 'max_link_width').read_text().strip()}"
    except OSError:
        return "PCIe"


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
