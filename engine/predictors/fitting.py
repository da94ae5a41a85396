"""Fitting the predictors on one side of a split: in seconds, deterministic, and each request on the others alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from engine.map_search import ActivationCounts, MapArchive
from engine.predictors.features import Features
from engine.predictors.fitted import DISCOUNTS, HIDDEN, FittedPredictors, blocks, steady_value
from engine.predictors.gates import fit_embedding_map, fit_gate_maps
from engine.predictors.habits import RECENCIES
from engine.predictors.knowledge import Knowledge, Scan
from engine.predictors.mix import Mix, fit_mix
from engine.predictors.request_state import RequestState
from engine.predictors.similar import FOLDS, NEIGHBOURS
from engine.traces import RoutingTrace, TracedRequest

DEPTH = 6
MAPS = 8192
TRAINING_REQUESTS = 12

_ROWS = 20_000
_SHARPNESS, _PRIOR = 25.0, 0.5

_AFTER = (*RECENCIES, "previous", "popularity", "successors", "own-successors")
_NEXT = (*_AFTER, "activation-counts")
_NEXT_RIDGE = ("next-ridge", "next-ridge-margin")
_START = ("prior", "semantic", "own-semantic", "embedding-ridge", "embedding-ridge-margin")
_AHEAD = ("prior", "trajectory", "own-trajectory")
_GATES = ("gate", "gate-margin", "ridge", "ridge-margin")


class RowSample:
    """Rows of features and outcomes by moment, drawn at random."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._features: dict[str, list[dict[str, np.ndarray]]] = defaultdict(list)
        self._outcomes: dict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, moment: str, features: Features, outcome: np.ndarray, count: int) -> None:
        """Draw so many of the cases that features and outcome, all of one shape, stand for."""
        pick = self._rng.integers(0, outcome.size, count)
        self._features[moment].append({name: f.reshape(-1)[pick] for name, f in features.items()})
        self._outcomes[moment].append(outcome.reshape(-1)[pick])

    def rows(self, moment: str) -> dict[str, np.ndarray]:
        parts = self._features[moment]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def outcome(self, moment: str) -> np.ndarray:
        return np.concatenate(self._outcomes[moment])

    def fit(self, moment: str, names: Sequence[str]) -> Mix:
        return fit_mix(names, self.rows(moment), self.outcome(moment))


def gather_knowledge(store: RoutingTrace, depth: int = DEPTH, maps: int = MAPS) -> Knowledge:
    """What the store's side tells without any fit; linear maps are not among it."""
    experts = store.manifest.experts
    uses = np.concatenate([request.uses(experts) for request in store.requests])
    return Knowledge(
        top_k=store.manifest.top_k,
        depth=min(depth, max(store.manifest.layers - 1, 1)),
        popularity=uses.mean(axis=0),
        archive=MapArchive.of(store, _round(min(maps, store.iterations))),
        counts=ActivationCounts.of(store),
        gates=getattr(store.manifest, "gates", None),
        maps=None,
        embedding_map=None,
        sharpness=_SHARPNESS,
        prior=_PRIOR,
    )


def _round(maps: int) -> int:
    """A number of stored iterations that is searched fast."""
    return maps - maps % FOLDS if maps > FOLDS * NEIGHBOURS else maps


