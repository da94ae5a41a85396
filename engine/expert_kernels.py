"""Triton kernels for the experts of one to eight tokens, each expert found through a table of addresses.

Memory-bound by design: an expert's weights are read once, by the programs of the first (token, rank) pair routed to
it, whatever the number of its tokens. Sums are float32; a single token's state between the projections is, too.
What is read from host memory is written to the slot it lands in, if it has one, by the program that reads it.

Shapes: T tokens, K experts a token, pair p = token * K + rank, hidden size H, intermediate size I.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.table_kernels import settle


@triton.jit
def _round(values, DTYPE: tl.constexpr):
    """float32 values with the precision of a narrower type."""
    return values.to(DTYPE).to(tl.float32)


@triton.jit
def _activate(gate, up, alpha, limit, GATED: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """The experts' non-linearity, rounded where eager rounds: act(gate) * up, or act(gate) without a gate."""
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit)
        up = _round(tl.minimum(tl.maximum(up, -limit), limit) + 1.0, DTYPE)
        scaled = _round(tl.sigmoid(_round(gate * alpha, DTYPE)), DTYPE)
        return _round(up * _round(gate * scaled, DTYPE), DTYPE)
    if ACTIVATION == "silu":
        act = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == "gelu":
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        act = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    else:
        act = tl.maximum(gate, 0.0)
    act = _round(act, DTYPE)
    if GATED:
        return _round(act * up, DTYPE)
    return act


