"""Numbers of the study (FINDINGS) that finemoe recomputes, by trace as ``findings`` names them."""

from __future__ import annotations

from engine.hardware import Hardware

CACHES = {"10%": 0.10, "25%": 0.25, "50%": 0.50, "75%": 0.75}

MODELS = {
    "mixtral": "mini-mixtral-8x7b",
    "phi": "mini-phi3.5-moe",
    "qwen": "mini-qwen1.5-moe",
    "gpt-oss": "trace-gptoss",
}


def _regime(copy_ms: float, layer_ms: float) -> Hardware:
    """A copy and a layer of so many milliseconds; transfers stop anywhere."""
    return Hardware(
        expert_bytes=1_000_000, bandwidth=1e9 / copy_ms, latency=0.0, layer_seconds=layer_ms * 1e-3, chunk_bytes=0
    )


REGIMES = {
    "mixtral": _regime(6.4, 0.19),
    "phi": _regime(2.86, 0.15),
    "qwen": _regime(0.33, 0.1),
    "gpt-oss": _regime(0.24, 0.1),
}

# Table A, TPOT relative to on-demand LRU; the rows of the study under the names of the policies that follow them.
OVERVIEW: dict[str, dict[str, tuple[float | None, ...]]] = {
    "lru-layer": {
        "mixtral": (None, None, 0.884, 0.959),
        "phi": (None, 0.937, 0.960, 0.989),
        "qwen": (0.925, 0.966, 0.991, 1.018),
        "gpt-oss": (None, 0.916, 1.066, 1.079),
    },
    "lfu": {
        "mixtral": (0.856, 1.107, 1.038, 1.161),
        "phi": (0.831, 1.036, 1.124, 1.158),
        "qwen": (1.019, 1.153, 1.191, 1.096),
        "gpt-oss": (0.778, 1.178, 1.459, 1.194),
    },
    "moe-infinity": {
        "mixtral": (0.856, 1.107, 1.040, 1.163),
        "phi": (0.833, 1.038, 1.126, 1.156),
        "qwen": (1.013, 1.144, 1.183, 1.093),
        "gpt-oss": (0.761, 1.144, 1.423, 1.185),
    },
    "mixtral-offloading": {
        "mixtral": (0.991, 1.477, 1.002, 1.002),
        "phi": (0.986, 0.985, 0.992, 0.988),
        "qwen": (0.928, 0.921, 0.906, 0.916),
    },
    "promoe": {
        "mixtral": (0.989, 1.105, 0.986, 0.984),
        "phi": (0.984, 0.981, 0.981, 0.969),
        "qwen": (0.920, 0.900, 0.859, 0.836),
    },
    "map-t+s+delta": {
        "mixtral": (0.994, 1.228, 0.999, 1.013),
        "phi": (0.993, 0.991, 1.004, 1.011),
        "qwen": (0.952, 0.959, 0.960, 0.940),
        "gpt-oss": (0.945, 0.953, 1.033, 1.000),
    },
    "finemoe-cached-freq": {
        "mixtral": (0.894, 1.159, 1.110, 1.273),
        "phi": (0.855, 1.095, 1.260, 1.367),
        "qwen": (0.966, 1.093, 1.183, 1.146),
        "gpt-oss": (0.779, 0.921, 1.019, 0.999),
    },
    "finemoe": {
        "mixtral": (0.892, 1.067, 0.900, 0.986),
        "phi": (0.808, 0.940, 0.980, 1.022),
        "qwen": (0.880, 0.922, 0.953, 0.961),
        "gpt-oss": (0.777, 0.921, 1.019, 0.999),
    },
    "oracle": {
        "mixtral": (0.673, 0.637, 0.420, 0.381),
        "phi": (0.569, 0.530, 0.441, 0.432),
        "qwen": (0.624, 0.562, 0.549, 0.663),
        "gpt-oss": (0.502, 0.566, 0.709, 0.932),
    },
    "perfect": {
        "mixtral": (0.670, 0.621, 0.388, 0.302),
        "phi": (0.548, 0.492, 0.371, 0.295),
        "qwen": (0.536, 0.431, 0.345, 0.506),
        "gpt-oss": (0.412, 0.363, 0.536, 0.891),
    },
}

