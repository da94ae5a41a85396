"""How fast a checkpoint is loaded from a warm page cache, and what memory that takes beside the weights.

    python -m tests.benchmarks.loading --gib 3
    python -m tests.benchmarks.loading --gib 24 --device cuda

The checkpoint has the layout of Qwen1.5-MoE-A2.7B, 60 experts a layer in tensors of their own, with as many layers as
fit the size. Bounds come from the same run and as many threads: fresh memory provided by the system, the same bytes
read into memory that is there already, and memory copied. The system provides memory while it is first written, so
that loading takes at least what providing and reading take one after the other. Experts lie in small pages; what huge
ones would be provided at is shown beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.architecture import build_skeleton, require_moe_layers
from engine.checkpoint import load_model, load_tokenizer
from engine.shards import INDEX_NAME, ShardReader, TensorLocation
from engine.source import ModelSource, resolve_model
from engine.synthetic import SHAPES
from engine.threads import usable_threads

SHAPE = "qwen1.5-moe"
VOCABULARY = 32768
DTYPE = torch.bfloat16
PIECE_BYTES = 16 << 20
LARGE_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where it is written; a temporary folder by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        write_checkpoint(Path(name), options.gib)
        source = resolve_model(name)
        device = torch.device(options.device)
        size = sum(file.stat().st_size for file in source.shards)
        threads = usable_threads()
        print(f"{size / 1e9:.2f} GB in {len(source.shards)} shards, {threads} threads, {device}; GB/s and MiB")
        print("| loaded | page-locked | peak beside weights | huge pages provided | small pages | read | copied |")
        print("|---|---|---|---|---|---|---|")
        for _ in range(options.rounds):
            small = time_providing(torch.empty(size, dtype=torch.uint8), threads)
            huge = time_providing(torch.from_numpy(np.empty(size, np.uint8)), threads)
            read = time_reading(source, threads)
            copied = time_copying(threads)
            seconds, peak, page_locked = time_loading(source, device)
            print(
                f"| {size / seconds / 1e9:.2f} | {page_locked} | {peak / 2**20:.0f} | {huge / 1e9:.2f} | "
                f"{small / 1e9:.2f} | {read / 1e9:.2f} | {copied / 1e9:.2f} |",
                flush=True,
            )


def write_checkpoint(folder: Path, gib: float) -> None:
    """Write random weights, a shard a layer and one for the rest."""
    config = fit_config(gib)
    skeleton = build_skeleton(config, DTYPE)
    layers = require_moe_layers(skeleton, SHAPE)
    config.dtype = DTYPE
    config.save_pretrained(folder)
    load_tokenizer(resolve_model("demo")).save_pretrained(folder)
    fused = {f"{layer.name}.{name}" for layer in layers for name in ("gate_up_proj", "down_proj")}
    dense = {name: tuple(p.shape) for name, p in skeleton.named_parameters() if name not in fused}
    places = save_random(dense, folder / "model-dense.safetensors")
    hidden, width = config.hidden_size, config.moe_intermediate_size
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    for layer in layers:
        experts = {
            f"{layer.name}.{expert}.{name}.weight": shape
            for expert in range(layer.num_experts)
            for name, shape in shapes.items()
        }
        places |= save_random(experts, folder / f"model-{layer.index:05}.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def fit_config(gib: float) -> PreTrainedConfig:
    """The shape's configuration with a small vocabulary and the layers that fit the size."""
    shape = SHAPES[SHAPE]

    def configure(layers: int) -> PreTrainedConfig:
        return CONFIG_MAPPING[shape.model_type](**shape.fields, vocab_size=VOCABULARY, num_hidden_layers=layers)

    one, two = (sum(p.nbytes for p in build_skeleton(configure(n), DTYPE).parameters()) for n in (1, 2))
    return configure(max(1, 1 + int((gib * 2**30 - one) / (two - one))))


def save_random(shapes: dict[str, tuple[int, ...]], file: Path) -> dict[str, str]:
    """Write tensors of any values into a file; returns which file each is in."""
    counts = [torch.Size(shape).numel() for shape in shapes.values()]
    # Bits of any value load alike.
    values = torch.randint(-(2**15), 2**15, (sum(counts),), dtype=torch.int16).view(DTYPE)
    parts = values.split(counts)
    save_file({name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}, file)
    return dict.fromkeys(shapes, file.name)


def time_providing(memory: torch.Tensor, threads: int) -> float:
    """Bytes a second at which the system provides memory that threads write for the first time."""
    with ThreadPoolExecutor(threads) as pool:
        return len(memory) / timed(lambda: list(pool.map(torch.Tensor.zero_, memory.split(PIECE_BYTES))))


def time_reading(source: ModelSource, threads: int) -> float:
    """Bytes a second of reading the shards into memory that is there already."""
    pieces = [
        TensorLocation("piece", file, torch.uint8, (size,), start, size)
        for file in source.shards
        for start in range(0, file.stat().st_size, PIECE_BYTES)
        for size in (min(PIECE_BYTES, file.stat().st_size - start),)
    ]
    memory = torch.zeros(LARGE_BYTES // PIECE_BYTES, PIECE_BYTES, dtype=torch.uint8)
    with ShardReader(source.shards) as reader, ThreadPoolExecutor(threads) as pool:
        places = (memory[i % len(memory), : piece.nbytes] for i, piece in enumerate(pieces))
        seconds = timed(lambda: list(pool.map(reader.read_into, places, pieces)))
    return sum(piece.nbytes for piece in pieces) / seconds


def time_copying(threads: int) -> float:
    """Bytes a second of copying memory, each byte read once and written once."""
    origin, target = torch.zeros(2, LARGE_BYTES, dtype=torch.uint8)
    with ThreadPoolExecutor(threads) as pool:
        seconds = timed(lambda: list(pool.map(torch.Tensor.copy_, target.chunk(threads), origin.chunk(threads))))
    return LARGE_BYTES / seconds


def time_loading(source: ModelSource, device: torch.device) -> tuple[float, int, bool]:
    """Seconds, peak bytes beside the weights, and whether the experts are page-locked.

    On a CPU the dense part stays in the page cache, which it is mapped from.
    """
    gc.collect()
    # 5 resets the peak of the resident set, which VmHWM tells.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_status("VmRSS")
    start = time.perf_counter()
    loaded = load_model(source, device)
    seconds = time.perf_counter() - start
    beside = memory_status("VmHWM") - before - loaded.experts.total_bytes
    return seconds, beside, loaded.experts.pinned


def memory_status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
