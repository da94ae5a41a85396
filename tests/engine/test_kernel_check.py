"""The check that keeps kernels from answering where they compile to something else than the model's own experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.address_table import AddressTable
from engine.checkpoint import load_model
from engine.errors import CaptureError
from engine.expert_arithmetic import find_accumulation
from engine.expert_forms import Activation, ExpertForm, find_form
from engine.slots import DeviceSlots
from engine.source import resolve_model
from tests.engine.tiny_models import build_tiny_model

pytest.importorskip("triton")

from engine import kernel_check
from engine.expert_products import MAX_TOKENS, ExpertProducts
from engine.kernel_check import check_products

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass(frozen=True)
class Checked:
    """A tiny model's last layer, and its check with another form than its own."""

    form: ExpertForm
    arguments: tuple[Any, ...]

    def check(self, tokens: int = 1, **changes: Any) -> None:
        check_products(dataclasses.replace(self.form, **changes), *self.arguments, tokens, DEVICE)


@pytest.fixture(scope="module")
def clamped(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """Interleaved halves, transposed, with biases."""
    return load("gpt_oss", torch.float32, tmp_path_factory.mktemp("gpt_oss"))


def load(family: str, dtype: torch.dtype, folder: Path) -> Checked:
    loaded = load_model(resolve_model(str(build_tiny_model(family, folder))), DEVICE, dtype)
    host, layer = loaded.experts, loaded.layers[-1]
    table = AddressTable(host, DeviceSlots(host, 2, DEVICE), DEVICE)
    accumulation = find_accumulation(layer, host, dtype, DEVICE)
    return Checked(find_form(layer, host.layout(layer.index)), (layer, host, table, accumulation))


@pytest.mark.parametrize("tokens", [1, MAX_TOKENS])
def test_kernels_that_compute_the_experts_pass(clamped: Checked, tokens: int) -> None:
    clamped.check(tokens)


def test_half_precision_passes(tmp_path: Path) -> None:
    load("qwen2_moe", torch.float16, tmp_path).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"gate_shift": 2},
        {"activation": Activation("silu")},
        {"activation": Activation("clamped", 1.6, 7.0)},
    ],
    ids=str,
)
def test_another_arithmetic_is_refused(clamped: Checked, changes: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match=r"on c\w+ its kernels' results for 1 tokens differ from its own by \d\.\de"):
        clamped.check(**changes)


@pytest.mark.parametrize("field", ["offset", "bias_offset"])
@pytest.mark.parametrize("projection", ["up", "down"])
def test_weights_read_from_a_wrong_place_are_refused(clamped: Checked, projection: str, field: str) -> None:
    own = getattr(clamped.form, projection)
    changed = dataclasses.replace(own, **{field: getattr(own, field) + 16})
    with pytest.raises(CaptureError, match="differ from its own"):
        clamped.check(**{projection: changed})


def test_the_slots_bytes_are_compared_as_well_as_those_in_host_memory(
    clamped: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = ExpertProducts.__call__

    def poison_and_compute(self: ExpertProducts, layer: int, *routed: torch.Tensor) -> torch.Tensor:
        home = clamped.arguments[2].home
        (moved,) = torch.nonzero(self._table.cpu() != home).flatten().tolist()
        assert moved // self.form.experts == layer
        self._table[moved] = home[moved - 1]
        return compute(self, layer, *routed)

    monkeypatch.setattr(ExpertProducts, "__call__", poison_and_compute)
    with pytest.raises(CaptureError, match="differ from its own"):
        clamped.check()


def test_results_that_are_no_numbers_are_refused(clamped: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = ExpertProducts.__call__
    place = torch.tensor([3], device=DEVICE)
    monkeypatch.setattr(ExpertProducts, "__call__", lambda *given: compute(*given).index_fill_(1, place, torch.nan))
    with pytest.raises(CaptureError, match="differ from its own by nan"):
        clamped.check()


def test_whatever_a_compiler_raises_is_one_line(clamped: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    class CompilationError(Exception):
        """As Triton's, of no class that others share."""

    def fail(*arguments: Any) -> None:
        raise CompilationError("\nno C compiler\nat 3:1: ...")

    monkeypatch.setattr(kernel_check, "ExpertProducts", fail)
    with pytest.raises(CaptureError, match=r"its kernels cannot be compiled and run on c\w+ \(no C compiler\)$"):
        clamped.check()