# The same table's last rows: TPOT in ms and hit rate of on-demand LRU.
LRU = {
    "mixtral": ((415.68, 0.000), (250.53, 0.403), (160.70, 0.623), (64.00, 0.859)),
    "phi": ((187.84, 0.000), (116.01, 0.392), (63.58, 0.679), (27.85, 0.874)),
    "qwen": ((26.82, 0.229), (17.44, 0.525), (9.44, 0.778), (4.75, 0.926)),
    "gpt-oss": ((25.44, 0.000), (11.36, 0.611), (4.53, 0.908), (2.69, 0.987)),
}

# Table A2: TPOT relative to LRU, hit + late, loads a token.
Recommended = tuple[tuple[float, float, float], ...]
RECOMMENDED: dict[str, dict[str, Recommended]] = {
    "V5a no hidden states": {
        "mixtral": ((0.776, 0.287, 50.4), (0.877, 0.523, 34.3), (0.707, 0.760, 17.5), (0.716, 0.912, 6.6)),
        "phi": ((0.716, 0.337, 46.8), (0.805, 0.547, 32.1), (0.798, 0.767, 16.8), (0.805, 0.911, 6.5)),
        "qwen": ((0.787, 0.471, 63.8), (0.791, 0.675, 40.8), (0.779, 0.855, 19.5), (0.820, 0.954, 5.7)),
        "gpt-oss": ((0.555, 0.582, 58.6), (0.684, 0.806, 30.8), (0.833, 0.943, 7.6), (0.980, 0.990, 1.1)),
    },
    "V5b store + speculative gate": {
        "mixtral": ((0.773, 0.426, 50.2), (0.872, 0.610, 34.1), (0.703, 0.800, 17.5), (0.707, 0.930, 6.7)),
        "phi": ((0.710, 0.452, 46.6), (0.797, 0.622, 32.1), (0.785, 0.806, 17.1), (0.783, 0.930, 6.8)),
        "qwen": ((0.756, 0.560, 61.3), (0.753, 0.749, 39.3), (0.721, 0.901, 19.2), (0.730, 0.975, 6.2)),
    },
    "V5c trained": {
        "mixtral": ((0.758, 0.493, 49.2), (0.844, 0.651, 33.0), (0.679, 0.824, 16.9), (0.680, 0.939, 6.4)),
        "phi": ((0.695, 0.540, 45.6), (0.778, 0.682, 31.4), (0.762, 0.840, 16.6), (0.754, 0.945, 6.5)),
        "qwen": ((0.736, 0.587, 59.7), (0.735, 0.764, 38.3), (0.702, 0.909, 18.7), (0.702, 0.979, 6.2)),
    },
    "current token known": {
        "mixtral": ((0.744, 0.724, 48.3), (0.826, 0.883, 32.3), (0.656, 0.970, 16.4), (0.637, 0.996, 6.2)),
        "phi": ((0.683, 0.758, 44.8), (0.759, 0.883, 30.7), (0.731, 0.966, 16.1), (0.681, 0.995, 6.2)),
        "qwen": ((0.726, 0.626, 58.8), (0.714, 0.810, 37.2), (0.651, 0.947, 17.3), (0.614, 0.995, 5.3)),
        "gpt-oss": ((0.512, 0.676, 54.0), (0.586, 0.896, 26.7), (0.642, 0.992, 6.7), (0.898, 1.000, 1.1)),
    },
    "oracle prefetch + Belady": {
        "mixtral": ((0.670, 0.785, 43.5), (0.621, 0.933, 24.3), (0.388, 0.989, 9.7), (0.302, 0.999, 2.9)),
        "phi": ((0.548, 0.846, 36.0), (0.492, 0.950, 20.0), (0.371, 0.991, 8.2), (0.295, 0.999, 2.6)),
        "qwen": ((0.536, 0.764, 43.6), (0.431, 0.919, 22.5), (0.345, 0.990, 8.5), (0.506, 1.000, 2.3)),
        "gpt-oss": ((0.412, 0.768, 43.6), (0.363, 0.961, 17.1), (0.536, 0.999, 3.6), (0.891, 1.000, 0.5)),
    },
}

