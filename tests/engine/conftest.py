"""Engine tests compute tiny matrices: one thread does them as fast, and does not stall where cores are shared."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Where Triton is installed without a GPU, its interpreter runs the kernels; it is chosen as they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")
