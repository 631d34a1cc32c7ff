"""G1 on the CPU: in the exact profile a row's bits depend on its own input and the weights alone, compared with torch.equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rollmill.ops import CpuOps, TorchOps
from rollmill.ops.cpu import strict

OPS = CpuOps()
NUM_ROWS = 2048
COUNTS = (1, 2, 7, 8, 16, 31, 64, 257)
SHAPES = [(160, 480), (432, 160), (576, 960), (1536, 576), (64, 128), (40, 100), (576, 4096)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rows(dim: int, seed: int = 0, count: int = NUM_ROWS) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def check_rows(op: Callable[[torch.Tensor], torch.Tensor], x_TD: torch.Tensor) -> None:
    """Every count, at the front, in the middle, at an odd place and in another order."""
    with torch.inference_mode():
        whole = op(x_TD)
        for count in COUNTS:
            for at in (0, 5, len(x_TD) // 2 + 1, len(x_TD) - count):
                assert torch.equal(op(x_TD[at : at + count]), whole[at : at + count]), (count, at)
        order = torch.randperm(len(x_TD), generator=torch.Generator().manual_seed(7))
        assert torch.equal(op(x_TD[order]), whole[order])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_gives_a_row_the_same_bits_among_any_neighbours(shape: tuple[int, int]) -> None:
    weight = rows(shape[0], 1, shape[1]) * 0.05
    check_rows(lambda x: OPS.linear(x, weight), rows(shape[0]))
    check_rows(lambda x: OPS.linear(x, weight, weight[:, 0]), rows(shape[0], count=300))


@pytest.mark.usefixtures("_threads")
def test_row_wise_operations_give_a_row_the_same_bits_among_any_neighbours() -> None:
    for dim in (40, 160, 576, 1000):
        weight = rows(dim, 1, 1)[0]
        check_rows(lambda x, w=weight: OPS.rms_norm(x, w, 1e-5), rows(dim))
        check_rows(OPS.swiglu, rows(2 * dim))
    cos, sin = rows(40, 2, 1)[:, None], rows(40, 3, 1)[:, None]
    check_rows(lambda x: OPS.rotate(x.view(-1, 4, 40), cos, sin), rows(160))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("vocab", [512, 4099])
def test_scores_and_picks_do_not_depend_on_the_neighbours(vocab: int) -> None:
    logits = rows(vocab, count=600) * 3
    ids, uniform = torch.arange(600) % vocab, torch.rand(600, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    keyed = torch.cat([logits, ids[:, None].float()], 1)
    check_rows(lambda x: torch.stack(OPS.score(x[:, :-1].contiguous(), x[:, -1].long())).T, keyed)
    whole = OPS.pick(logits, uniform)
    for count in COUNTS:
        assert torch.equal(OPS.pick(logits[3 : 3 + count], uniform[3 : 3 + count]), whole[3 : 3 + count])


@pytest.mark.usefixtures("_threads")
def test_experts_give_a_token_the_same_bits_whatever_the_others_choose() -> None:
    num_experts, dim, inner = 8, 64, 48
    gate_up, down = (
        rows(dim, 1, num_experts * 2 * inner).view(num_experts, -1, dim),
        rows(inner, 2, num_experts * dim).view(num_experts, dim, -1),
    )
    gen = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(num_experts, generator=gen)[:3].sort().values for _ in range(300)])
    gates = torch.rand(300, 3, generator=gen)
    keyed = torch.cat([rows(dim, count=300), ids.float(), gates], 1)
    check_rows(lambda x: OPS.experts(x[:, :dim], x[:, dim : dim + 3].long(), x[:, dim + 3 :], gate_up, down), keyed)


def test_without_the_strict_mode_products_run_in_blocks_of_one_shape_and_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose library has no such mode, played by refusing every direct proof."""
    real = strict.is_invariant
    monkeypatch.setattr("rollmill.ops.cpu.exact.is_invariant", lambda n, d, t, *, is_blocked: is_blocked and real(n, d, t, is_blocked=True))
    ops, weight = CpuOps(), rows(160, 1, 96)
    check_rows(lambda x: ops.linear(x, weight), rows(160, count=600))


def test_a_machine_that_cannot_be_exact_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.ops.cpu.exact.is_invariant", lambda *a, **k: False)
    with pytest.raises(ValueError, match=r"160 x 96 products .* MKL_CBWR=AVX2,STRICT"):
        CpuOps().linear(rows(160, count=3), rows(160, 1, 96))


def test_the_proof_catches_a_product_whose_order_follows_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_two_halves_when_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) >= 16:
            return torch.addmm(torch.zeros(len(weight)), x, weight.T)
        half = x.shape[1] // 2
        return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T

    monkeypatch.setattr(strict.F, "linear", in_two_halves_when_few)
    strict.is_invariant.cache_clear()
    assert not strict.is_invariant(96, 160, 1, is_blocked=False)
    strict.is_invariant.cache_clear()


def test_exact_and_fast_agree_to_rounding() -> None:
    """Sums of 576 products in float32, in two orders: at most 576 * 2**-24 of the sum of magnitudes apart, which is about 20 here."""
    x, weight = rows(576, count=50), rows(576, 1, 96) * 0.05
    assert torch.allclose(OPS.linear(x, weight), TorchOps().linear(x, weight), atol=576 * 2**-24 * 20)
