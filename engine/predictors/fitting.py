"""Fitting the predictors on one side of a split: in seconds, deterministic, and each request on the others alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.errors import PolicyError
from engine.map_search import ActivationCounts, MapArchive
from engine.predictors.fitted import DISCOUNTS, HIDDEN, FittedPredictors
from engine.predictors.gates import fit_embedding_map, fit_gate_maps
from engine.predictors.habits import RECENCIES
from engine.predictors.knowledge import Knowledge
from engine.predictors.mix import Mix, log_loss
from engine.predictors.row_sample import RowSample
from engine.predictors.sampling import RequestSampler
from engine.predictors.similar import FOLDS, NEIGHBOURS
from engine.traces import RoutingTrace, TracedRequest

DEPTH = 6
"""D; what a running iteration tells of layers beyond it is little more than its beginning told (FINDINGS, table B)."""

MAPS = 8192
"""Stored iterations searched at most: recall rises with their number, time too."""

_TRAINING_REQUESTS = 12
SHARPNESSES = (6.0, 12.0, 25.0)
"""How fast the say of a stored or earlier iteration may fall with its cosine, see ``Similar``."""

_SHARPNESS_REQUESTS = 4
_PRIOR = 0.5

AFTER = (*RECENCIES, "previous", "previous-margin", "popularity", "successors", "own-successors")
NEXT = (*AFTER, "activation-counts")
NEXT_RIDGE = ("next-ridge", "next-ridge-margin")
START = ("prior", "semantic", "own-semantic", "embedding-ridge", "embedding-ridge-margin")
AHEAD = ("prior", "trajectory", "own-trajectory")
GATES = ("gate", "gate-margin", "ridge", "ridge-margin")


def fit_predictors(store: RoutingTrace, depth: int = DEPTH, maps: int = MAPS) -> FittedPredictors:
    """Fit everything on the decode steps of a trace.

    Args:
        store: requests recorded beforehand; nothing else is looked at.
        depth: D, layers predicted ahead at most.
        maps: stored iterations that are searched, at most.

    Raises:
        PolicyError: no request has two decode steps, and so none tells what follows.
    """
    store = store.decode_only()
    followed = [request for request in store.requests if len(request) > 1]
    if not followed:
        raise PolicyError(
            f"the predictors learn what follows a decode step, but of {len(store.requests)} recorded requests none has "
            "two of them: record more requests, or longer answers"
        )
    knowledge = _gather(store, depth, maps)
    knowledge = replace(knowledge, sharpness=_choose_sharpness(knowledge, followed))
    step = max(2, -(-len(followed) // _TRAINING_REQUESTS))
    training = followed[::step]
    chosen = {request.request for request in training}
    others = [r for r in store.requests if r.request not in chosen] or list(store.requests)
    # A map fitted on the rows that the mix is fitted on would look better there than it is.
    mixes = _fit_mixes(_with_linear_maps(knowledge, others), training)
    return FittedPredictors(_with_linear_maps(knowledge, list(store.requests)), mixes)


def _gather(store: RoutingTrace, depth: int, maps: int) -> Knowledge:
    experts = store.manifest.experts
    uses = np.concatenate([request.uses(experts) for request in store.requests])
    maps = min(maps, store.iterations)
    return Knowledge(
        top_k=store.manifest.top_k,
        depth=max(min(depth, store.manifest.layers - 1), 1),
        popularity=uses.mean(axis=0),
        archive=MapArchive.of(store, maps - maps % FOLDS if maps > FOLDS * NEIGHBOURS else maps),
        counts=ActivationCounts.of(store),
        gates=store.manifest.gates,
        maps=None,
        embedding_map=None,
        sharpness=SHARPNESSES[0],
        prior=_PRIOR,
    )


def _choose_sharpness(knowledge: Knowledge, requests: Sequence[TracedRequest]) -> float:
    """The one with which the next iteration is told best."""
    some = requests[:: max(1, len(requests) // _SHARPNESS_REQUESTS)][:_SHARPNESS_REQUESTS]

    def loss(sharpness: float) -> float:
        sample = RowSample()
        sampler = RequestSampler(FittedPredictors(replace(knowledge, sharpness=sharpness), {}), sample, True)
        for request in some:
            sampler.add_next(request)
        said = sample.fit("next", NEXT)(sample.rows("next"))
        return log_loss(said, sample.outcome("next"))

    return min(SHARPNESSES, key=loss)


def _with_linear_maps(knowledge: Knowledge, requests: list[TracedRequest]) -> Knowledge:
    maps = embedding_map = None
    if knowledge.gates is not None:
        maps = fit_gate_maps(requests, knowledge.gates, knowledge.depth)
    if knowledge.archive.embeddings is not None:
        embedding_map = fit_embedding_map(requests, knowledge.popularity.shape[1])
    return knowledge.with_maps(maps, embedding_map)


def _fit_mixes(knowledge: Knowledge, training: Sequence[TracedRequest]) -> dict[str, Mix]:
    """Mixes of one moment are features of the next, so they are fitted in turn."""
    mixes: dict[str, Mix] = {}
    sample = RowSample()
    sampler = RequestSampler(FittedPredictors(knowledge, mixes), sample, known_requests=True)
    hidden = knowledge.maps is not None

    def fit(moment: str, names: tuple[str, ...], more: tuple[str, ...]) -> None:
        mixes[moment] = sample.fit(moment, names)
        if hidden:
            mixes[moment + HIDDEN] = sample.fit(moment, (*names, *more))

    for request in training:
        sampler.add_next(request)
        sampler.add_left(request)
    fit("next", NEXT, NEXT_RIDGE)
    for discount in DISCOUNTS:
        fit(f"value-{discount:g}", NEXT, NEXT_RIDGE)
        fit(f"left-{discount:g}", AFTER, NEXT_RIDGE)
    if knowledge.embedding_map is not None:
        for request in training:
            sampler.add_starts(request)
        mixes["start"] = sample.fit("start", START)
    if len(knowledge.popularity) > 1:
        for request in training:
            sampler.add_ahead(request)
        for distance in range(1, knowledge.depth + 1):
            fit(f"ahead-{distance}", AHEAD, GATES)
    return mixes
