"""What a live ``finemoe bench`` is asked for, and the combinations that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.benchmarking import STORE_STATES, StoreState
from engine.budget import ExpertBudget
from engine.decoding import ExecutorChoice
from engine.errors import UsageError
from engine.live_policies import SEARCHING, TAUGHT

FIRST = ("lru",)
LAST = ("oracle", "perfect")
"""The policies that are always measured, before and after those that are asked for."""

DRIVEN = {ExecutorChoice.HOST: "host-driven", ExecutorChoice.DEVICE: "device-driven"}
"""Executors as records name them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy at a budget behind an executor; ``state`` is None for a policy without a store."""

    policy: str
    cache: ExpertBudget
    state: StoreState | None
    executor: ExecutorChoice

    def describe(self) -> str:
        return describe_row(self.policy, self.state, self.cache.text, self.executor)


def describe_row(policy: str, state: StoreState | None, cache: str, executor: ExecutorChoice) -> str:
    """A combination in a few words, as notes name it; the host's executor goes without saying."""
    others = [] if executor is ExecutorChoice.HOST else [executor]
    return " ".join([policy, *([state.name] if state else []), cache, *others])


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The axes of a grid and its sizes.

    Attributes:
        policies: names asked for.
        states: in which the policies that search a store are measured.
        caches: budgets for the experts.
        executors: who drives decode steps.
        prompt_lengths: tokens of every prompt; None takes prompts as they are.
        new_tokens: tokens generated for a prompt.
        repetitions: passes over the tests, each on a freshly opened engine.
        store_prompts, test_prompts: prompts drawn for either side at most.
        distance: d; None for the profile's, where there is one of this machine, or else the store's own.
    """

    policies: Sequence[str]
    states: Sequence[StoreState]
    caches: Sequence[ExpertBudget]
    executors: Sequence[ExecutorChoice]
    prompt_lengths: Sequence[int | None]
    new_tokens: Sequence[int]
    repetitions: int
    store_prompts: int
    test_prompts: int
    distance: int | None

    @property
    def cells(self) -> list[Cell]:
        """Every policy at every budget behind every executor, in each state if it has a store."""
        asked = [name for name in dict.fromkeys(self.policies) if name not in FIRST + LAST]
        return [
            Cell(name, cache, state, executor)
            for cache in self.caches
            for executor in self.executors
            for name in (*FIRST, *asked, *LAST)
            for state in self._states(name)
        ]

    @property
    def needs_maps(self) -> bool:
        """Whether a policy searches a filled store."""
        return any(cell.state and cell.state.filled and cell.policy in SEARCHING for cell in self.cells)

    @property
    def needs_history(self) -> bool:
        """Whether a policy is taught by the routing of earlier requests."""
        return any(name in TAUGHT for name in self.policies)

    def _states(self, policy: str) -> Sequence[StoreState | None]:
        if policy in SEARCHING:
            return self.states
        # What it was taught is all that such a policy has, and it does not add to it.
        return [state_named("warm")] if policy in TAUGHT else [None]


def state_named(name: str) -> StoreState:
    """A state of the store by its name.

    Raises:
        UsageError: with the names there are.
    """
    for state in STORE_STATES:
        if state.name == name:
            return state
    raise UsageError(f"no store state {name!r}; there are {', '.join(state.name for state in STORE_STATES)}")
