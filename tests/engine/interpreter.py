"""Triton's interpreter as tests without a GPU need it: quicker, and right about bfloat16.

As it comes it patches Triton's language anew for every function a kernel calls, which is most of its time, copies
every argument onto itself behind a kernel, by which it can undo what another thread wrote meanwhile, truncates to
bfloat16 where a GPU rounds to nearest even, and multiplies the bits of bfloat16 matrices as integers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_MENDED = "finemoe_mended"


def mend_interpreter() -> None:
    """Mend it for the rest of the process; nothing where kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1" or hasattr(interpreter, _MENDED):
        return
    setattr(interpreter, _MENDED, True)
    interpreter._patch_lang = _once_a_module(interpreter._patch_lang)
    # On a CPU the arguments are the tensors themselves.
    interpreter.GridExecutor._restore_args_dev = lambda *arguments: None
    interpreter._convert_float = _rounding(interpreter._convert_float)
    interpreter.InterpreterBuilder.create_dot = _multiply


class _Patched:
    """The scope of a patch that stays."""

    def restore(self) -> None:
        """Other kernels of the process need it as well."""


def _once_a_module(patch: Callable[[Any], Any]) -> Callable[[Any], _Patched]:
    patched: set[int] = set()

    def patch_once(function: Any) -> _Patched:
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            patch(function)
        return _Patched()

    return patch_once


def _rounding(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) == (tl.bfloat16, tl.float32):
            return _widen(values).view(np.uint32)
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(values).view(np.uint32).reshape(np.shape(values))
            rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
            return np.where(np.isnan(values), np.uint32(0x7FC00000), rounded).__rshift__(16).astype(np.uint16)
        return convert(values, source, target, rounding)

    return convert_float


def _widen(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 bits."""
    shifted = np.asarray(bits).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return np.asarray(shifted).view(np.float32)


def _multiply(self: Any, a: Any, b: Any, total: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """A matrix product, summed up in the type of ``total``."""
    left, right = (_widen(m.data) if m.dtype.scalar == tl.bfloat16 else m.data for m in (a, b))
    product = np.matmul(left, right, dtype=total.data.dtype) + total.data
    return interpreter.TensorHandle(product, total.dtype.scalar)
