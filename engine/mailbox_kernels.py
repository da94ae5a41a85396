"""Triton kernels that write letters to the host from inside a token."""

from __future__ import annotations

import triton
import triton.language as tl

_BLOCK = tl.constexpr(1024)


@triton.jit
def _letter(counter, letters, row, ROWS: tl.constexpr, DEPTH: tl.constexpr, STRIDE: tl.constexpr):
    """Address of the running token's letter of a row."""
    place = (tl.load(counter) % DEPTH) * ROWS + row
    return letters + place * STRIDE * 4


@triton.jit
def _copy(source, target, SIZE: tl.constexpr):
    for start in range(0, SIZE, _BLOCK):
        places = start + tl.arange(0, _BLOCK)
        mask = places < SIZE
        tl.store(target + places, tl.load(source + places, mask=mask, other=0.0).to(tl.float32), mask=mask)


@triton.jit
def _raise_flag(counter, flags, row, ROWS: tl.constexpr, DEPTH: tl.constexpr, FENCE: tl.constexpr):
    """Behind everything this program has written: the host that sees the flag sees the letter."""
    token = tl.load(counter)
    if FENCE:
        # Every thread fences its own stores for the whole system; the interpreter writes in order anyway.
        lanes = tl.arange(0, _BLOCK)
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [lanes], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    flag = (flags + ((token % DEPTH) * ROWS + row) * 8).to(tl.pointer_type(tl.int64))
    tl.store(flag, token + 1)


@triton.jit
def post_embeddings(
    counter,
    letters,
    flags,
    embeddings,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STRIDE: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Row 0: input embeddings [T, h]. ``letters`` and ``flags`` are addresses in page-locked memory."""
    letter = _letter(counter, letters, 0, ROWS, DEPTH, STRIDE).to(tl.pointer_type(tl.float32))
    _copy(embeddings, letter, SIZE)
    _raise_flag(counter, flags, 0, ROWS, DEPTH, FENCE)


@triton.jit
def post_gate(
    counter,
    letters,
    flags,
    row,
    ids,
    routes,
    weights,
    scores,
    inputs,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    SCORES: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STRIDE: tl.constexpr,
    FENCE: tl.constexpr,
):
    """A gate's letter: ids [T * K], places [T * K] and 3 counts (see ``resolve``), weights, scores and gate inputs."""
    letter = _letter(counter, letters, row, ROWS, DEPTH, STRIDE).to(tl.pointer_type(tl.float32))
    pairs = tl.arange(0, PAIRS_PAD)
    mask = pairs < PAIRS
    tl.store(letter + pairs, tl.load(ids + pairs, mask=mask, other=0).to(tl.float32), mask=mask)
    _copy(routes + 2 * PAIRS, letter + PAIRS, PAIRS + 3)
    _copy(weights, letter + 2 * PAIRS + 3, PAIRS)
    _copy(scores, letter + 3 * PAIRS + 3, SCORES)
    _copy(inputs, letter + 3 * PAIRS + 3 + SCORES, INPUTS)
    _raise_flag(counter, flags, row, ROWS, DEPTH, FENCE)
