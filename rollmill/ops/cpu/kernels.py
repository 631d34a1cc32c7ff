"""The compiled attention loop of the CPU: each query row walks its own keys in pages of 64, in one order that nothing else can change.

Every row runs the same machine code over the same tiles whether it is one of a prompt, of a training batch or a single decoded
token, so decode equals prefill by construction. Sums run over fixed lanes; nothing is reassociated.
Shapes: T query rows, H query heads, K key/value heads, D head size, P pages, S = 64 positions of a page, G = H / K.
"""

from __future__ import annotations

import numba as nb
import numpy as np

PAGE = 64
LANES = 16
# exp2 of the fractional part in [-0.5, 0.5] times ln 2: a degree 6 polynomial of e**r, the error below one unit in the last place.
LOG2E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
LOWEST = np.float32(-87.0)
HALF = np.float32(0.5)
C2, C3, C4 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
C5, C6, C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
ONE, ZERO = np.float32(1.0), np.float32(0.0)
MINUS_INF = np.float32(-np.inf)


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def exp_in_place(values, power, factor):  # type: ignore[no-untyped-def]
    """e**x of every x up to 88, by a polynomial whose instructions are the same for each; below -87 it gives e**-87."""
    for j in range(len(values)):
        x = max(values[j], LOWEST)
        n = np.floor(x * LOG2E + HALF)
        r = x - n * LN2_HIGH
        r = r - n * LN2_LOW
        y = C7 * r + C6
        y = y * r + C5
        y = y * r + C4
        y = y * r + C3
        y = y * r + C2
        values[j] = y * (r * r) + r + ONE
        power[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for j in range(len(values)):
        values[j] = values[j] * factor[j]


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def attend_rows(q_THD, k_PKDS, v_PKSD, table_BP, seq_T, position_T, scale, out_THD, first, last):  # type: ignore[no-untyped-def]
    """Softmax attention of rows [first, last); row t sees the positions of sequence `seq_T[t]` up to `position_T[t]`."""
    num_heads, dim = q_THD.shape[1], q_THD.shape[2]
    num_kv = k_PKDS.shape[1]
    shared = num_heads // num_kv
    acc = np.empty((shared, dim), np.float32)
    total = np.empty((shared, LANES), np.float32)
    peak = np.empty(shared, np.float32)
    score = np.empty(PAGE, np.float32)
    power = np.empty(PAGE, np.int32)
    factor = power.view(np.float32)
    lane = np.empty(LANES, np.float32)
    for head in range(num_kv):
        for t in range(first, last):
            seq, length = seq_T[t], position_T[t] + 1
            acc[:, :] = ZERO
            total[:, :] = ZERO
            peak[:] = MINUS_INF
            for tile in range((length + PAGE - 1) // PAGE):
                page = table_BP[seq, tile]
                seen = min(PAGE, length - tile * PAGE)
                k_DS = k_PKDS[page, head]
                v_SD = v_PKSD[page, head]
                for g in range(shared):
                    q_D = q_THD[t, head * shared + g]
                    for j in range(PAGE):
                        score[j] = ZERO
                    for d in range(0, dim, 8):
                        q0, q1, q2, q3 = q_D[d], q_D[d + 1], q_D[d + 2], q_D[d + 3]
                        q4, q5, q6, q7 = q_D[d + 4], q_D[d + 5], q_D[d + 6], q_D[d + 7]
                        k0, k1, k2, k3 = k_DS[d], k_DS[d + 1], k_DS[d + 2], k_DS[d + 3]
                        k4, k5, k6, k7 = k_DS[d + 4], k_DS[d + 5], k_DS[d + 6], k_DS[d + 7]
                        for j in range(PAGE):
                            s = score[j] + q0 * k0[j]
                            s = s + q1 * k1[j]
                            s = s + q2 * k2[j]
                            s = s + q3 * k3[j]
                            s = s + q4 * k4[j]
                            s = s + q5 * k5[j]
                            s = s + q6 * k6[j]
                            score[j] = s + q7 * k7[j]
                    for j in range(PAGE):
                        score[j] = score[j] * scale
                    for j in range(seen, PAGE):
                        score[j] = MINUS_INF
                    for i in range(LANES):
                        lane[i] = max(max(score[i], score[i + 16]), max(score[i + 32], score[i + 48]))
                    top = peak[g]
                    for i in range(LANES):
                        top = max(top, lane[i])
                    if top > peak[g]:
                        fade = np.exp(peak[g] - top)
                        peak[g] = top
                        for i in range(LANES):
                            total[g, i] *= fade
                        for d in range(dim):
                            acc[g, d] *= fade
                    for j in range(PAGE):
                        score[j] = score[j] - top
                    exp_in_place(score, power, factor)
                    # What lies behind the last key is left out, not multiplied by zero: a page may hold anything there.
                    for j in range(seen, PAGE):
                        score[j] = ZERO
                    for i in range(LANES):
                        total[g, i] += (score[i] + score[i + 16]) + (score[i + 32] + score[i + 48])
                    a_D = acc[g]
                    whole = seen // 8 * 8
                    for j in range(0, whole, 8):
                        p0, p1, p2, p3 = score[j], score[j + 1], score[j + 2], score[j + 3]
                        p4, p5, p6, p7 = score[j + 4], score[j + 5], score[j + 6], score[j + 7]
                        v0, v1, v2, v3 = v_SD[j], v_SD[j + 1], v_SD[j + 2], v_SD[j + 3]
                        v4, v5, v6, v7 = v_SD[j + 4], v_SD[j + 5], v_SD[j + 6], v_SD[j + 7]
                        for d in range(dim):
                            a = a_D[d] + p0 * v0[d]
                            a = a + p1 * v1[d]
                            a = a + p2 * v2[d]
                            a = a + p3 * v3[d]
                            a = a + p4 * v4[d]
                            a = a + p5 * v5[d]
                            a = a + p6 * v6[d]
                            a_D[d] = a + p7 * v7[d]
                    for j in range(whole, seen):
                        p0, v0 = score[j], v_SD[j]
                        for d in range(dim):
                            a_D[d] = a_D[d] + p0 * v0[d]
            for g in range(shared):
                weight = total[g, 0]
                for i in range(1, LANES):
                    weight = weight + total[g, i]
                for d in range(dim):
                    out_THD[t, head * shared + g, d] = acc[g, d] / weight


@nb.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
def write_rows(k_TKE, v_TKE, slots_T, k_PKDS, v_PKSD):  # type: ignore[no-untyped-def]
    """Put each token's key and value into its slot; coordinates beyond the head size become zero."""
    dim, padded = k_TKE.shape[2], k_PKDS.shape[2]
    for t in range(len(slots_T)):
        page, offset = slots_T[t] // PAGE, slots_T[t] % PAGE
        for head in range(k_TKE.shape[1]):
            for d in range(dim):
                k_PKDS[page, head, d, offset] = k_TKE[t, head, d]
                v_PKSD[page, head, offset, d] = v_TKE[t, head, d]
            for d in range(dim, padded):
                k_PKDS[page, head, d, offset] = ZERO
                v_PKSD[page, head, offset, d] = ZERO


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def swiglu_rows(gate_up_T2F, out_TF, first, last):  # type: ignore[no-untyped-def]
    """silu(first half) * second half of rows [first, last); a column meets the same instructions in every row."""
    width = out_TF.shape[1]
    power = np.empty(width, np.int32)
    factor = power.view(np.float32)
    grown = np.empty(width, np.float32)
    for t in range(first, last):
        row, out = gate_up_T2F[t], out_TF[t]
        for f in range(width):
            # Beyond 87 the result is zero to float32 either way.
            grown[f] = min(-row[f], -LOWEST)
        exp_in_place(grown, power, factor)
        for f in range(width):
            out[f] = row[f] / (ONE + grown[f]) * row[width + f]


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def rms_norm_row(row, weight_D, eps, out, lane):  # type: ignore[no-untyped-def]
    """One row over its root mean square, times the weight; squares are added in fixed lanes."""
    dim = len(row)
    whole = dim // LANES * LANES
    lane[:] = ZERO
    for d in range(0, whole, LANES):
        for i in range(LANES):
            lane[i] += row[d + i] * row[d + i]
    total = ZERO
    for i in range(LANES):
        total += lane[i]
    for d in range(whole, dim):
        total += row[d] * row[d]
    factor = ONE / np.sqrt(total / np.float32(dim) + eps)
    for d in range(dim):
        out[d] = row[d] * factor * weight_D[d]


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def rms_norm_rows(x_TD, weight_D, eps, out_TD, first, last):  # type: ignore[no-untyped-def]
    lane = np.empty(LANES, np.float32)
    for t in range(first, last):
        rms_norm_row(x_TD[t], weight_D, eps, out_TD[t], lane)


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def add_rms_norm_rows(x_TD, residual_TD, weight_D, eps, sum_TD, out_TD, first, last):  # type: ignore[no-untyped-def]
    """The sum of two rows, and its norm, while it is still in the cache."""
    lane = np.empty(LANES, np.float32)
    for t in range(first, last):
        x, residual, total = x_TD[t], residual_TD[t], sum_TD[t]
        for d in range(len(x)):
            total[d] = x[d] + residual[d]
        rms_norm_row(total, weight_D, eps, out_TD[t], lane)


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def rotate_rows(x_THE, cos_TE, sin_TE, out_THE, first, last):  # type: ignore[no-untyped-def]
    """Turn each head of rows [first, last) by its position's angles; the two halves of a head are the two coordinates."""
    half = x_THE.shape[2] // 2
    for t in range(first, last):
        for h in range(x_THE.shape[1]):
            x, out = x_THE[t, h], out_THE[t, h]
            for d in range(half):
                out[d] = x[d] * cos_TE[t, d] - x[d + half] * sin_TE[t, d]
            for d in range(half):
                out[d + half] = x[d + half] * cos_TE[t, d + half] + x[d] * sin_TE[t, d + half]


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def score_rows(logits_NV, ids_N, logprob_N, entropy_N, first, last):  # type: ignore[no-untyped-def]
    """Log-softmax at one token, and the entropy, of rows [first, last): one pass for the maximum, one for the sums, in fixed lanes."""
    vocab = logits_NV.shape[1]
    power = np.empty(PAGE, np.int32)
    factor = power.view(np.float32)
    below = np.empty(PAGE, np.float32)
    grown = np.empty(PAGE, np.float32)
    total = np.empty(PAGE, np.float32)
    weighted = np.empty(PAGE, np.float32)
    odd = np.empty(PAGE, np.float32)
    for t in range(first, last):
        row = logits_NV[t]
        top = row_max(row, grown)
        total[:] = ZERO
        weighted[:] = ZERO
        odd[:] = ZERO
        for at in range(0, vocab, PAGE):
            size = min(PAGE, vocab - at)
            for j in range(size):
                below[j] = row[at + j] - top
            # A column that is not there adds e**-87 times nothing that float32 could hold.
            for j in range(size, PAGE):
                below[j] = MINUS_INF
            for j in range(PAGE):
                grown[j] = below[j]
            exp_in_place(grown, power, factor)
            for j in range(size, PAGE):
                grown[j] = ZERO
                below[j] = ZERO
            for j in range(PAGE):
                total[j] += grown[j]
                weighted[j] += grown[j] * max(below[j], LOWEST)
                # Zero for numbers; what is none, and an infinite maximum, spoils the row as it must.
                odd[j] += below[j] - below[j]
        mass, moment, doubt = np.float64(0), np.float64(0), ZERO
        for j in range(PAGE):
            mass += np.float64(total[j])
            moment += np.float64(weighted[j])
            doubt += odd[j]
        log_mass = np.log(mass)
        logprob_N[t] = np.float32(np.float64(row[ids_N[t]] - top) - log_mass) + doubt
        entropy_N[t] = np.float32(log_mass - moment / mass) + doubt


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def row_max(row, lane):  # type: ignore[no-untyped-def]
    width = len(lane)
    lane[:] = MINUS_INF
    whole = len(row) // width * width
    for at in range(0, whole, width):
        for j in range(width):
            lane[j] = max(lane[j], row[at + j])
    top = MINUS_INF
    for j in range(width):
        top = max(top, lane[j])
    for at in range(whole, len(row)):
        top = max(top, row[at])
    return top


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def pick_rows(logits_NV, uniform_N, picked_N, first, last):  # type: ignore[no-untyped-def]
    """The first token at which the running sum of rows [first, last) passes its share `uniform_N` of the whole, in float64."""
    vocab = logits_NV.shape[1]
    num_blocks = (vocab + PAGE - 1) // PAGE
    power = np.empty(PAGE, np.int32)
    factor = power.view(np.float32)
    lane = np.empty(PAGE, np.float32)
    grown = np.empty(num_blocks * PAGE, np.float32)
    mass = np.empty(num_blocks, np.float64)
    for t in range(first, last):
        row = logits_NV[t]
        top = row_max(row, lane)
        whole = np.float64(0)
        for i in range(num_blocks):
            at = i * PAGE
            size = min(PAGE, vocab - at)
            block = grown[at : at + PAGE]
            for j in range(size):
                block[j] = row[at + j] - top
            exp_in_place(block, power, factor)
            for j in range(size):
                # What is cut off has no share, not the smallest one.
                if row[at + j] == MINUS_INF:
                    block[j] = ZERO
            for j in range(size, PAGE):
                block[j] = ZERO
            part = np.float64(0)
            for j in range(PAGE):
                part += np.float64(block[j])
            mass[i] = part
            whole += part
        # Below the whole, which rounding may reach: so the walk, adding as before, ends inside.
        point = min(uniform_N[t] * whole, np.nextafter(whole, np.float64(0)))
        done = np.float64(0)
        chosen = 0
        for i in range(num_blocks):
            if done + mass[i] > point:
                for j in range(i * PAGE, (i + 1) * PAGE):
                    if grown[j] > ZERO:
                        # Within a block the sum may round to just below the point: then its last token with a share it is.
                        chosen = j
                        done += np.float64(grown[j])
                        if done > point:
                            break
                break
            done += mass[i]
        picked_N[t] = chosen


@nb.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
def sigmoid_rows(x_TX, out_TX, first, last):  # type: ignore[no-untyped-def]
    width = x_TX.shape[1]
    power = np.empty(width, np.int32)
    factor = power.view(np.float32)
    grown = np.empty(width, np.float32)
    for t in range(first, last):
        row, out = x_TX[t], out_TX[t]
        for i in range(width):
            grown[i] = min(-row[i], -LOWEST)
        exp_in_place(grown, power, factor)
        for i in range(width):
            # Adding a zero that is none where the score is none.
            out[i] = ONE / (ONE + grown[i]) + (row[i] - row[i])
