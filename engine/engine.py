"""An open model: its dense part on the device, its experts in host memory, and what moves between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType

from jinja2 import TemplateError

from engine.budget import ExpertBudget
from engine.cache import ExpertCache
from engine.checkpoint import load_model
from engine.devices import choose_device, choose_dtype, free_bytes
from engine.errors import PromptError, UsageError
from engine.eviction import EvictionRule, LeastRecentlyUsed, ProbabilityFrequency
from engine.executor import HostDrivenExecutor
from engine.expert_arithmetic import find_accumulation
from engine.generation import TokenLoop
from engine.links import open_link
from engine.matcher import Matcher
from engine.matcher_thread import MatcherThread
from engine.observer import GateObserver, join_subscribers
from engine.records import ExpertMapLibrary
from engine.slots import DeviceSlots, slot_bytes, slots_within
from engine.source import ModelSource
from engine.steps import GenerationSettings, Step, Traffic
from engine.trace_files import TraceWriter
from engine.trace_recorder import TraceRecorder
from engine.transfers import TransferEngine

DEFAULT_DISTANCE = 3


class Engine:
    """Generates with a Mixture-of-Experts model under a budget for its experts. A context manager.

    Without a library of expert maps the cache is plain LRU and nothing is loaded ahead; with one, the
    engine searches it, prefetches and evicts by it, and gives every iteration back to it.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        cache: ExpertBudget,
        device: str,
        dtype: str,
        library: ExpertMapLibrary | None,
        distance: int,
        progress: Callable[[int, int], None] | None,
        trace: TraceWriter | None,
    ) -> None:
        if distance < 1:
            raise UsageError(f"a prefetch distance of {distance} layers is none: give at least 1")
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, source.config)
        self.fingerprint = source.fingerprint
        self.context_length = source.context_length
        top_k = source.fingerprint.top_k

        def admit(expert_bytes: int, experts: int) -> None:
            if not cache.is_automatic:
                budget = cache.resolve(experts * slot_bytes(expert_bytes), None)
                slots_within(budget, expert_bytes, experts, top_k)

        loaded = load_model(source, self.device, self.dtype, progress, admit)
        host = loaded.experts
        recorder = None if trace is None else TraceRecorder(trace, loaded.layers)
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.expert_bytes = slot_bytes(host.expert_bytes)
        self.total_expert_bytes = host.layers * host.experts * self.expert_bytes
        self.budget_bytes = cache.resolve(self.total_expert_bytes, free_bytes(self.device))
        keys = host.layers * host.experts
        self.slots = slots_within(self.budget_bytes, host.expert_bytes, keys, top_k)
        rule: EvictionRule = LeastRecentlyUsed(keys) if library is None else ProbabilityFrequency(keys)
        slots = DeviceSlots(host, self.slots, self.device)
        # The last step that may refuse the model: what follows starts threads, which only ``close`` ends.
        accumulation = find_accumulation(loaded.layers[0], host, self.dtype, self.device)
        self._transfers = TransferEngine(
            host, slots, ExpertCache(keys, self.slots, rule), open_link(host, slots, self.device)
        )
        self._matcher: MatcherThread | None = None
        if library is not None:
            matcher = Matcher(library, loaded.layers, self._transfers, distance)
            self._matcher = MatcherThread(matcher, loaded.layers, guiding=self.slots < keys)
        self._observer = GateObserver(
            loaded.model,
            loaded.layers,
            join_subscribers(self._matcher, recorder),
            gate_inputs=recorder is not None and recorder.gate_inputs,
        )
        self._executor = HostDrivenExecutor(loaded.model, loaded.layers, self._transfers, self._observer, accumulation)
        self._executor.attach()
        self._observer.attach()
        self._loop = TokenLoop(
            loaded.model,
            self.tokenizer,
            self._observer,
            self._transfers,
            self.eos_token_ids,
            self.context_length,
            self.device,
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
        distance: int = DEFAULT_DISTANCE,
        progress: Callable[[int, int], None] | None = None,
        trace: TraceWriter | None = None,
    ) -> Engine:
        """Load a model.

        Args:
            cache: budget for the device slots.
            library: expert maps of this model; None for a plain LRU cache.
            distance: d, layers between a prefetch decision and its use.
            progress: told (bytes loaded, bytes in all).
            trace: is written the routing of every iteration.

        Raises:
            BudgetError, DeviceError, CheckpointError, UnsupportedModelError, UsageError
        """
        return cls(
            source,
            cache=cache,
            device=device,
            dtype=dtype,
            library=library,
            distance=distance,
            progress=progress,
            trace=trace,
        )

    @property
    def traffic(self) -> Traffic:
        """Expert traffic since the model was opened."""
        return self._transfers.traffic

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation through the model's chat template, ready for the assistant's turn.

        A tokenizer without a template gets the turns' texts as paragraphs.

        Raises:
            PromptError: the template refuses the turns, as many refuse a system text or two turns of one role.
        """
        turns = [dict(message) for message in messages]
        if not self.tokenizer.chat_template:
            return self.encode_text("\n\n".join(turn["content"] for turn in turns))
        try:
            text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise PromptError(f"the model's chat template refuses the conversation: {error}") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

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
        """Answer a batch of prompts; see ``TokenLoop.generate``."""
        for step in self._loop.generate(prompts, settings, first_sequence, replies):
            if self._matcher is not None:
                self._matcher.check()
            yield step

    def drain(self) -> None:
        """Wait until every iteration so far has reached the library."""
        if self._matcher is not None:
            self._matcher.drain()

    def close(self) -> None:
        """Stop the engine's threads and detach from the model; idempotent."""
        self._observer.detach()
        self._executor.detach()
        if self._matcher is not None:
            self._matcher.close()
        self._transfers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
