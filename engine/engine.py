"""An open model: its dense part on the device, its experts in host memory, and what moves between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from engine.adaptive import AdaptivePlan
from engine.admission import DEFAULT_CONTEXT, Admission
from engine.budget import ExpertBudget
from engine.cache import ExpertCache
from engine.chat_template import encode_chat
from engine.checkpoint import LoadedModel, load_model
from engine.decoding import DeviceDecoding, ExecutorChoice, JointTraffic, choose_executor, drives_itself
from engine.devices import choose_device, choose_dtype
from engine.errors import EngineClosedError, UsageError
from engine.executor import HostDrivenExecutor
from engine.expert_arithmetic import find_accumulation
from engine.gate_probe import find_gates
from engine.generation import TokenLoop
from engine.hardware import Hardware
from engine.host_steps import PREFILL_CHUNK, takes_chunks
from engine.links import open_link
from engine.live_policies import DEFAULT_DISTANCE, PolicyInputs, build_policy, check_needs
from engine.matcher import Matcher
from engine.matcher_thread import InlineMatcher, MatcherThread
from engine.observer import GateObserver, join_subscribers
from engine.policies import OnDemand
from engine.policy_names import cache_partitions
from engine.records import ExpertMapLibrary
from engine.slots import DeviceSlots, slot_bytes
from engine.source import ModelSource
from engine.steps import GenerationSettings, Step, Traffic
from engine.streaming_transfers import StreamingTransfers
from engine.trace_files import TraceWriter
from engine.trace_recorder import TraceRecorder
from engine.traces import RoutingTrace
from engine.virtual_transfers import VirtualTransferEngine

if TYPE_CHECKING:
    from engine.device_decoder import DeviceDecoder


class Engine:
    """Generates with a Mixture-of-Experts model under a budget for its experts. A context manager.

    A policy by name decides what is loaded ahead and evicted; every iteration is given back to the library of
    expert maps, if there is one.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        cache: ExpertBudget,
        device: str,
        dtype: str,
        library: ExpertMapLibrary | None,
        policy: str | None,
        distance: int,
        history: RoutingTrace | None,
        future: RoutingTrace | None,
        adaptive: AdaptivePlan | None,
        clock: Hardware | None,
        progress: Callable[[int, int], None] | None,
        trace: TraceWriter | None,
        loaded: LoadedModel | None,
        executor: str,
        context: int,
        prefill_chunk: int | None,
    ) -> None:
        if distance < 1:
            raise UsageError(f"a prefetch distance of {distance} layers is none: give at least 1")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise UsageError(f"a prefill chunk of {prefill_chunk} tokens is none: give at least 1")
        self.device = choose_device(device)
        # Traces and virtual clocks are of every layer's own moment, which only the host's executor knows.
        by_device = drives_itself(choose_executor(executor), self.device) and trace is None and clock is None
        self.dtype = choose_dtype(dtype, source.config)
        self.fingerprint = source.fingerprint
        self.context_length = source.context_length
        self.policy = policy or ("lru" if library is None else "finemoe")
        self.distance = distance
        layers, experts = source.fingerprint.layers, source.fingerprint.experts
        partitions = cache_partitions(self.policy, layers)
        inputs = PolicyInputs(layers, experts, source.fingerprint.top_k, distance, library, history, future, adaptive)
        check_needs(self.policy, inputs)
        # Beside its own cache the device's executor keeps the one that the prefill has left.
        caches = 2 if by_device else 1
        admission = Admission(source, cache, self.device, self.dtype, context, caches, partitions)
        loaded = loaded or load_model(source, self.device, self.dtype, progress, admission.admit)
        host = loaded.experts
        chosen = build_policy(self.policy, inputs, lambda: find_gates(loaded.layers))
        recorder = None if trace is None else TraceRecorder(trace, loaded.layers)
        self.host = host
        self.layers = loaded.layers
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.expert_bytes = slot_bytes(host.expert_bytes)
        self.total_expert_bytes = host.layers * host.experts * self.expert_bytes
        self.memory, self.slots = admission.settle(loaded.sizes)
        self.budget_bytes = self.memory.slots_bytes
        keys = host.layers * host.experts
        slots = DeviceSlots(host, self.slots, self.device)
        # The last step that may refuse the model: what follows starts threads, which only ``close`` ends.
        accumulation = find_accumulation(loaded.layers[0], host, self.dtype, self.device)
        cached = ExpertCache(keys, self.slots, chosen.rule, partitions)
        link = open_link(host, slots, self.device)
        if clock is None:
            self._transfers = StreamingTransfers(host, slots, cached, link, source.fingerprint.top_k)
        else:
            self._transfers = VirtualTransferEngine(host, slots, cached, link, source.fingerprint.top_k, clock)
        self._transfers.start()
        matcher = Matcher(chosen, library, loaded.layers, self._transfers)
        self._matcher: MatcherThread | InlineMatcher | None = None
        if clock is not None:
            self._matcher = InlineMatcher(matcher, loaded.layers)
        elif library is not None or not isinstance(chosen, OnDemand):
            self._matcher = MatcherThread(matcher, loaded.layers, guiding=self.slots < keys)
        self._observer = GateObserver(
            loaded.model,
            loaded.layers,
            join_subscribers(self._matcher, recorder),
            gate_inputs=chosen.needs_gate_inputs or (recorder is not None and recorder.gate_inputs),
        )
        self._executor = HostDrivenExecutor(loaded.model, loaded.layers, self._transfers, self._observer, accumulation)
        self._executor.attach()
        self._observer.attach()
        self._closed = False

        def build_decoder() -> DeviceDecoder:
            from engine.device_decoder import DeviceDecoder

            return DeviceDecoder(
                loaded.model,
                loaded.layers,
                host,
                slots,
                self._transfers,
                chosen.rule,
                accumulation,
                self._observer,
                None if self._matcher is None else matcher,
                self._matcher,
                partitions,
                chosen.needs_gate_inputs,
                self.device,
            )

        self._decoding = decoding = DeviceDecoding(build_decoder, self._matcher) if by_device else None
        self._meter = JointTraffic(self._transfers, decoding)
        self._loop = TokenLoop(
            loaded.model,
            self.tokenizer,
            self._executor,
            self._meter,
            self.eos_token_ids,
            self.context_length,
            self.device,
            decoding,
            (prefill_chunk or PREFILL_CHUNK) if takes_chunks(loaded.model) else None,
        )

    @classmethod
    def open(
        cls,
        source: ModelSource,
        *,
        cache: ExpertBudget,
        device: str = "auto",
        dtype: str = "auto",
        library: ExpertMapLibrary | None = None,
        policy: str | None = None,
        distance: int = DEFAULT_DISTANCE,
        history: RoutingTrace | None = None,
        future: RoutingTrace | None = None,
        adaptive: AdaptivePlan | None = None,
        clock: Hardware | None = None,
        progress: Callable[[int, int], None] | None = None,
        trace: TraceWriter | None = None,
        loaded: LoadedModel | None = None,
        executor: str = "host",
        prefill_chunk: int | None = None,
        context: int = DEFAULT_CONTEXT,
    ) -> Engine:
        """Load a model.

        Args:
            cache: budget for the device slots.
            library: expert maps of this model.
            policy: by name; None for ``finemoe`` where there is a library and ``lru`` where there is none.
            distance: d, layers between a prefetch decision and its use.
            history: routing of earlier requests, for policies that count it.
            future: routing of the requests to come, one after the other, for the policies that know it.
            adaptive: predictors and settings of ``adaptive``; None to fit them on ``history``.
            clock: time model of a virtual clock: copies then take its time instead of their own, and what is hit, late
                or missed depends on nothing but the routing. None for the machine's own time.
            progress: told (bytes loaded, bytes in all).
            trace: is written the routing of every iteration.
            loaded: the model of ``source`` on ``device`` as an engine that is closed by now has left it, to spare
                loading it again.
            executor: who drives decode steps: ``host``, bit for bit as transformers; ``device``, whose sums are in
                another order; or ``auto``, the device wherever it can.
            context: tokens of a prompt and its reply whose key/value cache has to fit beside the budget.
            prefill_chunk: tokens of each prompt that one pass of a prefill takes at most, ``PREFILL_CHUNK`` if None;
                models that keep a running state take prompts whole. Other chunks are other sums: logits of a prompt
                of one chunk are bit for bit transformers', those of more are those of transformers fed the same chunks.

        Raises:
            BudgetError, DeviceError, CheckpointError, MemoryShortageError, PolicyError, UnsupportedModelError,
            UsageError
        """
        return cls(
            source,
            cache=cache,
            device=device,
            dtype=dtype,
            library=library,
            policy=policy,
            distance=distance,
            history=history,
            future=future,
            adaptive=adaptive,
            clock=clock,
            progress=progress,
            trace=trace,
            loaded=loaded,
            executor=executor,
            prefill_chunk=prefill_chunk,
            context=context,
        )

    @property
    def executor(self) -> ExecutorChoice:
        """Who drives decode steps, host or device, as far as is known by now."""
        by_host = self._decoding is None or self._decoding.refused
        return ExecutorChoice.HOST if by_host else ExecutorChoice.DEVICE

    @property
    def traffic(self) -> Traffic:
        """Expert traffic since the model was opened."""
        return self._meter.traffic

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation; see ``engine.chat_template.encode_chat``."""
        return encode_chat(self.tokenizer, messages)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens the tokenizer adds by itself."""
        return self.tokenizer(text)["input_ids"]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        first_sequence: int | None = None,
        replies: Sequence[Sequence[int]] | None = None,
    ) -> Generator[Step, None, None]:
        """Answer a batch of prompts; see ``TokenLoop.generate``.

        Raises:
            EngineClosedError: the engine has been closed, before or meanwhile.
            MemoryShortageError: memory ran out.
        """
        self._require_open()
        # Closed here and now when the caller leaves: some Pythons put it off.
        steps_of = self._loop.generate(prompts, settings, first_sequence, replies)
        with closing(steps_of) as steps, self.memory.naming("generating"):
            for step in steps:
                if self._matcher is not None:
                    self._matcher.check()
                yield step
                self._require_open()

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """A block in which nothing is recorded, searched or prefetched, so that measurements see the model alone."""
        self._observer.detach()
        try:
            yield
        finally:
            self._observer.attach()

    def drain(self) -> None:
        """Wait until every iteration so far has reached the library."""
        if self._matcher is not None:
            self._matcher.drain()

    def close(self) -> None:
        """Stop the engine's threads and detach from the model; idempotent."""
        self._closed = True
        if self._decoding is not None:
            self._decoding.close()
        self._observer.detach()
        self._executor.detach()
        if self._matcher is not None:
            self._matcher.close()
        self._transfers.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed: open the model again to generate")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
