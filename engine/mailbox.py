"""Letters from inside a token to the host: what gates decided, in page-locked memory that kernels write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from engine.families import MoELayer
from engine.mailbox_kernels import post_embeddings, post_gate

DEPTH = 4
"""Tokens whose letters are kept: the token loop hands over at most one ahead of the one it waits for."""


@dataclass(frozen=True, slots=True, eq=False)
class GateLetter:
    """What a gate decided for T tokens, in the order of the routed pairs, and what became of slots.

    Attributes:
        ids: int64 [T, K].
        on_device: bool [T, K], whether the expert was read from a device slot.
        landed_in: int64 [T, K], the slot that an expert read from host memory was written to; -1 for none.
        offers_taken: offers used up by this layer, whether something landed or they were passed over.
        orders_done: orders carried out behind the layer before.
        orders_void: one bit for each of them, the first the lowest: set where the expert was on the device already.
        weights: float32 [T, K].
        scores: float32 [T, J], the router's raw scores; None where it cannot be observed.
        inputs: float32 [T, H]; None where not asked for.
    """

    ids: np.ndarray
    on_device: np.ndarray
    landed_in: np.ndarray
    offers_taken: int
    orders_done: int
    orders_void: int
    weights: np.ndarray
    scores: np.ndarray | None
    inputs: np.ndarray | None


class Mailbox:
    """A ring of ``DEPTH`` tokens' letters, one an embedding and one a layer, each with a flag raised behind it.

    Args:
        layers: the MoE layers.
        tokens: T.
        hidden_size: h and H.
        gate_inputs: whether letters carry what the gates read.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        tokens: int,
        hidden_size: int,
        gate_inputs: bool,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self._layers = layers
        self._top_k = layers[0].top_k
        self._hidden = hidden_size
        self._scores = [0] * len(layers)
        self._inputs = hidden_size if gate_inputs else 0
        pairs = tokens * self._top_k
        # Some routers score one class more than there are experts.
        widest = max(layer.num_experts for layer in layers) + 1
        stride = max(tokens * hidden_size, 3 * pairs + 3 + tokens * (widest + self._inputs))
        rows = len(layers) + 1
        pinned = device.type == "cuda"
        self._letters = torch.zeros(DEPTH, rows, stride, dtype=torch.float32, pin_memory=pinned)
        self._flags = torch.zeros(DEPTH, rows, dtype=torch.int64, pin_memory=pinned)
        self._letters_seen = self._letters.numpy()
        self._flags_seen = self._flags.numpy()
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._nothing = torch.zeros(1, dtype=torch.float32, device=device)
        self._places = {
            "ROWS": rows,
            "DEPTH": DEPTH,
            "STRIDE": stride,
            "FENCE": pinned and os.environ.get("TRITON_INTERPRET") != "1",
        }

    def reset(self) -> None:
        """Count tokens from 0 again; the device must be idle."""
        self._counter.zero_()
        self._flags.zero_()

    def arrived(self, token: int, row: int) -> bool:
        """Whether a token's letter of a row has come: row 0 the embeddings, row l + 1 the gate of layer l."""
        return bool(self._flags_seen[token % DEPTH, row] == token + 1)

    def read_embeddings(self, token: int) -> np.ndarray:
        """float32 [T, h]."""
        letter = self._letters_seen[token % DEPTH, 0, : self.tokens * self._hidden]
        return letter.reshape(self.tokens, self._hidden).copy()

    def read_gate(self, token: int, layer: int) -> GateLetter:
        pairs, shape = self.tokens * self._top_k, (self.tokens, self._top_k)
        sizes = [pairs, pairs, 3, pairs, self.tokens * self._scores[layer], self.tokens * self._inputs]
        letter = self._letters_seen[token % DEPTH, layer + 1, : sum(sizes)].copy()
        ids, places, counts, weights, scores, inputs = np.split(letter, np.cumsum(sizes)[:-1])
        places = places.astype(np.int64).reshape(shape)
        taken, done, void = counts.astype(np.int64).tolist()
        return GateLetter(
            ids=ids.astype(np.int64).reshape(shape),
            on_device=places == 1,
            landed_in=np.maximum(places - 2, -1),
            offers_taken=taken,
            orders_done=done,
            orders_void=void,
            weights=weights.reshape(shape),
            scores=scores.reshape(self.tokens, -1) if len(scores) else None,
            inputs=inputs.reshape(self.tokens, -1) if len(inputs) else None,
        )

    def post_embeddings(self, embeddings: torch.Tensor) -> None:
        """Queue the letter of input embeddings [T, h]."""
        post_embeddings[(1,)](
            self._counter,
            self._letters.data_ptr(),
            self._flags.data_ptr(),
            embeddings,
            SIZE=embeddings.numel(),
            **self._places,
        )

    def post_gate(
        self,
        layer: int,
        ids: torch.Tensor,
        routes: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor | None,
        inputs: torch.Tensor | None,
    ) -> None:
        """Queue a gate's letter: ids and weights [T, K] with their routes, scores [T, J], inputs [T, H]."""
        self._scores[layer] = 0 if scores is None else scores.shape[-1]
        post_gate[(1,)](
            self._counter,
            self._letters.data_ptr(),
            self._flags.data_ptr(),
            layer + 1,
            ids,
            routes,
            weights,
            self._nothing if scores is None else scores,
            self._nothing if inputs is None else inputs,
            PAIRS=ids.numel(),
            PAIRS_PAD=triton.next_power_of_2(ids.numel()),
            SCORES=0 if scores is None else scores.numel(),
            INPUTS=0 if inputs is None else inputs.numel(),
            **self._places,
        )

    def count_token(self) -> None:
        """Queue the end of a token: what follows belongs to the next."""
        self._counter.add_(1)
