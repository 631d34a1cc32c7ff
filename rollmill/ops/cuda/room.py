"""Activations with room behind their last row, so that products may read whole blocks of rows without a copy.

What lies in the room is whatever the memory held: it reaches only rows that are cut off again. Shapes: M rows.
"""

from __future__ import annotations

import torch

BLOCK = 64
"""Rows of a block. cuBLASLt is asked for whole blocks only: the algorithms it picks for fewer rows are up to ten times slower on deep,
narrow weights once it may not split the sum, and every row count has its own."""


def blocks(rows: int) -> int:
    """Rows rounded up to whole blocks."""
    return -(-rows // BLOCK) * BLOCK


def roomy(rows: int, *rest: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Empty memory for [rows, *rest] and its room."""
    return torch.empty((blocks(rows), *rest), dtype=dtype, device=device)[:rows]


def in_blocks(x_MD: torch.Tensor) -> torch.Tensor:
    """The rows and their room: a view where the memory is aligned and goes on that far, else a copy."""
    rows, width = x_MD.shape
    need = x_MD.storage_offset() + blocks(rows) * width
    # cuBLASLt's choice of algorithm looks at alignment too, up to 256 bytes.
    if x_MD.is_contiguous() and x_MD.data_ptr() % 256 == 0 and need * x_MD.element_size() <= x_MD.untyped_storage().nbytes():
        return x_MD.as_strided((blocks(rows), width), (width, 1))
    copy_MD = roomy(rows, width, dtype=x_MD.dtype, device=x_MD.device)
    copy_MD.copy_(x_MD)
    return copy_MD.as_strided((blocks(rows), width), (width, 1))
