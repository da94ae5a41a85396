"""Records, fingerprints, stores and a float64 reference that the tests of the store share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.fingerprint import ModelFingerprint
from engine.records import IterationRecord
from store.expert_map_store import ExpertMapStore
from store.rows import MapRows

LAYERS, EXPERTS, HIDDEN = 6, 8, 16


def make_fingerprint(**changes: object) -> ModelFingerprint:
    fields = {
        "architecture": "Qwen2MoeForCausalLM",
        "layers": LAYERS,
        "experts": EXPERTS,
        "top_k": 2,
        "hidden_size": HIDDEN,
        "config_hash": "c0",
        "weights_hash": "w0",
        "tokenizer_hash": "t0",
    }
    return ModelFingerprint.from_dict(fields | changes)


def make_record(
    sequence: int,
    iteration: int = 0,
    *,
    seed: int = 0,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
) -> IterationRecord:
    """A record that depends on its arguments alone."""
    rng = np.random.default_rng([seed, sequence, iteration])
    return IterationRecord(
        sequence=sequence,
        iteration=iteration,
        phase="decode" if iteration else "prefill",
        prompt_hash=f"prompt-{sequence}",
        tokens=1 if iteration else 12,
        embedding=rng.normal(size=hidden).astype(np.float32),
        probabilities=rng.dirichlet(np.full(experts, 0.3), layers).astype(np.float32),
    )


def make_records(count: int, first: int = 0, iteration: int = 0, seed: int = 0) -> list[IterationRecord]:
    return [make_record(first + i, iteration, seed=seed) for i in range(count)]


def cosines(queries: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Cosine of [m, k] with [n, k], one pair at a time in float64; 0 where either is zero."""
    result = np.zeros((len(queries), len(stored)))
    for i, a in enumerate(queries.astype(np.float64)):
        for j, b in enumerate(stored.astype(np.float64)):
            lengths = np.sqrt((a * a).sum()) * np.sqrt((b * b).sum())
            result[i, j] = (a * b).sum() / lengths if lengths else 0.0
    return result


def prefix_cosines(queries: np.ndarray, stored: np.ndarray, layers: int) -> np.ndarray:
    """Cosine of the first ``layers`` layers of maps [m, L, J] with those of [n, L, J]."""
    width = layers * queries.shape[2]
    return cosines(queries[:, :layers].reshape(-1, width), stored[:, :layers].reshape(-1, width))


def redundancies(newcomers: MapRows, stored: MapRows, distance: int) -> np.ndarray:
    """RDY = d/L * score_sem + (L - d)/L * score_map of every newcomer with every stored map."""
    layers = stored.maps.shape[1]
    distance = min(distance, layers)
    semantic = cosines(newcomers.embeddings, stored.embeddings)
    trajectory = prefix_cosines(newcomers.maps, stored.maps, layers)
    return distance / layers * semantic + (layers - distance) / layers * trajectory


def open_store(home: Path, **options) -> ExpertMapStore:
    """Open the sample model's store."""
    return ExpertMapStore.open(home, options.pop("fingerprint", make_fingerprint()), **options)


def contents(store: ExpertMapStore) -> dict[str, tuple[bytes, bytes]]:
    """Map and search vector of every key, to the bit."""
    index = store.index
    return {
        key: (index.probabilities(row).tobytes(), index.semantic_scores(np.eye(HIDDEN))[:, row].tobytes())
        for row, key in enumerate(index.keys)
    }


def warm(home: Path, count: int, first: int = 0, **options) -> dict[str, tuple[bytes, bytes]]:
    """Keep ``count`` sample maps in a store; return its contents."""
    with open_store(home, **options) as store:
        store.begin_run("warm", "prompts")
        store.publish(make_records(count, first))
        store.flush(count)
        return contents(store)
