"""The key/value cache in contiguous rows, and the attention of one step over it; who owns which row is `slots`' business.

Rows 0..B-1 decode, so a decode step attends over a plain view: no gather, no copy.
Shapes: T packed tokens, R rows, S positions, H query heads, K key/value heads, D head size, G = H / K.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from rollmill.model import ModelConfig


class KVCache:
    """Keys and values per layer as [R, S, K, D]: a row's tokens lie together, so moving a row is one copy of its used part."""

    def __init__(self, config: ModelConfig, *, num_rows: int, max_len: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.num_rows, self.max_len = num_rows, max_len
        shape = (config.num_layers, 2, num_rows, max_len, config.num_kv_heads, config.head_dim)
        # Zeros, not empty: masked positions still enter a product with weight 0, and 0 * NaN is NaN.
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.k_RSKD = [self.kv[layer, 0] for layer in range(config.num_layers)]
        self.v_RSKD = [self.kv[layer, 1] for layer in range(config.num_layers)]
        self.k_flat = [k.view(num_rows * max_len, -1) for k in self.k_RSKD]
        self.v_flat = [v.view(num_rows * max_len, -1) for v in self.v_RSKD]

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        self.kv[:, :, target, :num_tokens].copy_(self.kv[:, :, source, :num_tokens])

    def swap_rows(self, a: int, b: int, num_a: int, num_b: int) -> None:
        held = self.kv[:, :, a, :num_a].clone()
        self.copy_row(b, a, num_b)
        self.kv[:, :, b, :num_a].copy_(held)

    def clear_row(self, row: int) -> None:
        self.kv[:, :, row].zero_()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens [start, end) of the request in cache row `row`, to be computed in this step."""

    row: int
    start: int
    end: int


class StepAttention:
    """Attention of one step: first one token for each of the decoding rows 0..B-1, then the prefill chunks, end to end."""

    def __init__(self, cache: KVCache, *, decode_len_B: np.ndarray, chunks: Sequence[Chunk]) -> None:
        """`decode_len_B` counts the tokens each decoding row holds before this step."""
        self.cache, self.chunks = cache, chunks
        self.num_decode = len(decode_len_B)
        device = cache.kv.device
        flat = [np.arange(self.num_decode) * cache.max_len + decode_len_B]
        flat += [np.arange(c.start, c.end) + c.row * cache.max_len for c in chunks]
        self.flat_T = torch.from_numpy(np.concatenate(flat)).to(device)
        self.decode_mask: torch.Tensor | None = None
        if self.num_decode:
            self.longest = int(decode_len_B.max()) + 1
            seen_BS = np.arange(self.longest)[None, :] <= decode_len_B[:, None]
            if not seen_BS.all():
                bias_BS = torch.from_numpy(np.where(seen_BS, np.float32(0), np.float32(-np.inf)))
                self.decode_mask = bias_BS.to(device=device, dtype=cache.kv.dtype)[:, None, None, :]
        # Only a chunk that continues earlier tokens needs a mask of its own: SDPA's causal flag aligns to the top left.
        self.chunk_masks = [
            None if c.start == 0 else torch.ones(c.end - c.start, c.end, dtype=torch.bool, device=device).tril_(c.start) for c in chunks
        ]

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads, dim = q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2]
        num_shared = num_heads // num_kv_heads
        num_tokens = len(self.flat_T)
        k_RSKD, v_RSKD = self.cache.k_RSKD[layer], self.cache.v_RSKD[layer]
        self.cache.k_flat[layer].index_copy_(0, self.flat_T, k_TKD[:num_tokens].reshape(num_tokens, -1))
        self.cache.v_flat[layer].index_copy_(0, self.flat_T, v_TKD[:num_tokens].reshape(num_tokens, -1))
        parts = []
        b = self.num_decode
        if b:
            # The G query heads that share a key/value head become rows of one small product: keys are read once.
            q_BKGD = q_THD[:b].reshape(b, num_kv_heads, num_shared, dim)
            k_BKSD, v_BKSD = k_RSKD[:b, : self.longest].transpose(1, 2), v_RSKD[:b, : self.longest].transpose(1, 2)
            parts.append(F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=self.decode_mask).reshape(b, num_heads, dim))
        at = b
        for chunk, mask in zip(self.chunks, self.chunk_masks, strict=True):
            size = chunk.end - chunk.start
            q_1HTD = q_THD[at : at + size].transpose(0, 1)[None]
            k_1KSD = k_RSKD[chunk.row, : chunk.end].transpose(0, 1)[None]
            v_1KSD = v_RSKD[chunk.row, : chunk.end].transpose(0, 1)[None]
            out_1HTD = F.scaled_dot_product_attention(
                q_1HTD, k_1KSD, v_1KSD, attn_mask=mask, is_causal=mask is None, enable_gqa=num_shared > 1
            )
            parts.append(out_1HTD[0].transpose(0, 1))
            at += size
        if at < len(q_THD):
            parts.append(q_THD.new_zeros(len(q_THD) - at, num_heads, dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
