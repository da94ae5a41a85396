"""Whether a token ever comes from a slot that is nobody's: a long run with poison in every free slot.

    python -m tests.benchmarks.stale_slots --tokens 50000 --experts python

A tiny random model decodes greedily by the device's executor at a 10 % budget, with a policy that prefetches, and is
compared with transformers eager token by token. Slots are filled with not-a-numbers as they become free. Without a GPU
the steward's thread copies slowly, in pieces, beside the tokens; ``--experts kernels`` runs the kernels in Triton's
interpreter, ``python`` runs stand-ins that read and land slowly, too, and poison the slots to be landed in at the
moment the table no longer leads to them. Exits 1 at a difference.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from engine import device_decoder
from engine.budget import ExpertBudget
from engine.copy_streams import HostCopies
from engine.engine import Engine
from engine.expert_forms import ExpertForm
from engine.expert_products import Tile
from engine.host_experts import HostExperts
from engine.slots import DeviceSlots
from engine.source import ModelSource, resolve_model
from engine.steps import Traffic
from tests.engine.interpreter import mend_interpreter
from tests.engine.poison import poison_free_slots
from tests.engine.reference import engine_answer, load_reference, reference_answer
from tests.engine.table_experts import EagerExperts, PlainKeeper, PlainMailbox
from tests.engine.tiny_models import VOCABULARY, build_tiny_model

PROMPT_TOKENS = 8
_NOT_A_NUMBER = 255
_SWITCH_SECONDS = 2e-4
_READING_SECONDS = 1e-4
_COPY_SECONDS = 2e-3


@dataclass
class Findings:
    """What a run has shown so far.

    Attributes:
        tokens: decoded by the device.
        other_tokens: places of tokens that differ from eager's, (reply, position).
        not_finite: logits that are no numbers.
        largest_difference: of logits, as far as the tokens are eager's.
        poisoned: slots that became free.
    """

    tokens: int = 0
    replies: int = 0
    other_tokens: list[tuple[int, int]] = field(default_factory=list)
    not_finite: int = 0
    largest_difference: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    poisoned: int = 0

    @property
    def clean(self) -> bool:
        return not self.other_tokens and not self.not_finite


def compare(
    source: ModelSource, tokens: int, reply_tokens: int, device: str, policy: str, batch: int = 1
) -> Iterator[Findings]:
    """Decode with poisoned slots until so many tokens are compared with eager's; the findings after every reply."""
    reference = load_reference(source.folder, torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    found = Findings()
    budget = ExpertBudget.parse("10%")
    with (
        pytest.MonkeyPatch.context() as patched,
        Engine.open(source, cache=budget, device=device, dtype="float32", policy=policy, executor="device") as engine,
    ):
        poisoned = poison_free_slots(patched)
        while found.tokens < tokens:
            prompts = torch.randint(3, VOCABULARY - 64, (batch, PROMPT_TOKENS), generator=generator).tolist()
            expected = reference_answer(reference, prompts, reply_tokens + 1, pad_id=0)
            before = engine.traffic
            answer = engine_answer(engine, prompts, reply_tokens + 1)
            found.traffic = found.traffic + (engine.traffic - before)
            for row in range(batch):
                pairs = zip(answer.ids[row], expected.ids[row], strict=True)
                same = next((place for place, (ours, eagers) in enumerate(pairs) if ours != eagers), reply_tokens + 1)
                if same <= reply_tokens:
                    found.other_tokens.append((found.replies + row, same))
                difference = (answer.logits[: same + 1, row] - expected.logits[: same + 1, row]).abs().max().item()
                found.largest_difference = max(found.largest_difference, difference)
            found.not_finite += int((~answer.logits.isfinite()).sum())
            found.replies += batch
            found.tokens += batch * reply_tokens
            found.poisoned = len(poisoned)
            yield found


class UnhurriedExperts(EagerExperts):
    """Lets the copies go on between finding bytes and reading them, for about as long as a kernel of a GPU takes."""

    def _view(self, address: int, offset: int, count: int) -> torch.Tensor:
        found = super()._view(address, offset, count)
        time.sleep(_READING_SECONDS)
        return found


class PoisoningKeeper(PlainKeeper):
    """From the moment a layer is resolved, nobody may read the slots that it lands experts in."""

    landed = 0

    def resolve(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        routes = super().resolve(layer, ids)
        for landing in filter(None, routes[ids.numel() : 2 * ids.numel()].tolist()):
            ctypes.memset(landing, _NOT_A_NUMBER, int(self._table.slots[1] - self._table.slots[0]))
            PoisoningKeeper.landed += 1
        return routes


class UnhurriedCopies(HostCopies):
    """Copies that begin, go on and end at any moment of a token, as those of a link do."""

    filled = 0

    def __init__(self, host: HostExperts, slots: DeviceSlots, device: torch.device) -> None:
        super().__init__(host, slots)
        self._random = random.Random(0)

    def fill(self, key: int, slot: int) -> int:
        UnhurriedCopies.filled += 1
        source = self._host.buffer(*divmod(key, self._host.experts))
        target = self._slots.bytes_of(slot, 0, len(source))
        for part, bytes_of_part in zip(target.chunk(2), source.chunk(2), strict=True):
            time.sleep(self._random.uniform(0, _COPY_SECONDS))
            part.copy_(bytes_of_part)
        self._done += 1
        return self._done


@contextmanager
def quick_experts(experts: str) -> Iterator[None]:
    """Without a GPU: kernels in a few large programs, which are the interpreter's cost, or Python in their place."""
    if torch.cuda.is_available():
        yield
        return
    mend_interpreter()
    changes: dict[str, Any] = {"choose_tiles": whole_tiles, "open_copies": UnhurriedCopies}
    if experts == "python":
        changes |= {"ExpertProducts": UnhurriedExperts, "TableKeeper": PoisoningKeeper, "Mailbox": PlainMailbox}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with patch.multiple(device_decoder, **changes):
            yield
    finally:
        sys.setswitchinterval(interval)


def whole_tiles(form: ExpertForm) -> tuple[Tile, Tile]:
    """One program an expert: the interpreter's time goes by programs."""
    return tuple(  # type: ignore[return-value]
        Tile(outputs=_power_of_two(outputs), inputs=_power_of_two(projection.size_in), warps=4)
        for projection, outputs in ((form.up, form.intermediate), (form.down, form.down.size_out))
    )


def _power_of_two(number: int) -> int:
    return max(16, 1 << (number - 1).bit_length())


def build_model(folder: Path) -> ModelSource:
    """Two layers of 64 experts, of which 12 fit a 10 % budget, two of them spare."""
    return resolve_model(
        str(build_tiny_model("qwen2_moe", folder, num_hidden_layers=2, num_experts=64, num_experts_per_tok=2))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--reply", type=int, default=250, help="tokens of a reply")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--policy", default="mixtral-offloading")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--experts", choices=["kernels", "python"], default="kernels", help="python: on a CPU only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A model left to the host would be eager's bit for bit, and prove nothing.
    warnings.simplefilter("error", RuntimeWarning)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, quick_experts(options.experts):
        source = build_model(Path(folder))
        for found in compare(source, options.tokens, options.reply, options.device, options.policy, options.batch):
            if found.replies % 10 == 0:
                print(f"{time.perf_counter() - start:.0f} s: {found}", file=sys.stderr, flush=True)
    traffic = found.traffic
    print(
        f"{found.tokens:,} tokens in {found.replies} replies: {len(found.other_tokens)} tokens other than eager's "
        f"{found.other_tokens[:5]}, {found.not_finite} logits no numbers, largest logit difference "
        f"{found.largest_difference:.1e}; {found.poisoned:,} slots became free, {UnhurriedCopies.filled:,} were copied "
        f"to, {PoisoningKeeper.landed:,} landed in; hit {traffic.hit_rate:.3f}, late {traffic.late:,}, "
        f"missed {traffic.misses:,}"
    )
    sys.exit(0 if found.clean else 1)


if __name__ == "__main__":
    main()
