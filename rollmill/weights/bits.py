"""The bytes of tensors in row-major order, bit for bit in every dtype and layout; knows no file, version or codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rollmill.weights.errors import UnknownFormat

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Bits:
    """The bytes of one tensor on the host.

    >>> bits_of(torch.tensor([1.0], dtype=torch.bfloat16)).data.tolist()
    [128, 63]
    """

    dtype: str
    """The torch dtype without its prefix, e.g. `bfloat16`."""
    shape: tuple[int, ...]
    data: np.ndarray
    """uint8[numel * itemsize], row-major, little-endian; nobody writes into it."""

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize

    def tensor(self) -> torch.Tensor:
        """A tensor over the same memory; the reader must not write into it."""
        if not self.data.size:
            return torch.empty(self.shape, dtype=dtype_of(self.dtype))
        return torch.from_numpy(self.data).view(dtype_of(self.dtype)).reshape(self.shape)


def dtype_of(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise UnknownFormat(f"dtype {name!r} is unknown to torch {torch.__version__}; read this store with the torch that wrote it")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def num_bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    count = dtype_of(dtype).itemsize
    for size in shape:
        count *= size
    return count


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as signed integers of the same width, flat and row-major, on the tensor's device; 16-byte elements give two."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"a {tensor.layout} tensor of {tensor.dtype} has no plain bytes; publish the dense tensors that inference uses")
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 16:
        plain = torch.view_as_real(plain)
    # Viewed as integers before any copy: a copy of bools or floats may rewrite a payload, a copy of integers may not.
    return plain.view(_WORDS[plain.dtype.itemsize]).reshape(-1)


def bits_of(tensor: torch.Tensor) -> Bits:
    """A private copy of the tensor's bytes on the host."""
    words = words_of(tensor)
    shared = words.device.type == "cpu" and words.numel() and words.data_ptr() == tensor.data_ptr()
    host = words.clone() if shared else words.cpu()
    return Bits(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=host.view(torch.uint8).numpy())


def snapshot_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
    return {name: bits_of(tensor) for name, tensor in tensors.items()}