def fit_predictors(store: RoutingTrace, depth: int = DEPTH, maps: int = MAPS) -> FittedPredictors:
    """Fit everything on the decode steps of a trace.

    Args:
        store: requests recorded beforehand; nothing else is looked at.
        depth: D, layers predicted ahead at most.
        maps: stored iterations that are searched, at most.
    """
    store = store.decode_only()
    knowledge = gather_knowledge(store, depth, maps)
    step = max(2, -(-len(store.requests) // TRAINING_REQUESTS))
    training = store.requests[::step]
    others = [r for i, r in enumerate(store.requests) if i % step] or list(store.requests)
    # A map fitted on the rows that the mix is fitted on would look better there than it is.
    honest = _with_linear_maps(knowledge, others)
    mixes = _fit_mixes(honest, training)
    return FittedPredictors(_with_linear_maps(knowledge, list(store.requests)), mixes)


def _with_linear_maps(knowledge: Knowledge, requests: list[TracedRequest]) -> Knowledge:
    maps = embedding_map = None
    if knowledge.gates is not None:
        maps = fit_gate_maps(requests, knowledge.gates, knowledge.depth)
    if knowledge.archive.embeddings is not None:
        embedding_map = fit_embedding_map(requests, knowledge.popularity.shape[1])
    return knowledge.with_maps(maps, embedding_map)


def _fit_mixes(knowledge: Knowledge, training: Sequence[TracedRequest]) -> dict[str, Mix]:
    mixes: dict[str, Mix] = {}
    sample = RowSample()
    for request in training:
        _sample_visits(knowledge, request, sample)
    hidden = knowledge.maps is not None
    for moment, names in (("next", _NEXT), *((f"value-{g:g}", _NEXT) for g in DISCOUNTS)):
        _fit_both(mixes, sample, moment, names, _NEXT_RIDGE, hidden)
    for discount in DISCOUNTS:
        _fit_both(mixes, sample, f"left-{discount:g}", _AFTER, _NEXT_RIDGE, hidden)
    if knowledge.embedding_map is not None:
        for request in training:
            _sample_starts(knowledge, request, mixes, sample)
        mixes["start"] = sample.fit("start", _START)
    for request in training:
        _sample_ahead(knowledge, request, mixes, sample)
    for distance in range(1, knowledge.depth + 1):
        _fit_both(mixes, sample, f"ahead-{distance}", _AHEAD, _GATES, hidden)
    return mixes


def _fit_both(
    mixes: dict[str, Mix], sample: RowSample, moment: str, names: tuple[str, ...], more: tuple[str, ...], hidden: bool
) -> None:
    mixes[moment] = sample.fit(moment, names)
    if hidden:
        mixes[moment + HIDDEN] = sample.fit(moment, (*names, *more))


def _scan(knowledge: Knowledge, request: TracedRequest, state: RequestState):
    """The filled scans of a request that does not find itself in the store, with their blocks."""
    layers, experts = knowledge.popularity.shape
    for block in blocks(request, experts):
        scan = Scan(knowledge, state, len(block.maps), excluded=request.request)
        for layer in range(layers):
            scan.fill(layer, block.maps[:, layer], block.uses[:, layer])
        yield scan, block
        scan.close()


def discounted_next_use(uses: np.ndarray, beyond: np.ndarray, discount: float) -> np.ndarray:
    """``discount`` to the iterations until the next use, [T + 1, ...] for uses [T, ...]; ``beyond`` after the last."""
    values = np.empty((len(uses) + 1, *uses.shape[1:]), dtype=np.float32)
    values[-1] = beyond
    for t in range(len(uses) - 1, -1, -1):
        values[t] = uses[t] + (1 - uses[t]) * discount * values[t + 1]
    return values


def _sample_visits(knowledge: Knowledge, request: TracedRequest, sample: RowSample) -> None:
    layers, experts = knowledge.popularity.shape
    uses = request.uses(experts)
    happened = np.concatenate([uses, uses[-1:]])
    values = {
        g: discounted_next_use(uses, steady_value(knowledge.popularity, g), g) for g in DISCOUNTS
    }
    for scan, block in _scan(knowledge, request, RequestState(knowledge.popularity)):
        share = len(block.maps) / len(request)
        inputs = block.inputs if knowledge.maps is not None else None
        after = slice(block.rows.start + 1, block.rows.stop + 1)
        # What follows the last step of a request is not known.
        known = slice(0, min(block.rows.stop, len(request) - 1) - block.rows.start)
        scan.advance_to_end()
        features = scan.following(None if inputs is None else inputs[:, -1])
        outcomes = {"next": happened[after], **{f"value-{g:g}": v[after] for g, v in values.items()}}
        _add_together(sample, outcomes, features, known, round(_ROWS * share))
        for layer in range(layers):
            scan.advance(layer)
            features = scan.after(layer, None if inputs is None else inputs[:, layer])
            outcomes = {f"left-{g:g}": v[after, layer : layer + 1] for g, v in values.items()}
            _add_together(sample, outcomes, features, known, round(_ROWS * share / layers))


def _add_together(
    sample: RowSample, outcomes: dict[str, np.ndarray], features: Features, known: slice, count: int
) -> None:
    for moment, outcome in outcomes.items():
        if outcome[known].size:
            sample.add(moment, {name: f[known] for name, f in features.items()}, outcome[known], count)


def _upcoming(knowledge: Knowledge, mixes: dict[str, Mix], scan: Scan, inputs, before: np.ndarray) -> np.ndarray:
    """Probabilities [B + 1, L, J] before each iteration of a filled block and after it; the first are given."""
    scan.advance_to_end()
    hidden = inputs is not None and knowledge.maps is not None
    following = scan.following(inputs[:, -1] if hidden else None)
    return np.concatenate([before[None], mixes["next" + HIDDEN if hidden else "next"](following)])


def _sample_starts(knowledge: Knowledge, request: TracedRequest, mixes: dict[str, Mix], sample: RowSample) -> None:
    before = knowledge.popularity
    for scan, block in _scan(knowledge, request, RequestState(knowledge.popularity)):
        upcoming = _upcoming(knowledge, mixes, scan, block.inputs, before)
        before = upcoming[-1]
        share = len(block.maps) / len(request)
        sample.add("start", scan.start(upcoming[:-1], block.embeddings), block.uses, round(_ROWS * share))


def _sample_ahead(knowledge: Knowledge, request: TracedRequest, mixes: dict[str, Mix], sample: RowSample) -> None:
    layers = len(knowledge.popularity)
    before = knowledge.popularity
    for scan, block in _scan(knowledge, request, RequestState(knowledge.popularity)):
        upcoming = _upcoming(knowledge, mixes, scan, block.inputs, before)
        before, known = upcoming[-1], upcoming[:-1]
        if "start" in mixes:
            known = mixes["start"](scan.start(known, block.embeddings))
        inputs = block.inputs if knowledge.maps is not None else None
        count = round(_ROWS * len(block.maps) / len(request) / layers)
        for layer in range(layers - 1):
            scan.advance(layer)
            features = scan.ahead(layer, known, None if inputs is None else inputs[:, layer])
            for i in range(features["prior"].shape[1]):
                here = {name: f[:, i] for name, f in features.items()}
                sample.add(f"ahead-{i + 1}", here, block.uses[:, layer + 1 + i], count)
