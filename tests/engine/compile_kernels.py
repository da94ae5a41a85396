"""Compile every kernel to machine code for NVIDIA GPUs that need not be here; prints one JSON record a kernel.

python -m tests.engine.compile_kernels CAPABILITY...
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.expert_kernels import combine, contract, expand
from engine.mailbox_kernels import post_embeddings, post_gate
from engine.slot_orders import BATCH, RING
from engine.table_kernels import resolve

# The Qwen1.5-MoE shape: H, I, J, K; and where the second projection lies in an expert's buffer.
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 1408, 60, 4
DOWN_OFFSET = 2 * INTERMEDIATE * HIDDEN

WORDS = ("table", "home", "slot_addresses", "ids", "routes", "offers_taken", "orders_done", "settled", "counter")
TYPES = dict.fromkeys(WORDS, "*i64") | {
    **dict.fromkeys(("hidden", "weights", "like", "result", "scores", "inputs", "embeddings"), "*bf16"),
    **dict.fromkeys(("states", "outputs"), "*fp32"),
    **dict.fromkeys(("offers", "orders", "letters", "flags"), "i64"),
    **dict.fromkeys(("first_key", "row"), "i32"),
    **dict.fromkeys(("alpha", "limit"), "fp32"),
}


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        for kernel, constants in variants():
            compiled = compile_kernel(kernel, constants, capability)
            ptx = compiled.asm["ptx"]
            record = {
                "kernel": kernel.__name__,
                "capability": capability,
                "tokens": constants.get("TOKENS", 1),
                "lands": bool(constants.get("LANDS") or constants.get("RING")),
                "bytes": len(compiled.asm["cubin"]),
                "wide_loads": len(re.findall(r"ld\.global\S*\.v4|cp\.async\S* .*, (?:0x10|16)", ptx)),
                "wide_stores": len(re.findall(r"st\.global\S*\.v4", ptx)),
                "volatile_loads": len(re.findall(r"ld\.volatile\.global", ptx)),
            }
            print(json.dumps(record), flush=True)


def variants() -> Iterator[tuple[Any, dict[str, Any]]]:
    letter = {"ROWS": 25, "DEPTH": 4, "STRIDE": 4096, "FENCE": True}
    for tokens in (1, 8):
        pairs = {"PAIRS": tokens * TOP_K, "PAIRS_PAD": tokens * TOP_K}
        few = {"TOKENS": tokens, "TOKENS_PAD": 1 if tokens == 1 else 16, "TOP_K": TOP_K, "BIAS_OFFSET": -1}
        tile = {"BLOCK_OUT": 16, "BLOCK_IN": 256, "STRIDE_IN": 1}
        for lands in (False, True):
            first = {"SIZE_IN": HIDDEN, "SIZE_OUT": INTERMEDIATE, "WEIGHT_OFFSET": 0, "STRIDE_OUT": HIDDEN}
            gate = {"GATED": True, "GATE_STEP": 1, "GATE_SHIFT": INTERMEDIATE, "ACTIVATION": "silu"}
            yield expand, {"LANDS": lands, **few, **tile, **first, **gate}
            second = {"SIZE_IN": INTERMEDIATE, "SIZE_OUT": HIDDEN, "WEIGHT_OFFSET": DOWN_OFFSET}
            yield contract, {"LANDS": lands, **few, **tile, **second, "STRIDE_OUT": INTERMEDIATE}
            ring = {"EXPERTS": EXPERTS, "TOP_K": TOP_K, "RING": RING if lands else 0, **pairs}
            yield resolve, ring
            last = {"TOP_K_PAD": TOP_K, "SIZE": HIDDEN, "DTYPE": tl.bfloat16, "BLOCK": 1024, "BATCH": BATCH}
            yield combine, {**ring, **last}
        yield post_gate, {**pairs, "SCORES": tokens * EXPERTS, "INPUTS": tokens * HIDDEN, **letter}
    yield post_embeddings, {"SIZE": HIDDEN, **letter}


def compile_kernel(kernel: Any, constants: dict[str, Any], capability: int) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    pointers = [place for place, name in enumerate(names) if signature[name].startswith("*")]
    # As the launcher finds of tensors that PyTorch has made.
    aligned = {(place,): [["tt.divisibility", 16]] for place in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


if __name__ == "__main__":
    main()
