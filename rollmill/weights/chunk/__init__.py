"""Lossless coding of one chunk of one tensor, given its old bytes or alone; the bytes are those of docs/formats/chunk.md."""

from rollmill.weights.chunk.codecs import Codec, Encoded, Patch, decode, decode_into, decode_patch, encode
from rollmill.weights.chunk.elements import MAX_ELEMENTS, Elements, Order, elements_of

__all__ = [
    "MAX_ELEMENTS",
    "Codec",
    "Elements",
    "Encoded",
    "Order",
    "Patch",
    "decode",
    "decode_into",
    "decode_patch",
    "elements_of",
    "encode",
]
