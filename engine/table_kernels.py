"""Triton code that reads and writes the address table: the running token's own stream is its only writer.

Words the host leaves in page-locked memory are whole by themselves, 64 bits with their number in the upper bits, so
that the device needs no other sign to know which of them have come:

    offer   number << 40 | (victim + 1) << 20 | slot    the slot may be landed in; its expert, if any, leaves it then
    order   number << 41 | kind << 40 | key << 20 | slot    kind 1: point the key's entry to the slot; 0: back home
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELD_BITS = 20
NUMBER_BITS = 22

_FIELD = tl.constexpr((1 << FIELD_BITS) - 1)
_SHIFT = tl.constexpr(FIELD_BITS)
_OFFER_NUMBER = tl.constexpr(2 * FIELD_BITS)
_ORDER_KIND = tl.constexpr(2 * FIELD_BITS)
_NUMBERS = tl.constexpr((1 << NUMBER_BITS) - 1)


@triton.jit
def _load_words(words, number, mask, RING: tl.constexpr):
    """Page-locked memory may have changed since it was read last, so no cache may answer."""
    return tl.load(words.to(tl.pointer_type(tl.int64)) + number % RING, mask=mask, other=0, volatile=True)


@triton.jit
def resolve(
    table,
    home,
    slot_addresses,
    ids,
    routes,
    offers,
    offers_taken,
    settled,
    first_key,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    RING: tl.constexpr,
):
    """Where each routed pair of a layer finds its expert, and where a missing one lands as it is read.

    routes int64 [3, T * K], then 3 numbers: the address to read (0: an earlier pair reads the expert, or none is
    routed), the address to land at (0: nowhere), the place (0 home, 1 a slot, 2 + s landing in slot s); then offers
    taken here, and what ``settle`` did last: orders carried out, and which of them were void.
    """
    pairs = tl.arange(0, PAIRS_PAD)
    mask = pairs < PAIRS
    expert = tl.load(ids + pairs, mask=mask, other=EXPERTS)
    known = expert < EXPERTS
    again = (expert[:, None] == expert[None, :]) & (pairs[None, :] < pairs[:, None])
    first = known & (tl.sum(again.to(tl.int32), axis=1) == 0)
    key = first_key + expert
    entry = tl.load(table + key, mask=known, other=0)
    at_home = tl.load(home + key, mask=known, other=0)
    missing = first & (entry == at_home)
    place = tl.where(known & (entry != at_home), 1, 0)
    landing = tl.zeros([PAIRS_PAD], dtype=tl.int64)
    if RING > 0:
        rank = tl.cumsum(missing.to(tl.int32), axis=0) - 1
        number = tl.load(offers_taken) + rank
        word = _load_words(offers, number, missing, RING)
        come = missing & ((word >> _OFFER_NUMBER) == ((number + 1) & _NUMBERS))
        taken = missing & (rank < tl.min(tl.where(missing & (come == 0), rank, PAIRS_PAD), axis=0))
        victim = ((word >> _SHIFT) & _FIELD) - 1
        slot = word & _FIELD
        # A victim that this very layer reads keeps its slot: the offer is passed over.
        routed = (victim[:, None] == key[None, :]) & known[None, :]
        lands = taken & (tl.sum(routed.to(tl.int32), axis=1) == 0)
        leaves = lands & (victim >= 0)
        tl.store(table + victim, tl.load(home + victim, mask=leaves, other=0), mask=leaves)
        landing = tl.load(slot_addresses + slot, mask=lands, other=0)
        place = tl.where(lands, slot + 2, place)
        count = tl.sum(taken.to(tl.int64), axis=0)
        tl.store(offers_taken, tl.load(offers_taken) + count)
        tl.store(routes + 3 * PAIRS, count)
        tl.store(routes + 3 * PAIRS + 1, tl.load(settled))
        tl.store(routes + 3 * PAIRS + 2, tl.load(settled + 1))
    else:
        tails = tl.arange(0, 4)
        tl.store(routes + 3 * PAIRS + tails, tl.zeros([4], dtype=tl.int64), mask=tails < 3)
    # A single token's pairs each compute for themselves, of several tokens' the first of an expert computes for all.
    reads = known if PAIRS == TOP_K else first
    tl.store(routes + pairs, tl.where(reads, entry, 0), mask=mask)
    tl.store(routes + PAIRS + pairs, landing, mask=mask)
    tl.store(routes + 2 * PAIRS + pairs, place, mask=mask)


@triton.jit
def settle(
    table,
    home,
    slot_addresses,
    ids,
    routes,
    orders,
    orders_done,
    settled,
    first_key,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    RING: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Behind a layer's kernels, when nobody reads an expert: point to what has landed, then carry out orders.

    settled int64 [2]: orders carried out, and a bit for each that was void, because the expert had landed elsewhere.
    """
    pairs = tl.arange(0, PAIRS_PAD)
    mask = pairs < PAIRS
    landing = tl.load(routes + PAIRS + pairs, mask=mask, other=0)
    landed_key = tl.where(landing != 0, first_key + tl.load(ids + pairs, mask=mask, other=EXPERTS), -1)
    tl.store(table + landed_key, landing, mask=landing != 0)
    lanes = tl.arange(0, BATCH)
    done = tl.load(orders_done)
    number = done + lanes
    word = _load_words(orders, number, lanes < BATCH, RING)
    come = (word >> (_ORDER_KIND + 1)) == ((number + 1) & _NUMBERS)
    points = ((word >> _ORDER_KIND) & 1) == 1
    key = (word >> _SHIFT) & _FIELD
    # Orders are carried out at once, so that a second one for the same entry waits for the next layer.
    again = (key[:, None] == key[None, :]) & (lanes[None, :] < lanes[:, None])
    waits = tl.sum(again.to(tl.int32), axis=1) > 0
    count = tl.min(tl.where(come & (waits == 0), BATCH, lanes), axis=0)
    run = lanes < count
    entry = tl.load(table + key, mask=run, other=0)
    at_home = tl.load(home + key, mask=run, other=0)
    address = tl.load(slot_addresses + (word & _FIELD), mask=run, other=0)
    landed = tl.sum((key[:, None] == landed_key[None, :]).to(tl.int32), axis=1) > 0
    void = run & points & ((entry != at_home) | landed)
    tl.store(table + key, tl.where(points, address, at_home), mask=run & (void == 0))
    tl.store(orders_done, done + count)
    tl.store(settled, count.to(tl.int64))
    tl.store(settled + 1, tl.sum(void.to(tl.int64) << lanes, axis=0))
