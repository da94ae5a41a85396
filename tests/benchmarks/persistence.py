"""What a warm store is worth to prompts it has not seen: hit rates with it, with an empty one, and without any.

    finemoe warm --model M --dataset FILE --limit 300
    python -m tests.benchmarks.persistence --model M --dataset FILE --skip 300 --prompts 30

Run it in a process of its own after the warm: the store comes from disk. Each way answers the same prompts, the first
user turn of the conversations after the first ``--skip``, one by one with an expert budget of ``--cache``. The store
is copied first, so that the prompts answered here do not warm it for the next run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.prompts import open_prompts
from engine.records import ExpertMapLibrary
from engine.source import ModelSource, resolve_model
from engine.steps import GenerationSettings, Traffic, summarize
from finemoe_cli.settings import load_settings
from store.expert_map_store import ExpertMapStore


def answer(source: ModelSource, library: ExpertMapLibrary | None, arguments: argparse.Namespace) -> list[Traffic]:
    """Prefill and decode traffic over all prompts."""
    prefill, decode = Traffic(), Traffic()
    with Engine.open(source, cache=ExpertBudget.parse(arguments.cache), device="cpu", library=library) as engine:
        conversations = list(open_prompts(arguments.dataset, limit=arguments.skip + arguments.prompts))
        for conversation in conversations[arguments.skip :]:
            ids = engine.encode_chat([message.to_dict() for message in conversation.prompts()[0]])
            ids = ids[-(engine.context_length or len(ids)) + arguments.new_tokens :]
            settings = GenerationSettings(max_new_tokens=arguments.new_tokens)
            summary = summarize(list(engine.generate([ids], settings)), len(ids))
            engine.drain()
            prefill, decode = prefill + summary.prefill, decode + summary.decode
    return [prefill, decode]


def describe(traffic: Traffic) -> str:
    counts = (traffic.hits, traffic.late, traffic.misses)
    shares = "  ".join(f"{n} {c / traffic.routed:6.1%}" for n, c in zip(("hit", "late", "miss"), counts, strict=True))
    moved = (traffic.bytes_on_demand, traffic.bytes_prefetched, traffic.bytes_wasted)
    return shares + "  MiB on demand {:.0f}, ahead {:.0f}, wasted {:.0f}".format(*(b / 2**20 for b in moved))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--skip", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--cache", default="25%")
    arguments = parser.parse_args()
    source = resolve_model(arguments.model)
    home = load_settings({}).home_folder
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "home"
        shutil.copytree(home, copied)
        for name, place in (("warm store", copied), ("empty store", Path(folder) / "empty"), ("no store: LRU", None)):
            if place is None:
                traffic = answer(source, None, arguments)
            else:
                with ExpertMapStore.open(place, source.fingerprint) as library:
                    library.begin_run("bench")
                    held = len(library)
                    traffic = answer(source, library, arguments)
                    name = f"{name} ({held} maps)"
            for phase, counted in zip(("prefill", "decode"), traffic, strict=True):
                print(f"{name:24} {phase:8} {describe(counted)}", flush=True)


if __name__ == "__main__":
    main()
