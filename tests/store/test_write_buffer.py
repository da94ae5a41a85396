"""What the next flush writes and deletes, also when one fails or maps change while it writes."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from store.schema import LoggedMap
from store.write_buffer import WriteBuffer
from tests.store.samples import make_record


def logged_map(key: str) -> LoggedMap:
    vector = np.ones(1, np.float16)
    return LoggedMap(key, "model", "run", make_record(0), vector, vector, datetime.now(UTC))


def keys(batch) -> tuple[set[str], set[str], set[str], int]:
    return {row.key for row in batch.maps}, set(batch.obsolete), set(batch.rewritten), batch.replaced


def test_a_newcomer_replaced_before_it_was_written_leaves_no_trace():
    buffer = WriteBuffer([])
    buffer.add(logged_map("a"))
    buffer.displace("a")
    assert keys(buffer.take()) == (set(), set(), set(), 1)


def test_a_written_map_that_is_replaced_is_deleted_once():
    buffer = WriteBuffer(["a"])
    buffer.displace("a")
    assert keys(buffer.take()) == (set(), {"a"}, set(), 1)
    assert keys(buffer.take()) == (set(), set(), set(), 0)


def test_a_replaced_map_that_comes_back_is_rewritten_not_deleted():
    buffer = WriteBuffer(["a"])
    buffer.displace("a")
    buffer.add(logged_map("a"))
    assert keys(buffer.take()) == ({"a"}, set(), {"a"}, 1)


def test_a_map_that_comes_back_after_its_deletion_is_new():
    buffer = WriteBuffer(["a"])
    buffer.displace("a")
    buffer.take()
    buffer.add(logged_map("a"))
    assert keys(buffer.take()) == ({"a"}, set(), set(), 0)


def test_a_map_replaced_while_it_is_written_is_deleted_next():
    buffer = WriteBuffer([])
    buffer.add(logged_map("a"))
    buffer.take()
    buffer.displace("a")
    assert keys(buffer.take()) == (set(), {"a"}, set(), 1)


def test_a_failed_batch_comes_back_as_far_as_it_still_holds():
    buffer = WriteBuffer(["old", "returned"])
    for key in ("a", "b"):
        buffer.add(logged_map(key))
    buffer.displace("old")
    buffer.displace("returned")
    batch = buffer.take()
    buffer.displace("b")
    buffer.add(logged_map("returned"))
    buffer.restore(batch, {"a", "returned"}.__contains__)
    maps, obsolete, rewritten, replaced = keys(buffer.take())
    assert (maps, obsolete, replaced) == ({"a", "returned"}, {"old", "b"}, 3)
    # Whether the failed append took place is unknown, so earlier rows of both keys are deleted.
    assert rewritten == {"a", "returned"}
