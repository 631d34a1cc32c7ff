"""The plain profile: every operation as torch computes it fastest, with no promise about the bits; `cpu` and `cuda` build on it.

Shapes: T packed tokens, D hidden, H and K query and key/value heads, E head size, F inner size, X experts, M = T * K rows by expert,
N rows of logits, V vocabulary, B sequences, L longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rollmill.ops.base import PAGE, Pages, Spans


class TorchOps:
    profile = "fast"
    is_exact = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sum_TD = x_TD + residual_TD
        return self.rms_norm(sum_TD, weight_D, eps), sum_TD

    def linear(self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x_TD, weight_ND, bias_N)

    def linear_fp32(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        return self.linear(x_TD.float(), weight_ND.float())

    def rotate(self, x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
        left, right = x_THE.chunk(2, -1)
        return (x_THE * cos_T1E + torch.cat((-right, left), -1) * sin_T1E).to(x_THE.dtype)

    def swiglu(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_T2F.chunk(2, -1)
        return F.silu(gate) * up

    def sigmoid(self, x_TX: torch.Tensor) -> torch.Tensor:
        return x_TX.sigmoid()

    def top_ids(self, scores_TX: torch.Tensor, k: int) -> torch.Tensor:
        return top_ids(scores_TX, k)

    def experts(
        self, h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
    ) -> torch.Tensor:
        num_tokens, k = ids_TK.shape
        order_M = ids_TK.flatten().argsort(stable=True)
        counts_X = torch.bincount(ids_TK.flatten(), minlength=len(gate_up_X2FD))
        # Every (token, slot) is read once, so the backward writes each place once and then sums over K: no atomics there either.
        h_MD = h_TD[:, None].expand(-1, k, -1)[order_M // k, order_M % k]
        # Unbound once: indexing each expert would make autograd fill a gradient as large as all of them, once per expert.
        runs = zip(h_MD.split(counts_X.tolist()), gate_up_X2FD.unbind(), down_XDF.unbind(), strict=True)
        y_MD = torch.cat([self.linear(self.swiglu(self.linear(rows, gate_up)), down) for rows, gate_up, down in runs if len(rows)])
        place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        return combine(y_MD[place_M].view(num_tokens, k, -1), gates_TK)

    def attend_packed(self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        return sdpa_packed(q_THE, k_TKE, v_TKE, seq_lens)

    def score(self, logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_NV = logits_NV.log_softmax(-1)
        with torch.no_grad():
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        return logprobs_NV.gather(-1, ids_N[:, None])[:, 0], entropy_N

    def pick(self, logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
        # float64: in float32 the running sum would give unlikely tokens a share of up to 6e-8 that is not theirs.
        cumulative_NV = logits_NV.softmax(-1).cumsum(-1, dtype=torch.float64)
        total_N1 = cumulative_NV[:, -1:]
        # Rounding may lift u * total to total itself, which lies beyond every token.
        point_N1 = torch.minimum(uniform_N[:, None] * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
        return torch.searchsorted(cumulative_NV, point_N1, right=True)[:, 0].clamp_(max=logits_NV.shape[1] - 1)

    def new_pages(self, num_pages: int, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Pages:
        return TorchPages(num_pages, num_layers, num_kv_heads, head_dim, dtype, self.device)

    def refresh(self) -> None:
        return


def top_ids(scores_TX: torch.Tensor, k: int) -> torch.Tensor:
    """The k best, ascending by id. A stable sort, since `topk` leaves it open which of two equal scores wins."""
    return scores_TX.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values


def combine(y_TKD: torch.Tensor, gates_TK: torch.Tensor) -> torch.Tensor:
    """Weighted sum in the order of K, in float32: adding one expert after the other fixes the rounding."""
    out_TD = y_TKD[:, 0].float() * gates_TK[:, 0, None]
    for k in range(1, y_TKD.shape[1]):
        out_TD = out_TD + y_TKD[:, k].float() * gates_TK[:, k, None]
    return out_TD.to(y_TKD.dtype)


class Padding:
    """Packed tokens to a [B, L] grid and back; only attention ever sees the padding."""

    def __init__(self, seq_lens: Sequence[int], device: torch.device | str) -> None:
        self.num_seqs, self.longest = len(seq_lens), max(seq_lens)
        lens_B = torch.tensor(seq_lens)
        seq_T = torch.repeat_interleave(torch.arange(self.num_seqs), lens_B)
        offset_T = torch.arange(len(seq_T)) - (torch.cumsum(lens_B, 0) - lens_B)[seq_T]
        # Without padding the scatter and the gather would both be identities: skip them.
        self.is_dense = self.num_seqs * self.longest == len(seq_T)
        self.at_T = (seq_T * self.longest + offset_T).to(device)

    def spread(self, x_TNE: torch.Tensor) -> torch.Tensor:
        num_heads, dim = x_TNE.shape[1:]
        if not self.is_dense:
            x_TNE = x_TNE.new_zeros(self.num_seqs * self.longest, num_heads, dim).index_copy(0, self.at_T, x_TNE)
        return x_TNE.view(self.num_seqs, self.longest, num_heads, dim).transpose(1, 2)

    def gather(self, x_BNLE: torch.Tensor) -> torch.Tensor:
        out = x_BNLE.transpose(1, 2).reshape(self.num_seqs * self.longest, x_BNLE.shape[1], x_BNLE.shape[3])
        return out if self.is_dense else out.index_select(0, self.at_T)


def sdpa_packed(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
    """Causal attention by torch's fused kernel over padded sequences."""
    padding = Padding(seq_lens, q_THE.device)
    q, k, v = padding.spread(q_THE), padding.spread(k_TKE), padding.spread(v_TKE)
    if (num_shared := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(num_shared, 1), v.repeat_interleave(num_shared, 1)
    return padding.gather(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class TorchPages:
    """Pages as [P, PAGE, K, E]; attention gathers them and runs the fused kernel, sequence by sequence unless all decode."""

    def __init__(self, num_pages: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_pages = num_pages
        # Zeros, not empty: masked positions still enter a product with weight 0, and 0 * NaN is NaN.
        self._kv = torch.zeros(num_layers, 2, num_pages, PAGE, num_kv_heads, head_dim, dtype=dtype, device=device)

    def write(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor, spans: Spans) -> None:
        for kind, x_TKE in enumerate((k_TKE, v_TKE)):
            self._kv[layer, kind].view(-1, *x_TKE.shape[1:]).index_copy_(0, spans.slots_T, x_TKE)

    def attend(self, layer: int, q_THE: torch.Tensor, spans: Spans) -> torch.Tensor:
        out_THE = torch.empty_like(q_THE)
        if spans.longest_new == 1:
            out_THE.copy_(self._decode(layer, q_THE, spans))
            return out_THE
        starts, lens = spans.starts_B1.tolist(), spans.lens_B.tolist()
        for b, length in enumerate(lens):
            begin, end = starts[b], starts[b + 1]
            k_1KSE, v_1KSE = (x[:, :, :length] for x in self._read(layer, spans.table_BP[b : b + 1, : -(-length // PAGE)]))
            q_1HTE = q_THE[begin:end].transpose(0, 1)[None]
            mask = torch.ones(end - begin, length, dtype=torch.bool, device=q_THE.device).tril_(length - (end - begin))
            out = F.scaled_dot_product_attention(q_1HTE, k_1KSE, v_1KSE, attn_mask=mask, enable_gqa=True)
            out_THE[begin:end] = out[0].transpose(0, 1)
        return out_THE

    def _read(self, layer: int, table_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (self._kv[layer, kind][table_BP].flatten(1, 2).transpose(1, 2) for kind in range(2))
        return k, v

    def _decode(self, layer: int, q_BHE: torch.Tensor, spans: Spans) -> torch.Tensor:
        k_BKSE, v_BKSE = self._read(layer, spans.table_BP[:, : -(-spans.longest // PAGE)])
        num_seqs, num_kv, num_keys, dim = k_BKSE.shape
        mask_B11S = (torch.arange(num_keys, device=q_BHE.device) < spans.lens_B[:, None])[:, None, None]
        # The query heads that share a key/value head become rows of one small product: keys are read once.
        q_BKGE = q_BHE.reshape(num_seqs, num_kv, -1, dim)
        return F.scaled_dot_product_attention(q_BKGE, k_BKSE, v_BKSE, attn_mask=mask_B11S).reshape(q_BHE.shape)
