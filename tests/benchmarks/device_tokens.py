"""Tokens of the device's executor against transformers eager: where they part, and by how much logits differ.

    python -m tests.benchmarks.device_tokens demo --dtype float32 --cache 10% --tokens 128 --prompts 50

Eager answers each prompt greedily. The device is then made to follow eager's tokens, so that all logits can be
compared, beyond a first difference as well; up to it they are those of a device that goes its own way.

``--experts`` tells the kernels' part in a difference from that of the static cache and the mask around them: without a
GPU ``kernels`` runs in Triton's interpreter, ``arithmetic`` is the kernels' arithmetic by PyTorch, ``eager`` is eager's
in the device's step. For comparison, transformers alone: ``grouped_mm`` and ``batched_mm`` are its other experts
implementations, ``static`` its static cache under eager experts, and ``float32`` eager in float32, which shows how far
eager is from unrounded logits.

Exits 1 where a logit is no number, a logit differs by more than ``--bound`` before a near-tie of a gate has sent any of
the reply's tokens to other experts, or a token differs where eager's two best logits are further apart than two logits
within the bound could bring together.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

if not torch.cuda.is_available():
    # Read as Triton is imported, which transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import PreTrainedModel, StaticCache

from engine import device_decoder
from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.families import is_experts_module
from engine.prompts import open_prompts
from engine.source import ModelSource, resolve_model
from engine.steps import GenerationSettings
from tests.benchmarks.stale_slots import whole_tiles
from tests.engine.interpreter import mend_interpreter
from tests.engine.reference import load_reference, reference_answer
from tests.engine.table_experts import EagerExperts, KernelArithmetic, PlainKeeper, PlainMailbox

STAND_INS = {"arithmetic": KernelArithmetic, "eager": EagerExperts}
TRANSFORMERS = ("grouped_mm", "batched_mm", "static", "float32")
BOUNDS = {"float32": 2e-4, "bfloat16": 0.5}
_PROMPT_TOKENS = 200


@dataclass
class Comparison:
    """What was found over all prompts. Logits of decode steps alone: a prefill is the host's, and eager's bit for bit.

    Attributes:
        differences: largest logit difference of each position.
        unrouted: the same where no layer has routed this position or one before it to other experts.
        parted: eager's gap between its two best logits where a reply first takes another token.
        other_tokens: positions at which the likeliest token is another, having followed eager's up to there.
    """

    positions: int = 0
    replies: int = 0
    differences: list[float] = field(default_factory=list)
    unrouted: list[float] = field(default_factory=list)
    rerouted: int = 0
    parted: list[float] = field(default_factory=list)
    other_tokens: int = 0
    not_finite: int = 0

    def add(self, found: torch.Tensor, expected: torch.Tensor, routed: Sequence[bool] | None) -> None:
        """One reply: logits [N, V] of both, and whether each position was routed as by eager, where that is known."""
        self.replies += 1
        self.positions += len(expected)
        self.not_finite += int((~found.isfinite()).sum())
        differences = (found - expected).abs().amax(dim=-1).tolist()
        self.differences += differences
        parted = torch.nonzero(found.argmax(dim=-1) != expected.argmax(dim=-1)).flatten().tolist()
        self.other_tokens += len(parted)
        if parted:
            best = expected[parted[0]].topk(2).values
            self.parted.append((best[0] - best[1]).item())
        if routed is not None:
            self.rerouted += routed.count(False)
            same = routed.index(False) if False in routed else len(routed)
            self.unrouted += differences[:same]

    def describe(self) -> str:
        ordered = sorted(self.differences)
        median, last = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
        gap = f"{max(self.parted):.2g}" if self.parted else "-"
        unrouted = f"{max(self.unrouted):.2g}" if self.unrouted else "-"
        return (
            f"{self.replies} | {self.positions} | {self.other_tokens} | {len(self.parted)} | {gap} | {median:.2g} | "
            f"{last:.2g} | {ordered[-1]:.2g} | {self.rerouted} | {unrouted} | {self.not_finite}"
        )

    def within(self, bound: float) -> bool:
        routed_alike, parted = max(self.unrouted, default=0.0), max(self.parted, default=0.0)
        return not self.not_finite and routed_alike <= bound and parted <= 2 * bound


HEADER = (
    "| model | type | experts | replies | positions | other tokens | replies that part | eager's largest gap there "
    "| difference: median | 99 % | largest | routed otherwise | largest before that | no numbers |"
)


class RoutingLog:
    """The ids every experts module receives, one entry a layer and forward pass; ids [T, K]."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._ids: list[torch.Tensor] = []
        self._layers = 0
        for module in modules:
            self._layers += 1
            module.register_forward_pre_hook(self._note)

    def _note(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._ids.append(inputs[1].sort(dim=-1).values)

    def take(self, steps: int) -> list[torch.Tensor]:
        """The ids of the last forward passes, [L, T, K] each; forgets all."""
        ids = self._ids[len(self._ids) - steps * self._layers :]
        self._ids = []
        return [torch.stack(ids[start : start + self._layers]) for start in range(0, len(ids), self._layers)]


def compare(source: ModelSource, options: argparse.Namespace) -> Comparison:
    reference = load_reference(source.folder, getattr(torch, options.dtype), options.device)
    compared = Comparison()
    log = RoutingLog(module for module in reference.modules() if is_experts_module(module))
    followers = follow_by_device if options.experts in ("kernels", *STAND_INS) else follow_by_transformers
    with followers(source, options) as follow:
        for number, prompt in enumerate(read_prompts(source, options.prompts)):
            expected = reference_answer(reference, [prompt], options.tokens, pad_id=0)
            routed = log.take(options.tokens - 1)
            logits, found = follow(prompt, expected.ids[0])
            same = [torch.equal(a, b) for a, b in zip(routed, found, strict=True)] if found else None
            compared.add(logits, expected.logits[1:, 0], same)
            print(f"{number + 1}: {compared.describe()}", file=sys.stderr, flush=True)
    return compared


def read_prompts(source: ModelSource, count: int) -> Iterator[list[int]]:
    """The first turns of the bundled prompts as the model's chat template lays them out."""
    with Engine.open(source, cache=ExpertBudget.parse("100%"), device="cpu") as engine:
        for conversation in open_prompts("demo", limit=count):
            yield engine.encode_chat([m.to_dict() for m in conversation.prompts()[0]])[-_PROMPT_TOKENS:]


@contextmanager
def follow_by_device(source: ModelSource, options: argparse.Namespace) -> Iterator[Any]:
    changes: dict[str, Any] = {}
    if not torch.cuda.is_available():
        mend_interpreter()
        changes["choose_tiles"] = whole_tiles
    if options.experts in STAND_INS:
        stand_in = STAND_INS[options.experts]
        changes |= {"ExpertProducts": stand_in, "TableKeeper": PlainKeeper, "Mailbox": PlainMailbox}
    budget = ExpertBudget.parse(options.cache)
    settings = GenerationSettings(keep_logits=True)
    # A model left to the host would be eager's bit for bit, and prove nothing.
    warnings.simplefilter("error", RuntimeWarning)
    with (
        patch.multiple(device_decoder, **changes) if changes else nullcontext(),
        Engine.open(source, cache=budget, device=options.device, dtype=options.dtype, executor="device") as engine,
    ):
        # Of a captured step nothing is known but what it leaves.
        log = RoutingLog(layer.experts for layer in engine.layers) if options.device == "cpu" else None

        def follow(prompt: list[int], reply: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            steps = list(engine.generate([prompt], settings, replies=[reply]))
            logits = torch.stack([step.logits[0] for step in steps[1:] if step.logits is not None])
            return logits, [] if log is None else log.take(len(reply) - 1)

        yield follow


@contextmanager
def follow_by_transformers(source: ModelSource, options: argparse.Namespace) -> Iterator[Any]:
    dtype = "float32" if options.experts == "float32" else options.dtype
    model = load_reference(source.folder, getattr(torch, dtype), options.device)
    log = RoutingLog(module for module in model.modules() if is_experts_module(module))
    if options.experts in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(options.experts)

    def follow(prompt: list[int], reply: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        length = len(prompt) + len(reply)
        cache = StaticCache(config=model.config, max_cache_len=length) if options.experts == "static" else None
        logits = list(decode(model, prompt, reply, cache))
        return torch.stack(logits), log.take(len(reply) - 1)

    yield follow


@torch.inference_mode()
def decode(model: PreTrainedModel, prompt: list[int], reply: list[int], cache: Any) -> Iterator[torch.Tensor]:
    """Logits float32 [V] behind each token of a reply but the last; ``cache`` None is the model's own, which grows."""
    outputs = model(torch.tensor([prompt], device=model.device), past_key_values=cache, use_cache=True)
    for token in reply[:-1]:
        ids = torch.tensor([[token]], device=model.device)
        outputs = model(ids, past_key_values=outputs.past_key_values, use_cache=True)
        yield outputs.logits[0, -1].float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--dtype", choices=sorted(BOUNDS), default="float32")
    parser.add_argument("--cache", default="10%")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--experts", choices=["kernels", *STAND_INS, *TRANSFORMERS], default="kernels", help="see above"
    )
    parser.add_argument("--bound", type=float, help=f"of a difference while routing agrees; by type {BOUNDS}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bound = BOUNDS[options.dtype] if options.bound is None else options.bound
    print(HEADER, "|---" * HEADER.count(" | ") + "|---|", sep="\n")
    clean = True
    for name in options.models:
        source = resolve_model(name)
        compared = compare(source, options)
        print(f"| {source.folder.name} | {options.dtype} | {options.experts} | {compared.describe()} |", flush=True)
        clean = clean and compared.within(bound)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
