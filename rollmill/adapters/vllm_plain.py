"""The same worker extension, whose import makes vLLM on a CPU multiply with plain matrices, patched in place and safe to compile.

vLLM otherwise packs them, which is faster and costs a second copy, a repacking and a reading back at every swap. Nor does it then
use tile units (AMX), which virtual machines may announce and not have; `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` tells torch the same.
Named by `--worker-extension-cls rollmill.adapters.vllm_plain.RollmillWorker`.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops
from vllm.model_executor.layers import utils

from rollmill.adapters.vllm_worker import RollmillWorker

# vLLM imports the extension before it builds a model, and asks these before it packs a matrix or picks a kernel.
_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
torch.cpu._is_amx_tile_supported = lambda: False

__all__ = ["RollmillWorker"]
