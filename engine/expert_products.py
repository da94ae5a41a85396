"""A layer's experts for a few tokens, by kernels that find them through the address table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.expert_arithmetic import Accumulation
from engine.expert_forms import ExpertForm, Projection
from engine.expert_kernels import combine, contract, expand
from engine.table_keeper import TableKeeper

MAX_TOKENS = 8
"""Beyond this many tokens the kernels' tiles would no longer be bound by memory."""

_MATRIX_TOKENS = 16
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_COMBINE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """How a projection is cut into programs: outputs and inputs of a tile, and warps that share it."""

    outputs: int
    inputs: int
    warps: int


def choose_tiles(form: ExpertForm) -> tuple[Tile, Tile]:
    """Tiles of both projections that keep enough bytes in flight to be bound by memory."""
    return _choose_tile(form.up, form.intermediate), _choose_tile(form.down, form.down.size_out)


def _choose_tile(projection: Projection, outputs: int) -> Tile:
    inputs = min(256, triton.next_power_of_2(projection.size_in))
    return Tile(outputs=min(16, triton.next_power_of_2(outputs)), inputs=max(16, inputs), warps=4)


class ExpertProducts:
    """Computes layers of one form. Nothing waits for the host: it can be captured into a graph.

    Args:
        keeper: of the address table, told when a layer's experts have been read.
        accumulation: precision in which the family adds up a token's experts.
        up, down: tiles of the projections.
    """

    def __init__(self, form: ExpertForm, keeper: TableKeeper, accumulation: Accumulation, up: Tile, down: Tile) -> None:
        self.form = form
        self._keeper = keeper
        self._accumulation = accumulation
        self._up = up
        self._down = down

    def __call__(
        self, layer: int, routes: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], routed ids and weights [T, K] -> [T, H], for T up to ``MAX_TOKENS``.

        ``routes``: of the same ids, from ``TableKeeper.resolve``.
        """
        form = self.form
        tokens, top_k = ids.shape
        ids, weights, hidden = ids.contiguous(), weights.contiguous(), hidden.contiguous()
        pairs = tokens * top_k
        states = torch.empty(pairs, form.intermediate, dtype=torch.float32, device=hidden.device)
        outputs = torch.empty(pairs, form.down.size_out, dtype=torch.float32, device=hidden.device)
        result = torch.empty_like(hidden)
        common = {
            "LANDS": self._keeper.lands,
            "TOKENS": tokens,
            "TOKENS_PAD": 1 if tokens == 1 else _MATRIX_TOKENS,
            "TOP_K": top_k,
        }
        up, down = self._up, self._down
        expand[(pairs, triton.cdiv(form.intermediate, up.outputs))](
            routes,
            ids,
            hidden,
            states,
            form.activation.alpha,
            form.activation.limit,
            **common,
            SIZE_IN=form.up.size_in,
            SIZE_OUT=form.intermediate,
            WEIGHT_OFFSET=form.up.offset,
            BIAS_OFFSET=form.up.bias_offset,
            STRIDE_OUT=form.up.stride_out,
            STRIDE_IN=form.up.stride_in,
            GATED=form.gated,
            GATE_STEP=form.gate_step,
            GATE_SHIFT=form.gate_shift,
            ACTIVATION=form.activation.name,
            BLOCK_OUT=up.outputs,
            BLOCK_IN=up.inputs,
            num_warps=up.warps,
        )
        contract[(pairs, triton.cdiv(form.down.size_out, down.outputs))](
            routes,
            ids,
            states,
            weights,
            outputs,
            hidden,
            **common,
            SIZE_IN=form.down.size_in,
            SIZE_OUT=form.down.size_out,
            WEIGHT_OFFSET=form.down.offset,
            BIAS_OFFSET=form.down.bias_offset,
            STRIDE_OUT=form.down.stride_out,
            STRIDE_IN=form.down.stride_in,
            BLOCK_OUT=down.outputs,
            BLOCK_IN=down.inputs,
            num_warps=down.warps,
        )
        combine[(tokens, triton.cdiv(form.down.size_out, _COMBINE_BLOCK))](
            *self._keeper.table_arguments,
            ids,
            routes,
            outputs,
            result,
            *self._keeper.order_arguments,
            layer * form.experts,
            EXPERTS=form.experts,
            TOP_K=top_k,
            TOP_K_PAD=triton.next_power_of_2(top_k),
            SIZE=form.down.size_out,
            DTYPE=_TYPES[self._accumulation.dtype(hidden, weights)],
            BLOCK=_COMBINE_BLOCK,
            **self._keeper.settling(pairs),
        )
        return result
