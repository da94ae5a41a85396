"""Where the paper is silent: which tokens a decode step's embedding averages, and how a prefill becomes one map.

    python -m tests.benchmarks.map_choices --model M --dataset FILE

Runs conversations through transformers with their own replies (teacher-forced), takes the gate's distributions of
every position, fills a store with the first conversations and asks it about the last. Recall is the share of the
experts an iteration routes to that are among as many experts of the best stored map, by falling probability.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.prompts import open_prompts
from engine.source import resolve_model

DECAYS = (0.0, 0.3, 0.5, 0.7, 0.9)
GUIDED_BY_SEMANTICS = 3


@dataclass(frozen=True)
class Conversation:
    """Token embeddings [T, h], distributions [T, L, J] and the prompt's length."""

    embeddings: np.ndarray
    gates: np.ndarray
    prompt: int


def read_conversations(model_name: str, dataset: str, count: int, reply: int) -> tuple[list[Conversation], int]:
    source = resolve_model(model_name)
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    found: list[Conversation] = []
    for conversation in open_prompts(dataset):
        messages = [m.to_dict() for m in conversation.messages if m.role != "system"]
        if len(messages) < 2 or messages[1]["role"] != "assistant":
            continue
        prompt = tokenizer(
            tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False),
            add_special_tokens=False,
        )["input_ids"][:256]
        ids = torch.tensor([prompt + tokenizer(messages[1]["content"])["input_ids"][:reply]])
        with torch.inference_mode():
            logits = model(ids, output_router_logits=True, use_cache=False).router_logits
            gates = torch.stack([layer.softmax(-1) for layer in logits], dim=1).numpy()
            embeddings = model.get_input_embeddings()(ids)[0].numpy()
        found.append(Conversation(embeddings, gates, len(prompt)))
        if len(found) == count:
            break
    return found, source.fingerprint.top_k


def decode_embeddings(conversation: Conversation, decay: float | None) -> np.ndarray:
    """One embedding a decode step: a mean of the context that decays toward the past; None weighs all alike."""
    past = conversation.embeddings[: conversation.prompt]
    mean, weight, steps = past.mean(axis=0), len(past), []
    for newest in conversation.embeddings[conversation.prompt :]:
        weight += 1
        share = 1 / weight if decay is None else 1 - decay
        mean = (1 - share) * mean + share * newest
        steps.append(mean)
    return np.stack(steps)


def best_matches(queries: np.ndarray, stored: np.ndarray) -> np.ndarray:
    unit = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (queries, stored)]
    return (unit[0] @ unit[1].T).argmax(axis=1)


def recall(predicted: np.ndarray, routed: np.ndarray) -> float:
    """predicted [n, layers, J] probabilities, routed [n, layers, J] booleans."""
    order = np.argsort(np.argsort(-predicted, axis=-1), axis=-1)
    taken = order < routed.sum(-1, keepdims=True)
    return float((taken & routed).sum() / routed.sum())


def routed_experts(gates: np.ndarray, top_k: int) -> np.ndarray:
    return np.argsort(np.argsort(-gates, axis=-1), axis=-1) < top_k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--reply", type=int, default=48)
    arguments = parser.parse_args()
    conversations, top_k = read_conversations(
        arguments.model, arguments.dataset, arguments.conversations, arguments.reply
    )
    split = len(conversations) * 7 // 10
    store, tests = conversations[:split], conversations[split:]
    stored_gates = np.concatenate([c.gates[c.prompt :] for c in store])
    test_gates = np.concatenate([c.gates[c.prompt :] for c in tests])
    routed = routed_experts(test_gates, top_k)
    print(
        f"{len(store)} conversations stored ({len(stored_gates)} decode steps), {len(tests)} asked ({len(test_gates)})"
    )
    for decay in (*DECAYS, None):
        stored = np.concatenate([decode_embeddings(c, decay) for c in store])
        queries = np.concatenate([decode_embeddings(c, decay) for c in tests])
        found = stored_gates[best_matches(queries, stored)]
        first = slice(GUIDED_BY_SEMANTICS)
        name = "whole context alike" if decay is None else "newest token only" if decay == 0 else f"decay {decay}"
        print(
            f"decode embedding, {name:20} recall layers 1-{GUIDED_BY_SEMANTICS} "
            f"{recall(found[:, first], routed[:, first]):.3f}, all layers {recall(found, routed):.3f}"
        )
    prompts = [np.stack([c.embeddings[: c.prompt].mean(axis=0) for c in part]) for part in (store, tests)]
    match = best_matches(prompts[1], prompts[0])
    asked = np.stack([routed_experts(c.gates[: c.prompt], top_k).any(axis=0) for c in tests])
    mean = np.stack([c.gates[: c.prompt].mean(axis=0) for c in store])
    share = np.stack([routed_experts(c.gates[: c.prompt], top_k).mean(axis=0) / top_k for c in store])
    for name, maps in (
        ("mean of probabilities", mean),
        ("share of tokens", share),
        ("both, averaged", (mean + share) / 2),
    ):
        print(f"prefill map, {name:22} recall of the experts the prompt routes to {recall(maps[match], asked):.3f}")


if __name__ == "__main__":
    main()
