"""How many pages of keys and values there is memory for."""

from __future__ import annotations

import os

import torch

from rollmill.model import Model
from rollmill.ops import PAGE

# Of what is free when the engine starts; the rest is for activations, logits and staged weights.
CUDA_SHARE, HOST_SHARE = 0.8, 0.4


def pages_that_fit(model: Model, *, most: int) -> int:
    """`most`, or fewer when memory is short."""
    c, live = model.config, model.embed
    # The CPU's pages are always float32.
    size = live.element_size() if live.is_cuda else 4
    page_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * PAGE * size
    if live.is_cuda:
        room = CUDA_SHARE * torch.cuda.mem_get_info(live.device)[0]
    else:
        room = HOST_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(most, int(room // page_bytes)))
