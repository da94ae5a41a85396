"""What predictors know beforehand, and the features they make of it as a request goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.map_search import ActivationCounts, MapArchive
from engine.predictors.features import Features, log_odds
from engine.predictors.gates import GateMaps, Speculation, logit_features
from engine.predictors.habits import Habits
from engine.predictors.request_state import RequestState
from engine.predictors.ridge import apply_ridge
from engine.predictors.similar import Similar
from engine.router_gates import RouterGates


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """Everything taken from the store's side; nothing in it changes while a request runs.

    Attributes:
        top_k: K.
        depth: D, layers that are predicted ahead.
        popularity: float32 [L, J], the share of iterations that use an expert.
        archive: stored iterations.
        counts: uses by stored requests.
        gates, maps: the routers' weights and what was learnt of them; None where gate inputs are not recorded.
        embedding_map: [h + 1, L * J], from embeddings to gates; None where there are none.
        sharpness, prior: of the attention, see ``Similar``.
    """

    top_k: int
    depth: int
    popularity: np.ndarray
    archive: MapArchive
    counts: ActivationCounts
    gates: RouterGates | None
    maps: GateMaps | None
    embedding_map: np.ndarray | None
    sharpness: float
    prior: float

    @property
    def speculation(self) -> Speculation | None:
        """What gate inputs say, if they are known at all."""
        if self.gates is None or self.maps is None:
            return None
        return Speculation(self.gates, self.maps, self.top_k)

    def with_maps(self, maps: GateMaps | None, embedding_map: np.ndarray | None) -> Knowledge:
        """The same with other linear maps."""
        return replace(self, maps=maps, embedding_map=embedding_map)


class Scan:
    """B consecutive iterations of a request, layer by layer.

    Live engines scan one iteration at a time, ``fill`` and ``observe`` alternating; prepared replays fill a block of
    many beforehand. The features are the same: nothing of an iteration depends on what comes after it.

    Args:
        block: B, at most ``BLOCK``.
        excluded: a request whose stored iterations and counts do not count.
    """

    def __init__(self, knowledge: Knowledge, state: RequestState, block: int, excluded: int | None = None) -> None:
        state.make_room(block)
        self._knowledge = knowledge
        self._state = state
        self._rows = slice(state.count, state.count + block)
        self._layers = len(knowledge.popularity)
        self._habits = Habits(knowledge.popularity, knowledge.top_k, knowledge.counts, state, block, excluded)
        self._similar = Similar(
            knowledge.archive, knowledge.popularity, state, block, knowledge.sharpness, knowledge.prior, excluded
        )

    @property
    def uses(self) -> np.ndarray:
        """What the iterations have used so far, float32 [B, L, J]."""
        return self._state.uses[self._rows]

    def fill(self, layer: int, maps: np.ndarray, uses: np.ndarray) -> None:
        """Gate ``layer`` has decided: its distributions and uses, float32 [B, J]."""
        self._state.fill(self._rows, layer, maps, uses)
        self._habits.fill(layer)

    def start(self, upcoming: np.ndarray, embeddings: np.ndarray) -> Features:
        """Of all layers [B, L, J] before the first gate; from ``upcoming``, known before, and embeddings [B, h]."""
        self._state.embed(embeddings)
        embedding_map = self._knowledge.embedding_map
        assert embedding_map is not None
        logits = apply_ridge(embedding_map, embeddings).reshape(upcoming.shape)
        learnt = logit_features("embedding-ridge", logits, self._knowledge.top_k)
        return {"prior": log_odds(upcoming), **self._similar.start(), **learnt}

    def advance(self, layer: int) -> None:
        """Search by the trajectory up to ``layer``."""
        self._similar.advance(layer)

    def advance_to_end(self) -> None:
        """Search by whole maps, all of which have been filled."""
        self._similar.advance_to_end()

    def after(self, layer: int, inputs: np.ndarray | None) -> Features:
        """Of the layer's own next visit, [B, 1, J], once its gate has decided; it read ``inputs`` [B, H]."""
        features = {**self._habits.after(layer, layer + 1), **self._similar.following(layer, layer + 1)}
        speculation = self._knowledge.speculation
        return features if inputs is None or speculation is None else {**features, **speculation.same(layer, inputs)}

    def ahead(self, layer: int, prior: np.ndarray, inputs: np.ndarray | None) -> Features:
        """Of the D layers after ``layer``, fewer at the end; ``prior`` [B, L, J], log-odds before the iteration."""
        stop = min(layer + 1 + self._knowledge.depth, self._layers)
        features = {"prior": prior[:, layer + 1 : stop], **self._similar.ahead(layer + 1, stop)}
        speculation = self._knowledge.speculation
        if inputs is None or speculation is None:
            return features
        return {**features, **speculation.ahead(layer, stop, inputs)}

    def following(self, last_inputs: np.ndarray | None) -> Features:
        """Of the whole next iteration [B, L, J]; the last gate read ``last_inputs`` [B, H]."""
        features = {
            **self._habits.after(0, self._layers),
            **self._habits.like_requests(),
            **self._similar.following(0, self._layers),
        }
        speculation = self._knowledge.speculation
        if last_inputs is None or speculation is None:
            return features
        return {**features, **speculation.following(last_inputs)}

    def close(self) -> None:
        """The iterations are complete."""
        self._habits.close()
        self._state.count = self._rows.stop
