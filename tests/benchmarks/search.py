"""Time the search of one iteration: its semantic scores and its trajectory through all layers.

python -m tests.benchmarks.search --maps 1000 --layers 24 --experts 60 --hidden 2048
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from engine.records import IterationRecord
from store.index import ResidentIndex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--iterations", type=int, default=300)
    arguments = parser.parse_args()
    layers, experts, hidden = arguments.layers, arguments.experts, arguments.hidden
    rng = np.random.default_rng(0)
    index = ResidentIndex(layers, experts, hidden, capacity=arguments.maps)
    for start in range(0, arguments.maps, 100):
        count = min(100, arguments.maps - start)
        maps = rng.dirichlet(np.full(experts, 0.3), (count, layers)).astype(np.float32)
        embeddings = rng.normal(size=(count, hidden)).astype(np.float32)
        records = zip(range(start, start + count), embeddings, maps, strict=True)
        index.publish([IterationRecord(i, 0, "decode", "", 1, embedding, one) for i, embedding, one in records])
    seconds = []
    for _ in range(arguments.iterations):
        embedding = rng.normal(size=(1, hidden)).astype(np.float32)
        probabilities = rng.dirichlet(np.full(experts, 0.3), (layers, 1)).astype(np.float32)
        start_time = time.perf_counter()
        index.semantic_scores(embedding).argmax()
        scan = index.start_trajectory(1)
        for layer in range(layers):
            scan.observe(probabilities[layer]).argmax()
        seconds.append(time.perf_counter() - start_time)
    median, p90 = (float(np.percentile(seconds, q)) * 1e3 for q in (50, 90))
    print(
        f"{arguments.maps} maps of {layers} x {experts}, h {hidden}, {index.nbytes / 2**20:.1f} MiB in memory: "
        f"median {median:.2f} ms an iteration, p90 {p90:.2f} ms"
    )


if __name__ == "__main__":
    main()
