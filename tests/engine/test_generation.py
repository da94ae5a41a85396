"""The token loop: ends of sequences, batches, limits, early closing, statistics."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.errors import BudgetError, DeviceError, EngineClosedError, PromptError, UnsupportedModelError, UsageError
from engine.source import ModelSource, resolve_model
from engine.steps import GenerationSettings, Step, summarize
from store.index import ResidentIndex


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def library(source: ModelSource) -> ResidentIndex:
    shape = source.fingerprint
    return ResidentIndex(shape.layers, shape.experts, shape.hidden_size, capacity=500, distance=3)


@pytest.fixture(scope="module")
def engine(source: ModelSource, library: ResidentIndex) -> Iterator[Engine]:
    with Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu", library=library) as engine:
        yield engine


def chat(engine: Engine, text: str) -> list[int]:
    return engine.encode_chat([{"role": "user", "content": text}])


def tokens_of(steps: list[Step], row: int) -> list[int]:
    return [t for step in steps if (t := step.token_ids[row]) is not None]


def test_a_turn_ends_at_any_end_of_turn_token(engine: Engine) -> None:
    steps = list(engine.generate([chat(engine, "Hello!")], GenerationSettings(max_new_tokens=300)))
    tokens = tokens_of(steps, 0)
    assert tokens[-1] in engine.eos_token_ids
    assert not engine.eos_token_ids.intersection(tokens[:-1])
    assert steps[-1].finished == ("stop",)
    assert engine.eos_token_ids >= {0, 1}  # tokenizer and configuration name one, the generation configuration two


def test_each_sequence_of_a_batch_ends_by_itself(engine: Engine) -> None:
    prompts = [chat(engine, "Hello!"), chat(engine, "Write a long story about a dragon who lived in a cave.")]
    alone = [list(engine.generate([p], GenerationSettings(max_new_tokens=80))) for p in prompts]
    steps = list(engine.generate(prompts, GenerationSettings(max_new_tokens=80)))
    for row in range(2):
        tokens = tokens_of(steps, row)
        assert len(tokens) == next(i for i, s in enumerate(steps) if s.finished[row]) + 1
        assert (tokens[-1] in engine.eos_token_ids) == (steps[-1].finished[row] == "stop")
        assert all(s.texts[row] == "" for s in steps if s.token_ids[row] is None)
    assert all(alone)


def test_replies_take_the_place_of_chosen_tokens(engine: Engine) -> None:
    """Forced to say what it would have said, the model is in the same states; a reply ends only with its tokens."""
    prompts = [chat(engine, "Hello!"), chat(engine, "What is the capital of France?")]
    keep = GenerationSettings(12, ignore_eos=True, keep_logits=True)
    free = list(engine.generate(prompts, keep))
    said = [tokens_of(free, row) for row in range(2)]
    forced = list(engine.generate(prompts, keep, replies=said))
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(free, forced, strict=True))
    eos = min(engine.eos_token_ids)
    steps = list(engine.generate(prompts, GenerationSettings(4), replies=[[eos, 5], [6, 7, 8, 9, 10]]))
    assert [tokens_of(steps, row) for row in range(2)] == [[eos, 5], [6, 7, 8, 9]]
    for wrong in ([[1]], [[1], []]):
        with pytest.raises(PromptError, match="a reply of at least one token for each prompt"):
            next(engine.generate(prompts, keep, replies=wrong))


def test_texts_add_up_to_the_decoded_tokens(engine: Engine) -> None:
    steps = list(engine.generate([chat(engine, "Sag mir etwas auf Deutsch über Käse.")], GenerationSettings(60)))
    text = "".join(step.texts[0] for step in steps)
    assert text == engine.tokenizer.decode(tokens_of(steps, 0), skip_special_tokens=True)


def test_statistics_cover_every_layer_and_add_up(engine: Engine, source: ModelSource) -> None:
    prompt = chat(engine, "What is the capital of France?")
    before = engine.traffic
    steps = list(engine.generate([prompt], GenerationSettings(max_new_tokens=12, ignore_eos=True)))
    summary = summarize(steps, len(prompt))
    shape = source.fingerprint
    assert summary.decode.routed == 11 * shape.layers * shape.top_k
    assert summary.prefill.routed >= shape.layers * shape.top_k
    total = engine.traffic - before
    assert (summary.prefill + summary.decode).routed == total.routed
    assert summary.new_tokens == 12 and summary.prompt_tokens == len(prompt)
    assert summary.ttft > 0 and summary.tpot > 0 and summary.tokens_per_second > 0


def test_every_iteration_of_every_live_sequence_is_recorded_once(engine: Engine, library: ResidentIndex) -> None:
    prompts = [chat(engine, "Hello!"), chat(engine, "Tell me about whales.")]
    engine.drain()
    before = len(library)
    steps = list(engine.generate(prompts, GenerationSettings(max_new_tokens=20)))
    engine.drain()
    assert len(library) - before == sum(t is not None for step in steps for t in step.token_ids)


def test_closing_early_leaves_the_engine_usable(engine: Engine) -> None:
    prompt = chat(engine, "Count to ten.")
    whole = tokens_of(list(engine.generate([prompt], GenerationSettings(max_new_tokens=10))), 0)
    running = engine.generate([prompt], GenerationSettings(max_new_tokens=10))
    next(running)
    running.close()
    assert tokens_of(list(engine.generate([prompt], GenerationSettings(max_new_tokens=10))), 0) == whole


def test_sampling_repeats_with_its_seed(engine: Engine) -> None:
    prompt = chat(engine, "Invent a word.")
    settings = GenerationSettings(max_new_tokens=15, temperature=1.0, top_p=0.95, top_k=50, seed=11)
    first, second = (tokens_of(list(engine.generate([prompt], settings)), 0) for _ in range(2))
    assert first == second
    other = GenerationSettings(max_new_tokens=15, temperature=1.0, seed=12)
    assert tokens_of(list(engine.generate([prompt], other)), 0) != first


def test_generation_stops_where_the_context_ends(engine: Engine) -> None:
    assert engine.context_length == 2048
    ids = (chat(engine, "word") * 800)[:2040]
    steps = list(engine.generate([ids], GenerationSettings(max_new_tokens=50, ignore_eos=True)))
    assert len(steps) == 8
    assert steps[-1].finished == ("length",)


def test_a_full_context_ends_its_own_sequence_only(engine: Engine) -> None:
    prompts = [(chat(engine, "word") * 800)[:2045], chat(engine, "word")]
    steps = list(engine.generate(prompts, GenerationSettings(max_new_tokens=6, ignore_eos=True)))
    assert [len(tokens_of(steps, row)) for row in range(2)] == [3, 6]
    assert steps[2].finished == ("length", None)


def test_prompts_that_cannot_be_answered_are_refused(engine: Engine) -> None:
    with pytest.raises(PromptError, match="no prompt"):
        next(engine.generate([], GenerationSettings()))
    with pytest.raises(PromptError, match="empty"):
        next(engine.generate([[]], GenerationSettings()))
    with pytest.raises(PromptError, match=r"2,048 tokens.*2,048"):
        next(engine.generate([[5] * 2048], GenerationSettings()))


def test_a_closed_engine_generates_no_more(source: ModelSource) -> None:
    engine = Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu")
    running = engine.generate([[5, 6, 7]], GenerationSettings(max_new_tokens=4))
    next(running)
    engine.close()
    with pytest.raises(EngineClosedError, match="open the model again"):
        next(running)
    with pytest.raises(EngineClosedError, match="open the model again"):
        next(engine.generate([[5, 6, 7]], GenerationSettings(max_new_tokens=4)))


def test_a_tokenizer_without_a_template_gets_the_turns_as_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert engine.encode_chat(turns) == engine.encode_text("one\n\ntwo")


def test_a_template_that_refuses_the_turns_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system text') }}{% endif %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", strict)
    with pytest.raises(PromptError, match="template refuses the conversation: no system text"):
        engine.encode_chat([{"role": "system", "content": "Be brief."}])


def test_a_refused_model_leaves_no_thread(source: ModelSource, library: ResidentIndex) -> None:
    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.expert_arithmetic.Accumulation", ())
        with pytest.raises(UnsupportedModelError, match="bit for bit"):
            Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu", library=library)
    assert threading.active_count() == before


def test_what_cannot_be_opened_is_refused(source: ModelSource) -> None:
    with pytest.raises(BudgetError, match="at least"):
        Engine.open(source, cache=ExpertBudget.parse("1000"), device="cpu")
    with pytest.raises(DeviceError, match="no device named"):
        Engine.open(source, cache=ExpertBudget.parse("25%"), device="gpu")
    with pytest.raises(UsageError, match="precision"):
        Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu", dtype="int3")
    with pytest.raises(UsageError, match="distance"):
        Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu", distance=0)


def test_a_budget_too_small_is_refused_before_the_weights_are_read(source: ModelSource) -> None:
    told: list[tuple[int, int]] = []
    for size in ("1000", "1%"):
        with pytest.raises(BudgetError, match="147,456 bytes"):
            Engine.open(source, cache=ExpertBudget.parse(size), device="cpu", progress=lambda *done: told.append(done))
    assert not told


def test_closing_gives_the_model_back_unhooked(source: ModelSource) -> None:
    engine = Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu")
    model = engine._loop._model
    engine.close()
    engine.close()
    assert model.config._experts_implementation != "finemoe"
    assert not any(hasattr(module, "finemoe_executor") for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
