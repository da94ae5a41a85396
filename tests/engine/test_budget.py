"""Parsing and resolving the expert budget."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import ExpertBudget, format_bytes
from engine.errors import BudgetError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 * GIB),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 * GIB // 2),
        (" .5KiB ", 512),
        ("2tb", 2 * 10**12),
        ("1048576", 1048576),
        ("10B", 10),
        ("1.9", 1),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, size: int) -> None:
    assert ExpertBudget.parse(text).size == size


@pytest.mark.parametrize(("text", "share"), [("25%", "0.25"), ("100 %", "1"), ("0.5%", "0.005")])
def test_percentages_are_shares(text: str, share: str) -> None:
    budget = ExpertBudget.parse(text)
    assert (budget.size, budget.share) == (None, Decimal(share))


@pytest.mark.parametrize(
    "text",
    ["", "   ", "six", "6GiBs", "6 G", "6G", "-1GiB", "1e9", "1,5GB", "GiB", "%", "%5", "5%%", "autos", "٣GiB"],
)
def test_unreadable_budgets_name_what_is_accepted(text: str) -> None:
    with pytest.raises(BudgetError, match=r"6GiB.*25%.*auto") as caught:
        ExpertBudget.parse(text)
    assert repr(text.strip()) in str(caught.value)


@pytest.mark.parametrize("text", ["0%", "100.1%", "250%"])
def test_percentages_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(BudgetError, match="above 0% and at most 100%"):
        ExpertBudget.parse(text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.4", "0.0000000001KiB"])
def test_less_than_a_byte_is_refused(text: str) -> None:
    with pytest.raises(BudgetError, match="less than one byte"):
        ExpertBudget.parse(text)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        budget = ExpertBudget.parse(text)
    except BudgetError as error:
        assert "\n" not in str(error)
    else:
        assert budget.size is None or budget.size >= 1


@given(st.integers(1, 10**17))
def test_plain_bytes_round_trip(count: int) -> None:
    assert ExpertBudget.parse(str(count)).size == count


@given(st.integers(0, 1 << 45), st.integers(1, 1 << 45))
def test_sizes_never_exceed_the_experts(total: int, size: int) -> None:
    assert ExpertBudget.parse(f"{size}B").resolve(total, free_bytes=None) == min(size, total)


@given(st.integers(0, 1 << 45), st.decimals("0.001", "100", places=3))
def test_a_share_is_rounded_down_to_whole_bytes(total: int, percent: Decimal) -> None:
    resolved = ExpertBudget.parse(f"{percent}%").resolve(total, free_bytes=1)
    exact = total * percent / 100
    assert exact - 1 < resolved <= exact


def test_auto_on_a_cpu_is_a_quarter() -> None:
    assert ExpertBudget.parse("AUTO").resolve(1000, free_bytes=None) == 250


@pytest.mark.parametrize(
    ("free", "resolved"),
    [(4 * GIB, 3 * GIB), (40 * GIB, 36 * GIB), (140 * GIB, 90 * GIB)],
    ids=["less the fixed reserve", "less a tenth", "no more than all experts"],
)
def test_auto_on_a_device_leaves_a_reserve(free: int, resolved: int) -> None:
    assert ExpertBudget.parse("auto").resolve(90 * GIB, free) == resolved


@given(st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_auto_fits_the_device_or_says_why_not(total: int, free: int) -> None:
    budget = ExpertBudget.parse("auto")
    if free <= GIB:
        with pytest.raises(BudgetError, match="reserve"):
            budget.resolve(total, free)
    else:
        assert budget.resolve(total, free) <= min(total, free * 9 // 10 + 1, free - GIB)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (1024 * 1024 - 1, "1.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (5000 << 40, "5000.00 TiB"),
    ],
)
def test_bytes_are_written_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1024, 1 << 50))
def test_written_bytes_are_within_their_rounding(count: int) -> None:
    number, unit = format_bytes(count).split()
    power = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[unit]
    assert abs(float(number) * 2**power - count) <= 0.0051 * 2**power
    assert float(number) < 1024 or unit == "TiB"