@triton.jit
def expand(
    routes,
    ids,
    hidden,
    states,
    alpha,
    limit,
    LANDS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BIAS_OFFSET: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    GATED: tl.constexpr,
    GATE_STEP: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """First projection and activation: ids [T * K], hidden [T, H] -> states float32 [T * K, I].

    routes: see ``resolve``; LANDS whether some may land. Offsets are elements from an expert's address, BIAS_OFFSET
    -1 where there is none. Row n of the gate is row n * GATE_STEP of the weight, its row of the other half GATE_SHIFT
    further.
    """
    pair = tl.program_id(0)
    address = tl.load(routes + pair)
    if address == 0:
        return
    expert = tl.load(ids + pair)
    landing = tl.load(routes + TOKENS * TOP_K + pair)
    source = tl.multiple_of(address.to(hidden.dtype), 16)
    target = tl.multiple_of(landing.to(hidden.dtype), 16)
    weight = source + WEIGHT_OFFSET
    landed = target + WEIGHT_OFFSET
    rows = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_mask = rows < SIZE_OUT
    row_lands = row_mask & (tl.load(routes + TOKENS * TOP_K + pair + 0 * rows) != 0)
    row_starts = (rows * GATE_STEP)[:, None] * STRIDE_OUT
    inner = tl.arange(0, BLOCK_IN)
    tokens = tl.arange(0, TOKENS_PAD)
    if TOKENS == 1:
        gate_sum = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
        up_sum = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    else:
        gate_sum = tl.zeros([BLOCK_OUT, TOKENS_PAD], dtype=tl.float32)
        up_sum = tl.zeros([BLOCK_OUT, TOKENS_PAD], dtype=tl.float32)
    for start in range(0, SIZE_IN, BLOCK_IN):
        columns = start + inner
        column_mask = columns < SIZE_IN
        mask = row_mask[:, None] & column_mask[None, :]
        places = row_starts + columns[None, :] * STRIDE_IN
        gate = tl.load(weight + places, mask=mask, other=0.0)
        if LANDS:
            tl.store(landed + places, gate, mask=row_lands[:, None] & column_mask[None, :])
        if GATED:
            up = tl.load(weight + places + GATE_SHIFT * STRIDE_OUT, mask=mask, other=0.0)
            if LANDS:
                tl.store(landed + places + GATE_SHIFT * STRIDE_OUT, up, mask=row_lands[:, None] & column_mask[None, :])
        if TOKENS == 1:
            x = tl.load(hidden + columns, mask=column_mask, other=0.0).to(tl.float32)
            gate_sum += gate.to(tl.float32) * x[None, :]
            if GATED:
                up_sum += up.to(tl.float32) * x[None, :]
        else:
            x_mask = column_mask[:, None] & (tokens < TOKENS)[None, :]
            x = tl.load(hidden + tokens[None, :] * SIZE_IN + columns[:, None], mask=x_mask, other=0.0)
            gate_sum = tl.dot(gate, x, gate_sum, input_precision="ieee")
            if GATED:
                up_sum = tl.dot(up, x, up_sum, input_precision="ieee")
    if TOKENS == 1:
        gate_sum = tl.sum(gate_sum, axis=1)[:, None]
        up_sum = tl.sum(up_sum, axis=1)[:, None]
    dtype: tl.constexpr = hidden.dtype.element_ty
    gate_sum = _round(gate_sum, dtype)
    up_sum = _round(up_sum, dtype)
    if BIAS_OFFSET >= 0:
        bias = source + BIAS_OFFSET + rows * GATE_STEP
        landed_bias = target + BIAS_OFFSET + rows * GATE_STEP
        gate_bias = tl.load(bias, mask=row_mask, other=0.0)
        gate_sum = _round(gate_sum + gate_bias.to(tl.float32)[:, None], dtype)
        if LANDS:
            tl.store(landed_bias, gate_bias, mask=row_lands)
        if GATED:
            up_bias = tl.load(bias + GATE_SHIFT, mask=row_mask, other=0.0)
            up_sum = _round(up_sum + up_bias.to(tl.float32)[:, None], dtype)
            if LANDS:
                tl.store(landed_bias + GATE_SHIFT, up_bias, mask=row_lands)
    state = _activate(gate_sum, up_sum, alpha, limit, GATED, ACTIVATION, dtype)
    if TOKENS == 1:
        tl.store(states + pair * SIZE_OUT + rows[:, None], state, mask=row_mask[:, None])
    else:
        for rank in tl.static_range(TOP_K):
            pairs = tokens * TOP_K + rank
            routed = tl.load(ids + pairs, mask=tokens < TOKENS, other=-1) == expert
            targets = states + pairs[None, :] * SIZE_OUT + rows[:, None]
            tl.store(targets, state, mask=row_mask[:, None] & routed[None, :])


@triton.jit
def contract(
    routes,
    ids,
    states,
    weights,
    outputs,
    like,
    LANDS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BIAS_OFFSET: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Second projection times the routing weights [T * K]: states float32 [T * K, I] -> outputs float32 [T * K, H].

    ``like``: any tensor of the experts' type. Pairs of experts past the last are left unwritten.
    """
    pair = tl.program_id(0)
    address = tl.load(routes + pair)
    if address == 0:
        return
    expert = tl.load(ids + pair)
    landing = tl.load(routes + TOKENS * TOP_K + pair)
    source = tl.multiple_of(address.to(like.dtype), 16)
    target = tl.multiple_of(landing.to(like.dtype), 16)
    weight = source + WEIGHT_OFFSET
    landed = target + WEIGHT_OFFSET
    rows = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_mask = rows < SIZE_OUT
    row_lands = row_mask & (tl.load(routes + TOKENS * TOP_K + pair + 0 * rows) != 0)
    row_starts = rows[:, None] * STRIDE_OUT
    inner = tl.arange(0, BLOCK_IN)
    tokens = tl.arange(0, TOKENS_PAD)
    if TOKENS == 1:
        total = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    else:
        total = tl.zeros([BLOCK_OUT, TOKENS_PAD], dtype=tl.float32)
        # An expert a token chose twice has the same state under both ranks.
        sources = tl.full([TOKENS_PAD], -1, dtype=tl.int32)
        for rank in tl.static_range(TOP_K):
            pairs = tokens * TOP_K + rank
            routed = tl.load(ids + pairs, mask=tokens < TOKENS, other=-1) == expert
            sources = tl.where(routed, pairs, sources)
    for start in range(0, SIZE_IN, BLOCK_IN):
        columns = start + inner
        column_mask = columns < SIZE_IN
        mask = row_mask[:, None] & column_mask[None, :]
        places = row_starts + columns[None, :] * STRIDE_IN
        part = tl.load(weight + places, mask=mask, other=0.0)
        if LANDS:
            tl.store(landed + places, part, mask=row_lands[:, None] & column_mask[None, :])
        if TOKENS == 1:
            x = tl.load(states + pair * SIZE_IN + columns, mask=column_mask, other=0.0)
            total += part.to(tl.float32) * x[None, :]
        else:
            x_mask = column_mask[:, None] & (sources >= 0)[None, :]
            x = tl.load(states + sources[None, :] * SIZE_IN + columns[:, None], mask=x_mask, other=0.0)
            total = tl.dot(part, x.to(part.dtype), total, input_precision="ieee")
    if TOKENS == 1:
        total = tl.sum(total, axis=1)[:, None]
    dtype: tl.constexpr = like.dtype.element_ty
    total = _round(total, dtype)
    if BIAS_OFFSET >= 0:
        bias = tl.load(source + BIAS_OFFSET + rows, mask=row_mask, other=0.0)
        total = _round(total + bias.to(tl.float32)[:, None], dtype)
        if LANDS:
            tl.store(target + BIAS_OFFSET + rows, bias, mask=row_lands)
    # A product with float32 weights stays float32.
    product: tl.constexpr = weights.dtype.element_ty
    if TOKENS == 1:
        weighted = _round(total * tl.load(weights + pair).to(tl.float32), product)
        tl.store(outputs + pair * SIZE_OUT + rows[:, None], weighted, mask=row_mask[:, None])
    else:
        for rank in tl.static_range(TOP_K):
            pairs = tokens * TOP_K + rank
            routed = tl.load(ids + pairs, mask=tokens < TOKENS, other=-1) == expert
            share = tl.load(weights + pairs, mask=routed, other=0.0).to(tl.float32)
            targets = outputs + pairs[None, :] * SIZE_OUT + rows[:, None]
            weighted = _round(total * share[None, :], product)
            tl.store(targets, weighted, mask=row_mask[:, None] & routed[None, :])


@triton.jit
def combine(
    table,
    home,
    slot_addresses,
    ids,
    routes,
    outputs,
    result,
    orders,
    orders_done,
    settled,
    first_key,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    RING: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Add a token's experts by rising id, in DTYPE: outputs float32 [T * K, H] -> result [T, H] in its own type.

    One of the programs settles the table, see ``settle``; RING 0 where nothing lands and no orders come.
    """
    token = tl.program_id(0)
    if RING > 0:  # noqa: SIM102 - decided when the kernel is compiled
        if token + tl.program_id(1) == 0:
            settle(
                table,
                home,
                slot_addresses,
                ids,
                routes,
                orders,
                orders_done,
                settled,
                first_key,
                EXPERTS,
                PAIRS,
                PAIRS_PAD,
                RING,
                BATCH,
            )
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    ranks = tl.arange(0, TOP_K_PAD)
    routed = tl.load(ids + token * TOP_K + ranks, mask=ranks < TOP_K, other=EXPERTS)
    end = EXPERTS * TOP_K_PAD
    order = tl.minimum(routed, EXPERTS) * TOP_K_PAD + ranks
    last = tl.min(order, axis=0) - 1
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in tl.static_range(TOP_K):
        last = tl.min(tl.where(order > last, order, end), axis=0)
        pair = token * TOP_K + last % TOP_K_PAD
        part = tl.load(outputs + pair * SIZE + columns, mask=tl.where(last < end, columns, SIZE) < SIZE, other=0.0)
        total = _round(total + _round(part, DTYPE), DTYPE)
    tl.store(result + token * SIZE + columns, total.to(result.dtype.element_ty), mask=mask)
