"""What an iteration leaves behind, and the seam through which the engine searches and publishes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, eq=False)
class IterationRecord:
    """One iteration of one sequence (paper section 4.1): the unit a map store keeps.

    Attributes:
        sequence: identifies the sequence within its run; with ``iteration`` it names the record.
        iteration: 0 for the prefill, then one a decode step; a prefill of several chunks counts one for each.
        phase: "prefill" or "decode".
        prompt_hash: hash of the sequence's prompt token ids.
        tokens: input tokens of this iteration, padding excluded.
        embedding: float32 [h], the semantic embedding of the iteration's input.
        probabilities: float32 [L, J], the expert map; each row sums to 1.
    """

    sequence: int
    iteration: int
    phase: Phase
    prompt_hash: str
    tokens: int
    embedding: np.ndarray
    probabilities: np.ndarray


class TrajectoryScan(Protocol):
    """The trajectory search of one iteration, fed layer by layer (paper section 4.2)."""

    def observe(self, probabilities: np.ndarray) -> np.ndarray:
        """Add the next layer's gate distributions [B, J]; return cosines [B, n] of the prefix so far."""
        ...


class ExpertMapLibrary(Protocol):
    """The maps the engine searches and the iterations it gives back. Used from one thread, the matcher's."""

    def __len__(self) -> int:
        """n, the number of maps that can be found."""
        ...

    def semantic_scores(self, embeddings: np.ndarray) -> np.ndarray:
        """Cosine [B, n] of embeddings [B, h] with every stored embedding (paper equation 4)."""
        ...

    def start_trajectory(self, batch: int) -> TrajectoryScan:
        """Begin a trajectory search for ``batch`` sequences over the maps present now."""
        ...

    def probabilities(self, row: int) -> np.ndarray:
        """The stored map of one row, float32 [L, J]; read-only, valid until the next ``publish``."""
        ...

    def publish(
        self,
        records: Sequence[IterationRecord],
        semantic_scores: np.ndarray | None = None,
        trajectory_scores: np.ndarray | None = None,
    ) -> None:
        """Take finished iterations; scores [len(records), n] spare a second search for the redundancy.

        ``n`` is the library's length when the iteration began; rows added since are scored anew.
        Must not block on a disk or a network.
        """
        ...