# Table B, recall at K and at 2K of what does not depend on the distance ...
RECALL_BEFORE: dict[str, dict[str, tuple[float, float]]] = {
    "activation counts (EAM)": {"qwen": (0.233, 0.374), "gpt-oss": (0.392, 0.625)},
    "popularity": {"qwen": (0.153, 0.269), "gpt-oss": (0.309, 0.530)},
    "previous token's gates": {"qwen": (0.228, 0.366), "gpt-oss": (0.436, 0.522)},
    "recency .7": {"qwen": (0.251, 0.391), "gpt-oss": (0.445, 0.674)},
    "recency .85": {"qwen": (0.258, 0.409), "gpt-oss": (0.448, 0.685)},
    "recency .93": {"qwen": (0.264, 0.417), "gpt-oss": (0.447, 0.689)},
    "semantic, best map": {"qwen": (0.452, 0.628), "gpt-oss": (0.369, 0.463)},
    "semantic, nearest 32": {"qwen": (0.414, 0.610), "gpt-oss": (0.388, 0.598)},
    "successors of stored matches": {"qwen": (0.313, 0.475), "gpt-oss": (0.477, 0.687)},
    "successors in the request": {"qwen": (0.326, 0.482), "gpt-oss": (0.566, 0.769)},
    "next-token ridge": {"qwen": (0.395, 0.571)},
    "map of the embedding": {"qwen": (0.583, 0.779), "gpt-oss": (0.435, 0.632)},
    "mix before the iteration": {"qwen": (0.366, 0.546), "gpt-oss": (0.574, 0.794)},
    "mix with the embedding": {"qwen": (0.620, 0.824), "gpt-oss": (0.626, 0.832)},
}

# ... and at K for distances 1, 3 and 6 of what does.
RECALL_AHEAD: dict[str, dict[str, tuple[float, float, float]]] = {
    "trajectory, best map": {"qwen": (0.537, 0.519, 0.493), "gpt-oss": (0.636, 0.606, 0.581)},
    "trajectory, nearest 32": {"qwen": (0.535, 0.521, 0.499), "gpt-oss": (0.656, 0.635, 0.620)},
    "attention over the request": {"qwen": (0.469, 0.464, 0.457), "gpt-oss": (0.731, 0.719, 0.702)},
    "later gate, present input": {"qwen": (0.847, 0.745, 0.642)},
    "ridge from the gate's input": {"qwen": (0.900, 0.830, 0.757)},
    "mix": {"qwen": (0.896, 0.829, 0.760), "gpt-oss": (0.746, 0.733, 0.717)},
}

# Recall at K for the other miniatures, for distance 3 where it matters (finding 4).
RECALL_AT_3 = {
    "popularity": {"mixtral": 0.34, "phi": 0.21},
    "previous token's gates": {"mixtral": 0.40, "phi": 0.26},
    "activation counts (EAM)": {"mixtral": 0.42, "phi": 0.27},
    "trajectory, best map": {"mixtral": 0.64, "phi": 0.50},
    "later gate, present input": {"mixtral": 0.84, "phi": 0.79},
    "ridge from the gate's input": {"mixtral": 0.89, "phi": 0.85},
}

# Table F: next-token overlap of experts, and what chance gives.
OVERLAP = {
    "mixtral": (0.404, 0.250),
    "phi": (0.259, 0.125),
    "qwen": (0.229, 0.067),
    "gpt-oss": (0.437, 0.125),
}
