"""How many pages of keys and values there is memory for."""

from __future__ import annotations

from pathlib import Path

import torch

from rollmill.model import Model
from rollmill.ops import PAGE

# Of what is free when the engine starts; the rest is for activations, logits and staged weights.
CUDA_SHARE, HOST_SHARE = 0.8, 0.4
CGROUPS = Path("/sys/fs/cgroup")


def pages_that_fit(model: Model, *, most: int) -> int:
    """`most`, or fewer when memory is short."""
    c, live = model.config, model.embed
    # The CPU's pages are always float32.
    size = live.element_size() if live.is_cuda else 4
    page_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * PAGE * size
    if live.is_cuda:
        room = CUDA_SHARE * torch.cuda.mem_get_info(live.device)[0]
    else:
        room = HOST_SHARE * host_memory()
    return max(1, min(most, int(room // page_bytes)))


def host_memory() -> int:
    """Bytes that can still be had without swapping, within this container's limit if it has one."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            free = min(free, int((CGROUPS / limit).read_text()) - int((CGROUPS / used).read_text()))
        except (OSError, ValueError):
            # No such group here, or `max`: no limit.
            continue
    return free
