"""Engine tests compute tiny matrices: one thread does them as fast, and does not stall where cores are shared."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
