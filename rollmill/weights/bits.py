"""The bytes of tensors in row-major order, bit for bit in every dtype and layout; knows no file, version or codec."""

from __future__ import annotations

import numpy as np
import torch

from rollmill.weights.errors import UnknownFormat

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
}


def dtype_of(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise UnknownFormat(f"dtype {name!r} is unknown to torch {torch.__version__}; read this store with the torch that wrote it")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as signed integers of the same width, flat and row-major, on the tensor's device; 16-byte elements give two."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"a {tensor.layout} tensor of {tensor.dtype} has no plain bytes; publish the dense tensors that inference uses")
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 16:
        plain = torch.view_as_real(plain)
    # Viewed as integers before any copy: a copy of bools or floats may rewrite a payload, a copy of integers may not.
    return plain.view(_WORDS[plain.dtype.itemsize]).reshape(-1)


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes (uint8, row-major) on the host; shares memory when they already lie there so."""
    words = words_of(tensor).cpu()
    return words.view(torch.uint8).numpy() if words.numel() else np.empty(0, np.uint8)


def copied_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A private copy of the tensor's bytes on the host."""
    words = words_of(tensor)
    shared = words.device.type == "cpu" and words.numel() and words.data_ptr() == tensor.data_ptr()
    host = words.clone() if shared else words.cpu()
    return host.view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)


def tensor_of(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the same memory."""
    if not data.size:
        return torch.empty(shape, dtype=dtype_of(dtype))
    return torch.from_numpy(data).view(dtype_of(dtype)).reshape(shape)
