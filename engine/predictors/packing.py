"""Fitted predictors as bytes, to be kept beside the store they were fitted on: an .npz archive without code in it."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from typing import Any

import numpy as np

from engine.errors import PolicyError
from engine.map_search import ActivationCounts, MapArchive
from engine.predictors.fitted import FittedPredictors
from engine.predictors.gates import GateMaps
from engine.predictors.knowledge import Knowledge
from engine.predictors.mix import Mix
from engine.router_gates import RouterGates

VERSION = 1


def pack_predictors(fitted: FittedPredictors) -> bytes:
    """Everything that forecasts depend on; maps and linear maps with the float16 precision they have."""
    knowledge = fitted.knowledge
    archive, gates, maps = knowledge.archive, knowledge.gates, knowledge.maps
    about = {
        "version": VERSION,
        "top_k": knowledge.top_k,
        "depth": knowledge.depth,
        "sharpness": knowledge.sharpness,
        "prior": knowledge.prior,
        "scoring": None if gates is None else gates.scoring,
        "mixes": {moment: mix.names for moment, mix in fitted.mixes.items()},
    }
    arrays: dict[str, np.ndarray | None] = {
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        "popularity": knowledge.popularity,
        "maps": archive.maps.astype(np.float16),
        "uses": np.packbits(archive.uses.astype(bool), axis=2),
        "following": np.packbits(archive.following.astype(bool), axis=2),
        "owners": archive.owners,
        "embeddings": None if archive.embeddings is None else archive.embeddings.astype(np.float16),
        "counts": knowledge.counts.matrices,
        "count_owners": knowledge.counts.owners,
        "embedding_map": None if knowledge.embedding_map is None else knowledge.embedding_map.astype(np.float16),
        "gate_weights": None if gates is None else gates.weights,
        "gate_bias": None if gates is None else gates.bias,
    }
    if maps is not None:
        arrays["last"] = maps.last.astype(np.float16)
        for kind, every in (("ahead", maps.ahead), ("same", maps.same)):
            arrays |= {f"{kind}-{layer}": part.astype(np.float16) for layer, part in enumerate(every)}
    arrays |= {f"mix-{moment}": mix.weights for moment, mix in fitted.mixes.items()}
    stream = io.BytesIO()
    members: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    np.savez_compressed(stream, **members)
    return stream.getvalue()


def unpack_predictors(data: bytes) -> FittedPredictors:
    """The predictors that were packed.

    Raises:
        PolicyError: the bytes are no predictors, or of another version of them.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            if about["version"] != VERSION:
                raise PolicyError(f"fitted predictors of version {about['version']}, not {VERSION}: fit them again")
            return _restore(about, {name: arrays[name] for name in arrays.files})
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise PolicyError("fitted predictors cannot be read: fit them again") from error


def _restore(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> FittedPredictors:
    popularity = arrays["popularity"]
    layers, experts = popularity.shape

    def widen(name: str) -> np.ndarray | None:
        return arrays[name].astype(np.float32) if name in arrays else None

    def uses(name: str) -> np.ndarray:
        return np.unpackbits(arrays[name], axis=2, count=experts).astype(np.float32)

    gates = maps = None
    if "gate_weights" in arrays:
        gates = RouterGates(arrays["gate_weights"], arrays.get("gate_bias"), about["scoring"])
        ahead, same = (
            tuple(arrays[f"{kind}-{layer}"].astype(np.float32) for layer in range(layers)) for kind in ("ahead", "same")
        )
        maps = GateMaps(ahead, same, arrays["last"].astype(np.float32))
    knowledge = Knowledge(
        top_k=about["top_k"],
        depth=about["depth"],
        popularity=popularity,
        archive=MapArchive(
            arrays["maps"].astype(np.float32), uses("uses"), uses("following"), arrays["owners"], widen("embeddings")
        ),
        counts=ActivationCounts(arrays["counts"], arrays["count_owners"]),
        gates=gates,
        maps=maps,
        embedding_map=widen("embedding_map"),
        sharpness=about["sharpness"],
        prior=about["prior"],
    )
    mixes = {moment: Mix(tuple(names), arrays[f"mix-{moment}"]) for moment, names in about["mixes"].items()}
    return FittedPredictors(knowledge, mixes)
