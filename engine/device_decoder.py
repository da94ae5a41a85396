"""Device-driven decode: tokens follow one another on the device, and the host reads what they leave behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from engine.address_table import AddressTable
from engine.captured_experts import CapturedExperts
from engine.copy_streams import open_copies
from engine.decode_graph import WARM_UPS, DecodeGraph
from engine.errors import CaptureError, GenerationError
from engine.eviction import EvictionRule
from engine.expert_arithmetic import Accumulation
from engine.expert_forms import ExpertForm, find_form
from engine.expert_products import MAX_TOKENS, ExpertProducts, choose_tiles
from engine.families import MoELayer
from engine.host_experts import HostExperts
from engine.kernel_check import check_products
from engine.mailbox import DEPTH, Mailbox
from engine.matcher import Matcher, PrefetchSink
from engine.observer import GateObserver, Iteration, Subscriber
from engine.sampling import Sampler
from engine.slot_ledger import SlotLedger
from engine.slot_orders import SlotOrders
from engine.slots import DeviceSlots
from engine.steps import Traffic
from engine.steward import Steward
from engine.table_keeper import TableKeeper

_LENGTH_STEP = 256
_SPARE = 4


class SlotLender(PrefetchSink, Protocol):
    """Who holds the device slots between replies, and acts on a policy's offers then."""

    def lend_slots(self) -> dict[int, int]: ...

    def take_back(self, residents: Mapping[int, int]) -> None: ...


