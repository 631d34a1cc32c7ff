"""Quantised copies: every code means what it should, nothing drifts when repeated, and what is published is what is served."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.weights import Follower, HostWeights, Publisher, UnknownFormat, fingerprint, open_store
from rollmill.weights.quant import QuantisedCopy, Scheme, Tensors, dequantise, fused_with, quantise, restored, scheme_of, stays

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
every_scheme = pytest.mark.parametrize("scheme", list(Scheme), ids=lambda scheme: scheme.name)


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def again(tensors: Tensors, scheme: Scheme) -> Tensors:
    return quantise("w", dequantise("w", tensors, scheme), scheme)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    flat = packed.view(torch.uint8)
    return torch.stack((flat & 15, flat >> 4), dim=2).flatten(1)


def test_every_fp8_number_is_its_own_code() -> None:
    codes = torch.tensor([c for c in range(256) if c not in (0x7F, 0x80, 0xFF)], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()[None]
    for scheme in (Scheme.FP8_BLOCK, Scheme.FP8_TENSOR):
        for factor in (1.0, 2.0**-20, 2.0**60):
            found = quantise("w", values * factor, scheme)
            assert torch.equal(found["w"].view(torch.uint8)[0], codes)
            assert torch.equal(dequantise("w", found, scheme, dtype=torch.float32), values * factor)


def test_every_fp4_number_is_its_own_code_low_nibble_first() -> None:
    codes = torch.tensor([c for c in range(16) if c != 8] + [7], dtype=torch.uint8)
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])[codes.long()][None]
    for scheme in (Scheme.MXFP4, Scheme.NVFP4):
        for factor in (1.0, 2.0**-30, 2.0**60):
            found = quantise("w", values * factor, scheme)
            assert torch.equal(nibbles(found["w"])[0], codes)
            assert torch.equal(dequantise("w", found, scheme, dtype=torch.float32), values * factor)


def test_fp4_takes_the_nearest_number_and_the_even_code_half_way() -> None:
    middles = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
    row = torch.tensor([[6.0, *middles, *(m * (1 - 2.0**-20) for m in middles), 6.9]])
    expected = [7, 0, 2, 2, 4, 4, 6, 6, 0, 1, 2, 3, 4, 5, 6, 7]
    assert nibbles(quantise("w", row, Scheme.MXFP4)["w"])[0].tolist() == expected


def test_nvfp4_rounds_as_exact_arithmetic_does() -> None:
    torch.manual_seed(0)
    rows = torch.cat([torch.randn(64, 16) * scale for scale in (1.0, 1e-2, 1e-3)])
    found = quantise("w", rows, Scheme.NVFP4)
    top, scales = found["w_scale_2"].double(), found["w_scale"].float().double()
    exact = rows.double().abs() / (scales * top)
    distances = (exact[:, :, None].clamp(max=6.0) - torch.tensor(E2M1, dtype=torch.float64)).abs()
    taken = distances.gather(2, (nibbles(found["w"]) & 7).long()[:, :, None])[:, :, 0]
    assert torch.equal(taken, distances.amin(dim=2))
    ideal = rows.double().abs().amax(dim=1, keepdim=True) / 6 / top
    is_normal = ideal >= 2.0**-6
    assert is_normal.any() and ((scales - ideal).abs() <= ideal / 16)[is_normal].all()


@every_scheme
@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    rows=st.integers(0, 5),
    half_cols=st.integers(0, 40),
    exponents=st.lists(st.integers(-149, 126), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
)
def test_quantising_what_was_dequantised_changes_no_bit(scheme: Scheme, rows: int, half_cols: int, exponents: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([2.0**e for e in exponents])
    picked = scales[torch.randint(len(exponents), (rows, 2 * half_cols), generator=generator)]
    once = quantise("w", (torch.randn(rows, 2 * half_cols, generator=generator) * picked).clamp(-(2.0**125), 2.0**125), scheme)
    assert bits(again(once, scheme)) == bits(once)


@every_scheme
def test_blocks_that_do_not_divide_the_shape_are_cut_short(scheme: Scheme) -> None:
    torch.manual_seed(1)
    values = torch.randn(131, 150)
    found = quantise("w", values, scheme)
    shapes = {Scheme.FP8_BLOCK: (2, 2), Scheme.FP8_TENSOR: (), Scheme.MXFP4: (131, 5), Scheme.NVFP4: (131, 10)}
    assert tuple(next(t for name, t in found.items() if name != "w").shape) == shapes[scheme]
    back = dequantise("w", found, scheme, dtype=torch.float32)
    assert back.shape == values.shape
    assert ((back - values).norm() / values.norm()).item() < (0.03 if "fp8" in scheme else 0.13)
    # The last columns have blocks of their own: what stands before them has no say.
    first, cols = {Scheme.FP8_BLOCK: (128, 128), Scheme.MXFP4: (0, 128), Scheme.NVFP4: (0, 144)}.get(scheme, (0, 0))
    if cols:
        alone = quantise("w", values[first:, cols:], scheme, largest=values.abs().amax())
        assert torch.equal(dequantise("w", alone, scheme), dequantise("w", found, scheme)[first:, cols:])


@every_scheme
def test_zeros_give_zeros_and_minus_zero_has_no_code_of_its_own(scheme: Scheme) -> None:
    plus, minus = quantise("w", torch.zeros(3, 64), scheme), quantise("w", -torch.zeros(3, 64), scheme)
    assert bits(plus) == bits(minus)
    assert not plus["w"].view(torch.uint8).any()
    assert torch.equal(dequantise("w", plus, scheme), torch.zeros(3, 64, dtype=torch.bfloat16))
    tiny = torch.tensor([[1.0] + 15 * [-1e-9]])
    assert not quantise("w", tiny, scheme)["w"].view(torch.uint8)[0, 1:].any()


@every_scheme
def test_huge_and_tiny_values_keep_their_size(scheme: Scheme) -> None:
    for size in (6e37, 1e30, 1e-20, 2.0**-90):
        values = torch.full((2, 64), size)
        back = dequantise("w", quantise("w", values, scheme), scheme, dtype=torch.float32)
        assert torch.isfinite(back).all() and ((back / values - 1).abs() < 0.34).all()
    subnormal = dequantise("w", quantise("w", torch.full((2, 64), 1e-42), scheme), scheme)
    assert not subnormal.any()


@every_scheme
def test_no_value_is_further_off_than_half_a_step(scheme: Scheme) -> None:
    torch.manual_seed(2)
    values = torch.randn(128, 256) * torch.logspace(-2, 2, 128)[:, None]
    back = dequantise("w", quantise("w", values, scheme), scheme, dtype=torch.float32)
    largest = values.abs().amax(dim=1, keepdim=True) if "fp4" in scheme else values.abs().amax()
    # e4m3: 2^-4 of a normal value, below that 2^-10 of a scale of at most largest/232. e2m1: one scale, half the step from 4 to 6;
    # the largest is at least five scales where a value can be that far off.
    allowed = largest / 5 if "fp4" in scheme else torch.maximum(values.abs() / 16, largest * 2.0**-10 / 232)
    assert ((back - values).abs() <= allowed).all()


@every_scheme
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_nan_and_infinity_are_refused_with_the_name_of_the_tensor(scheme: Scheme, bad: float) -> None:
    values = torch.zeros(4, 64)
    values[2, 3] = bad
    with pytest.raises(ValueError, match=r"layer\.weight has 1 values that are NaN, infinite"):
        quantise("layer.weight", values, scheme)
    with pytest.raises(ValueError, match=r"layer\.weight has 1 values that are NaN, infinite"):
        QuantisedCopy(scheme=scheme)({"layer.weight": values})


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match="keep it"):
        quantise("w", torch.zeros(4), Scheme.FP8_BLOCK)
    with pytest.raises(ValueError, match="keep it"):
        quantise("w", torch.zeros(4, 4, dtype=torch.int32), Scheme.FP8_BLOCK)
    with pytest.raises(ValueError, match="even number"):
        quantise("w", torch.zeros(4, 7), Scheme.NVFP4)
    with pytest.raises(ValueError, match="w_scale_2 missing"):
        dequantise("w", {"w": torch.zeros(1), "w_scale": torch.zeros(1)}, Scheme.NVFP4)
    with pytest.raises(ValueError, match="both a tensor of the model and a scale"):
        QuantisedCopy(scheme=Scheme.MXFP4)({"a.weight": torch.zeros(4, 64), "a.weight_scale": torch.zeros(4)})


def test_a_reader_refuses_a_quantiser_it_does_not_know() -> None:
    with pytest.raises(UnknownFormat, match="fp3_from_the_future/1"):
        restored({"w": torch.zeros(2)}, "fp3_from_the_future/1")
    with pytest.raises(UnknownFormat):
        scheme_of("fp8_e4m3_block128_pow2/2")
    plain = {"w": torch.zeros(2)}
    assert restored(plain, "") == plain


def test_norms_embeddings_head_and_router_stay() -> None:
    matrix, vector = torch.zeros(4, 64), torch.zeros(4)
    for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight", "layers.0.mlp.gate.weight", "l.router.weight"):
        assert stays(name, matrix), name
    for name in ("layers.0.mlp.gate_proj.weight", "layers.0.self_attn.q_proj.weight", "layers.3.mlp.experts.7.up_proj.weight"):
        assert not stays(name, matrix), name
    assert stays("layers.0.mlp.gate_proj.bias", vector) and stays("rotary", matrix)


@pytest.mark.parametrize("scheme", [Scheme.NVFP4, Scheme.FP8_TENSOR])
def test_matrices_that_engines_fuse_share_their_scale(scheme: Scheme) -> None:
    torch.manual_seed(3)
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    tensors = {name: torch.randn(32, 64) * size for name, size in zip(names, (1.0, 9.0, 0.1, 0.01), strict=True)}
    suffix = "_scale_2" if scheme is Scheme.NVFP4 else "_scale"
    found = QuantisedCopy(scheme=scheme)(tensors)
    q, k, v, o = (found[name + suffix].item() for name in names)
    assert q == k == v > o
    assert fused_with(names[0]) == fused_with(names[2]) != fused_with(names[3])
    back = restored(found, scheme)
    assert back.keys() == tensors.keys() and bits(QuantisedCopy(scheme=scheme)(back)) == bits(found)


@every_scheme
def test_strided_bf16_and_fp32_inputs_of_equal_value_give_equal_bits(scheme: Scheme) -> None:
    torch.manual_seed(4)
    values = torch.randn(96, 160).bfloat16()
    whole = bits(quantise("w", values, scheme))
    assert bits(quantise("w", values.float(), scheme)) == whole
    assert bits(quantise("w", values.t().contiguous().t(), scheme)) == whole


@every_scheme
def test_thread_count_and_flushing_of_subnormals_change_no_bit(scheme: Scheme) -> None:
    values = torch.arange(-40000, 40000, dtype=torch.float32).reshape(400, 200) ** 3 * 1e-30 / 7
    values[7] = 1e-41
    threads, found = torch.get_num_threads(), []
    try:
        for count, flush in ((1, False), (2, True)):
            torch.set_num_threads(count)
            torch.set_flush_denormal(flush)
            found.append(bits(quantise("w", values, scheme)))
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    assert found[0] == found[1]


GOLDEN = {
    Scheme.FP8_BLOCK: "bb5eea9e5115e7d4cde4f21c2f28887c",
    Scheme.FP8_TENSOR: "d5413db8eda8ceb2678edc8baabaf947",
    Scheme.MXFP4: "d11c5ea39325bd8072e59825700b1b7b",
    Scheme.NVFP4: "c4a6ecf1379fc81513b6920ea05025f5",
}
"""A changed digest is another quantiser: give it a new number."""


def golden_values() -> torch.Tensor:
    """Every magnitude from 2^-70 to 2^30 and every kind of tie, exact on any machine."""
    steps = (torch.arange(-4096, 4096, dtype=torch.float32) / 64).reshape(64, 128)
    scaled = torch.cat([steps * 2.0**power for power in range(-70, 25, 5)])
    assert scaled.shape == (1216, 128)
    return scaled


def digest(tensors: Tensors) -> str:
    return blake3(b"".join(bits({name: tensor.cpu() for name, tensor in sorted(tensors.items())}).values())).hexdigest(length=16)


@every_scheme
def test_a_scheme_keeps_its_bits_for_ever(scheme: Scheme) -> None:
    assert digest(quantise("w", golden_values(), scheme)) == GOLDEN[scheme]


@every_scheme
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_bits_of_the_cpu(scheme: Scheme) -> None:
    assert digest(quantise("w", golden_values().cuda(), scheme)) == GOLDEN[scheme]


def test_a_step_changes_far_fewer_codes_than_bf16() -> None:
    torch.manual_seed(5)
    master = torch.randn(512, 1024) * 0.02
    later = master + 1e-6 * 0.2294 * torch.randn_like(master)
    changed = {"bf16": (master.bfloat16() != later.bfloat16()).float().mean().item()}
    for scheme in Scheme:
        old, new = quantise("w", master, scheme), quantise("w", later, scheme)
        read = nibbles if scheme in (Scheme.MXFP4, Scheme.NVFP4) else lambda codes: codes.view(torch.uint8)
        changed[scheme.name] = (read(old["w"]) != read(new["w"])).float().mean().item()
    assert 0.008 < changed["bf16"] < 0.011
    assert changed["FP8_BLOCK"] < changed["bf16"] / 10 and changed["FP8_TENSOR"] < changed["bf16"] / 10
    assert changed["NVFP4"] < changed["bf16"] / 60 and changed["MXFP4"] < changed["bf16"] / 60


@every_scheme
def test_a_replica_serves_the_published_codes_bit_for_bit(scheme: Scheme, tmp_path: Path) -> None:
    torch.manual_seed(6)
    masters = {"layers.0.mlp.up_proj.weight": torch.randn(160, 192) * 0.02, "layers.0.norm.weight": torch.ones(192).bfloat16()}
    copy = QuantisedCopy(scheme=scheme)
    store = open_store(tmp_path / "store")
    live = {
        name: torch.zeros(t.shape, dtype=torch.uint8).view(t.dtype) if t.dtype.itemsize == 1 else torch.zeros_like(t)
        for name, t in copy(masters).items()
    }
    follower = Follower(store, HostWeights(live))
    with Publisher(store, run_id="quantised", quantiser=copy.quantiser) as publisher:
        publisher.resume(copy(masters), step=0)
        for step in range(1, 4):
            staged = follower.poll()
            assert staged is not None
            follower.swap(staged)
            masters["layers.0.mlp.up_proj.weight"] += 1e-4 * torch.randn(160, 192)
            publisher.submit(copy(masters), step=step)
            publisher.flush()
    staged = follower.poll()
    assert staged is not None
    follower.swap(staged)
    record = store.version(3)
    quantiser = store.schema(record.schema).quantiser
    assert follower.version == 3 and quantiser == scheme
    assert bits(live) == bits(copy(masters)) and fingerprint(live).total == record.fingerprint
    assert torch.equal(
        restored(live, quantiser)["layers.0.mlp.up_proj.weight"], dequantise("layers.0.mlp.up_proj.weight", copy(masters), scheme)
    )
