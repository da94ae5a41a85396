from __future__ import annotations

import signal

import pytest

from finemoe_cli.interrupts import Interruptible, ending_at_once


def test_the_first_ctrl_c_asks_and_the_second_insists() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruptible() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_the_handler_comes_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="inside"), Interruptible():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) == before


def test_no_exception_of_ctrl_c_reaches_imports() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ending_at_once():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before