class DeviceDecoder:
    """Decodes batches of up to ``MAX_TOKENS`` sequences from the cache a prefill has left.

    ``begin`` takes the slots from their lender, ``close`` gives them back; between the two, ``advance`` runs one
    token a call and hands over the next before it waits for this one.

    Raises:
        CaptureError, UnsupportedModelError: the model's experts or their memory do not suit the kernels.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        host: HostExperts,
        slots: DeviceSlots,
        lender: SlotLender,
        rule: EvictionRule,
        accumulation: Accumulation,
        observer: GateObserver,
        matcher: Matcher | None,
        subscriber: Subscriber | None,
        partitions: int,
        gate_inputs: bool,
        device: torch.device,
    ) -> None:
        if device.type == "cuda" and not host.pinned:
            raise CaptureError("its experts are not in page-locked memory, which kernels could read")
        self._model = model
        self._layers = layers
        self._lender = lender
        self._observer = observer
        self._device = device
        self._gate_inputs = gate_inputs
        self._matcher = matcher
        self._host = host
        self._accumulation = accumulation
        self._keys = host.layers * host.experts
        self._table = AddressTable(host, slots, device)
        self._orders = SlotOrders(partitions, device)
        self._keeper = TableKeeper(self._table, self._orders, host.layers, host.experts, partitions)
        forms = [find_form(layer, host.layout(layer.index)) for layer in layers]
        shared = {form: ExpertProducts(form, self._keeper, accumulation, *choose_tiles(form)) for form in set(forms)}
        self._products = [shared[form] for form in forms]
        self._checked: set[tuple[ExpertForm, int, bool]] = set()
        # Only prefetches are copied; what is missed lands where another leaves.
        copied = matcher is not None and slots.count < self._keys
        spare = min(_SPARE, (slots.count - partitions) // 4) if copied else 0
        copies = open_copies(host, slots, device)
        ledger = SlotLedger(self._keys, slots.count, spare, rule, copies, self._orders, partitions)
        sizes = [host.layout(layer).nbytes for layer in range(host.layers)]
        self._steward = Steward(layers, sizes, ledger, rule, subscriber)
        self._graph: DecodeGraph | None = None
        self._mailbox: Mailbox | None = None
        self._chosen = torch.zeros(DEPTH, MAX_TOKENS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._logits: list[torch.Tensor | None] = [None] * DEPTH
        self._events: list[torch.cuda.Event | None] = [None] * DEPTH
        self._sample: Sampler | None = None
        self._handed_over = self._ended = 0
        self._reply: DeviceSteps | None = None

    @property
    def traffic(self) -> Traffic:
        """Expert traffic of all tokens booked so far."""
        return self._steward.traffic

    def accepts(self, batch: int) -> bool:
        return batch <= MAX_TOKENS

    def begin(
        self, cache_name: str, cache: Any, inputs: Mapping[str, torch.Tensor], new_tokens: int, sample: Sampler
    ) -> DeviceSteps:
        """Take over behind a prefill; no other reply may be under way.

        Args:
            cache_name, cache: the model's cache, under the name it takes it by.
            inputs: ids [B, 1] of the first token to run, attention_mask [B, S + 1] and its position_ids [B, 1].
            new_tokens: tokens that may be run.
            sample: chooses the tokens, without waiting for the device.

        Raises:
            CaptureError: the model's forward needs the host, or the kernels do not compute its experts.
        """
        residents = self._lender.lend_slots()
        self._keeper.lands = len(residents) < self._keys
        try:
            return self._begin(cache_name, cache, inputs, new_tokens, sample, residents)
        except BaseException:
            self._lender.take_back(residents)
            raise

    def _begin(
        self,
        cache_name: str,
        cache: Any,
        inputs: Mapping[str, torch.Tensor],
        new_tokens: int,
        sample: Sampler,
        residents: Mapping[int, int],
    ) -> DeviceSteps:
        # Capturing runs the step, and must not find words of an earlier reply.
        self._orders.reset()
        mask = inputs["attention_mask"][:, :-1]
        batch, length = mask.shape[0], mask.shape[1] + max(new_tokens, WARM_UPS)
        graph = self._fitting_graph(batch, length, cache_name)
        graph.fill(cache, mask, inputs["position_ids"])
        if self._graph is not graph:
            self._mailbox = self._capture(graph)
            self._graph = graph
            graph.fill(cache, mask, inputs["position_ids"])
        assert self._mailbox is not None
        graph.ids.copy_(inputs["input_ids"])
        self._synchronize()
        self._mailbox.reset()
        self._handed_over = self._ended = 0
        self._sample = sample
        if self._matcher is not None:
            self._matcher.sink = self._steward
        self._table.write(self._steward.begin(self._mailbox, residents))
        self._synchronize()
        self._steward.start()
        self._reply = DeviceSteps(self)
        return self._reply

    def runs(self, reply: DeviceSteps) -> bool:
        return self._reply is reply

    def advance(self, iteration: Iteration, follow: bool) -> tuple[torch.Tensor, list[int]]:
        """Run a token; logits [B, V] and the chosen ids. ``follow``: unless the ids end it, another one comes."""
        token = self._ended
        self._steward.announce(iteration)
        if self._handed_over == token:
            self._hand_over()
        if follow:
            self._hand_over()
        event = self._events[token % DEPTH]
        if event is not None:
            event.synchronize()
        self._ended = token + 1
        self._steward.await_token(token)
        logits = self._logits[token % DEPTH]
        assert logits is not None
        return logits, self._chosen[token % DEPTH, : len(logits)].tolist()

    def close(self) -> None:
        """Let the device come to rest and give the slots back; idempotent."""
        if self._reply is None:
            return
        self._reply = None
        self._synchronize()
        residents = self._steward.end(self._handed_over)
        if self._matcher is not None:
            self._matcher.sink = self._lender
        self._lender.take_back(residents)

    def _hand_over(self) -> None:
        """Queue the next token and what chooses the one after it."""
        assert self._graph is not None and self._sample is not None
        place = self._handed_over % DEPTH
        self._handed_over += 1
        self._graph.replay()
        with torch.inference_mode():
            logits = self._graph.logits.clone()
            chosen = self._sample(logits)
            # What no token could be drawn from is told by -1; the device goes on with any.
            self._graph.ids.copy_(chosen.clamp(min=0)[:, None])
            self._chosen[place, : len(chosen)].copy_(chosen, non_blocking=True)
        self._logits[place] = logits
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._events[place] = event

    def _fitting_graph(self, batch: int, length: int, cache_name: str) -> DecodeGraph:
        graph = self._graph
        same = graph is not None and (graph.batch, graph.lands) == (batch, self._keeper.lands)
        if graph is not None and same and graph.length >= length:
            return graph
        rounded = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        return DecodeGraph(self._model, batch, rounded, cache_name, self._keeper.lands, self._device)

    def _capture(self, graph: DecodeGraph) -> Mailbox:
        self._check(graph.batch)
        size = self._model.get_input_embeddings().embedding_dim
        mailbox = Mailbox(self._layers, graph.batch, size, self._gate_inputs, self._device)
        captured = CapturedExperts(
            self._model,
            self._layers,
            self._products,
            self._keeper,
            mailbox,
            self._observer,
            self._gate_inputs,
            self._device,
        )
        graph.capture(captured.attached, captured.finish)
        return mailbox

    def _check(self, tokens: int) -> None:
        """Try the kernels of every form on the first layer that has it, once as they are compiled for these tokens."""
        lands = self._keeper.lands
        for layer, form in zip(self._layers, (products.form for products in self._products), strict=True):
            if (form, tokens, lands) not in self._checked:
                self._checked.add((form, tokens, lands))
                check_products(form, layer, self._host, self._accumulation, tokens, lands, self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class DeviceSteps:
    """The decode steps of one reply. Another reply, once begun, ends them: the device runs one at a time."""

    def __init__(self, decoder: DeviceDecoder) -> None:
        self._decoder = decoder

    def advance(self, iteration: Iteration, follow: bool) -> tuple[torch.Tensor, list[int]]:
        if not self._decoder.runs(self):
            raise GenerationError("another reply was begun before this one had ended: the device runs one at a time")
        return self._decoder.advance(iteration, follow)

    def close(self) -> None:
        if self._decoder.runs(self):
            self._decoder.close()
