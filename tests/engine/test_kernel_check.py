"""The check that keeps kernels from answering where they compile to something else than the model's own experts."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint import load_model
from engine.errors import CaptureError
from engine.expert_arithmetic import find_accumulation
from engine.expert_forms import Activation, ExpertForm, find_form
from engine.source import resolve_model
from tests.engine.tiny_models import build_tiny_model

pytest.importorskip("triton")

from engine import kernel_check
from engine.expert_products import MAX_TOKENS, ExpertProducts
from engine.kernel_check import check_products
from tests.engine.interpreter import mend_interpreter

mend_interpreter()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass(frozen=True)
class Checked:
    """A tiny model's last layer, and its check with another form than its own."""

    form: ExpertForm
    arguments: tuple[Any, ...]

    def check(self, tokens: int = 1, lands: bool = True, **changes: Any) -> None:
        check_products(dataclasses.replace(self.form, **changes), *self.arguments, tokens, lands, DEVICE)


@pytest.fixture(scope="module")
def clamped(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """Interleaved halves, transposed, with biases."""
    return load("gpt_oss", torch.float32, tmp_path_factory.mktemp("gpt_oss"))


def load(family: str, dtype: torch.dtype, folder: Path) -> Checked:
    loaded = load_model(resolve_model(str(build_tiny_model(family, folder))), DEVICE, dtype)
    host, layer = loaded.experts, loaded.layers[-1]
    accumulation = find_accumulation(layer, host, dtype, DEVICE)
    return Checked(find_form(layer, host.layout(layer.index)), (layer, host, accumulation))


@pytest.mark.parametrize("tokens", [1, MAX_TOKENS])
@pytest.mark.parametrize("lands", [False, True])
def test_kernels_that_compute_the_experts_pass(clamped: Checked, tokens: int, lands: bool) -> None:
    clamped.check(tokens, lands)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_passes(dtype: torch.dtype, tmp_path: Path) -> None:
    load("qwen2_moe", dtype, tmp_path).check()


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

    def misread(self: ExpertProducts, layer: int, routes: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
        slots = self._keeper.table_arguments[2]
        (pair,) = torch.nonzero(routes == slots[0]).flatten().tolist()
        routes[pair] = routes[pair + 1]
        return compute(self, layer, routes, *routed)

    monkeypatch.setattr(ExpertProducts, "__call__", misread)
    with pytest.raises(CaptureError, match="differ from its own"):
        clamped.check()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="changes a bit behind the kernels' back")
def test_an_expert_that_does_not_land_whole_is_refused(clamped: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = ExpertProducts.__call__

    def change_a_bit(self: ExpertProducts, layer: int, routes: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
        found = compute(self, layer, routes, *routed)
        pairs = (len(routes) - 3) // 3
        for address in filter(None, routes[pairs : 2 * pairs].tolist()):
            ctypes.c_ubyte.from_address(address).value ^= 1
        return found

    monkeypatch.setattr(ExpertProducts, "__call__", change_a_bit)
    with pytest.raises(CaptureError, match="do not bring an expert of layer 2 to a slot whole"):
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
