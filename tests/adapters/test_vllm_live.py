"""The map from checkpoint names to what a vLLM worker computes with, over stand-ins for vLLM's modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rollmill.adapters.vllm_live import Fused, VllmWeights, _order_of, differing, fused_parameters, put_back
from rollmill.weights import Follower, Publisher, WrongWeights, fingerprint, open_store
from rollmill.weights.schema import TensorSpec

VOCAB, PADDED, DIM, INNER, NUM_EXPERTS = 10, 12, 8, 6, 3


class PackedLinear(nn.Module):
    """Like vLLM's linear layers on a CPU: after `pack_fake` the weight lives inside the multiply alone."""

    def __init__(self, sizes: list[int], num_inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.output_partition_sizes, self.input_size_per_partition = sizes, num_inputs
        self.weight = nn.Parameter(torch.randn(sum(sizes), num_inputs).to(dtype), requires_grad=False)
        self.num_packs = 0


class Embedding(PackedLinear):
    """Looked up in the parameter and multiplied from the packed copy; rows past the vocabulary are padding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__([PADDED], DIM, dtype)
        self.org_vocab_size, self.embedding_dim = VOCAB, DIM


class Experts(nn.Module):
    """All experts of a layer in one parameter each, shuffled by `shuffle_fake` when packed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * INNER, DIM).to(dtype), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, INNER).to(dtype), requires_grad=False)


def shuffle_fake(module: nn.Module, matrices: torch.Tensor) -> torch.Tensor | None:
    """Columns in pairs, as kernels that multiply two at a time want them; None for a model that is not packed."""
    if not isinstance(module, Shuffled):
        return None
    experts, rows, columns = matrices.shape
    return matrices.view(experts, rows, columns // 2, 2).transpose(1, 2).contiguous().view(matrices.shape)


class Shuffled(Experts):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        for live in (self.w13_weight, self.w2_weight):
            shuffled = shuffle_fake(self, live.data)
            assert shuffled is not None
            live.data.copy_(shuffled)


class FakeModel(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self, dtype: torch.dtype, *, is_packed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = Embedding(dtype)
        # vLLM ties some models by one parameter in two modules, each with its own packed copy.
        self.lm_head = Embedding(dtype)
        self.lm_head.weight = self.embed.weight
        self.qkv_proj = PackedLinear([4, 2, 2], DIM, dtype)
        self.qkv_proj.bias = nn.Parameter(torch.randn(8).to(dtype), requires_grad=False)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(DIM, dtype=dtype), requires_grad=False)
        self.experts = nn.Module()
        self.experts.routed_experts = (Shuffled if is_packed else Experts)(dtype)
        if is_packed:
            pack_fake(self.embed, False)
            pack_fake(self.lm_head, False)
            pack_fake(self.qkv_proj, True)


def pack_fake(module: nn.Module, drop_weight: bool) -> None:
    packed = module.weight.detach().clone()
    module.cpu_linear = lambda x, weight, bias: (x.float() @ packed.float().t()).to(x.dtype)
    module.num_packs += 1
    if drop_weight:
        module.weight = nn.Parameter(torch.empty(0, dtype=packed.dtype), requires_grad=False)


def mapped(model: FakeModel) -> list[Fused]:
    return fused_parameters(model, pack_fake, checkpoint_of(torch.bfloat16), shuffle_fake)


def checkpoint_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What `FakeModel` was loaded from."""
    plain = FakeModel(dtype, is_packed=False)
    q, k, v = plain.qkv_proj.weight.data.split([4, 2, 2])
    bq, bk, bv = plain.qkv_proj.bias.data.split([4, 2, 2])
    tensors = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "q_proj.bias": bq, "k_proj.bias": bk, "v_proj.bias": bv}
    for x in range(NUM_EXPERTS):
        gate, up = plain.experts.routed_experts.w13_weight.data[x].split(INNER)
        tensors |= {f"experts.{x}.gate_proj.weight": gate, f"experts.{x}.up_proj.weight": up}
        tensors[f"experts.{x}.down_proj.weight"] = plain.experts.routed_experts.w2_weight.data[x]
    tensors |= {"embed.weight": plain.embed.weight.data[:VOCAB], "norm.weight": plain.norm.weight.data}
    return {name: t.clone() for name, t in tensors.items()}


def specs_of(tensors: dict[str, torch.Tensor], dtype: str) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name=name, dtype=dtype, shape=tuple(t.shape)) for name, t in tensors.items()}


def stepped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    moved = {name: t.clone() for name, t in tensors.items()}
    moved["k_proj.weight"][1, 3] = -0.0
    moved["embed.weight"][7] = 3.0
    moved["v_proj.bias"][0] = 5.0
    moved["experts.1.up_proj.weight"][2, 5] = 7.0
    moved["experts.2.down_proj.weight"][:, 1] = -2.0
    return moved


def following(tmp_path: Path, model: FakeModel, tensors: dict[str, torch.Tensor]) -> tuple[Follower, VllmWeights, dict[str, torch.Tensor]]:
    """A follower that holds version 0 of a store, whose version 1 waits; and the weights of version 1."""
    store, moved = open_store(tmp_path / "store"), stepped(tensors)
    live = VllmWeights(mapped(model), specs_of(tensors, "bfloat16"))
    follower = Follower(store, live)
    with Publisher(store, run_id="t") as publisher:
        publisher.resume(tensors, step=0)
        follower.swap(follower.bootstrap())
        publisher.submit(moved, step=1)
        publisher.flush()
    return follower, live, moved


def one_of(live: VllmWeights, name: str) -> Fused:
    return live._fused[name]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_map_finds_every_checkpoint_tensor_where_it_is_served(dtype: torch.dtype, is_packed: bool) -> None:
    fused = mapped(FakeModel(dtype, is_packed=is_packed))
    stored = checkpoint_of(dtype)
    assert {name for one in fused for name in one.parts} == stored.keys()
    assert differing(fused, stored.get) == []


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_delta_reaches_what_the_next_forward_uses_and_is_proved_there(tmp_path: Path, dtype: torch.dtype, is_packed: bool) -> None:
    model, stored = FakeModel(dtype, is_packed=is_packed), checkpoint_of(torch.bfloat16)
    follower, live, moved = following(tmp_path, model, stored)
    staged = follower.poll()
    assert staged is not None
    assert follower.swap(staged) == fingerprint(moved)
    served = one_of(live, "k_proj.weight").served()
    assert torch.equal(served[4:6].to(torch.bfloat16), moved["k_proj.weight"])
    assert torch.equal(model.embed.weight[:VOCAB].to(torch.bfloat16), moved["embed.weight"])
    experts = model.experts.routed_experts
    served = shuffle_fake(experts, moved["experts.2.down_proj.weight"][None])
    want = moved["experts.2.down_proj.weight"] if served is None else served[0]
    assert torch.equal(experts.w2_weight[2].to(torch.bfloat16), want)


def test_swap_repacks_only_what_the_delta_touches(tmp_path: Path) -> None:
    model = FakeModel(torch.bfloat16, is_packed=True)
    follower, _, _ = following(tmp_path, model, checkpoint_of(torch.bfloat16))
    before = model.qkv_proj.num_packs, model.embed.num_packs
    staged = follower.poll()
    assert staged is not None
    follower.swap(staged)
    assert (model.qkv_proj.num_packs, model.embed.num_packs) == (before[0] + 1, before[1] + 1)


def test_plain_weights_of_the_published_dtype_are_patched_in_vllms_own_memory(tmp_path: Path) -> None:
    model = FakeModel(torch.bfloat16, is_packed=False)
    pointer = model.qkv_proj.weight.data_ptr()
    follower, live, moved = following(tmp_path, model, checkpoint_of(torch.bfloat16))
    staged = follower.poll()
    assert staged is not None
    follower.swap(staged)
    assert (live.num_copied, live.num_packed) == (0, 0)
    assert model.qkv_proj.weight.data_ptr() == pointer
    assert torch.equal(model.qkv_proj.weight[4:6], moved["k_proj.weight"])


@pytest.mark.parametrize("forgetful", ["embed", "lm_head", "qkv_proj"])
def test_a_multiply_that_kept_the_old_weights_is_noticed_and_the_old_version_put_back(tmp_path: Path, forgetful: str) -> None:
    """The parameter shows the new values; only reading back through the multiply tells."""
    model, stored = FakeModel(torch.bfloat16, is_packed=True), checkpoint_of(torch.bfloat16)
    follower, live, _ = following(tmp_path, model, stored)
    stale = getattr(model, forgetful).cpu_linear
    one = one_of(live, {"qkv_proj": "k_proj.weight"}.get(forgetful, "embed.weight"))
    packs = 0

    def pack_once_too_late(module: nn.Module, drop_weight: bool) -> None:
        nonlocal packs
        pack_fake(module, drop_weight)
        packs += module is getattr(model, forgetful)
        if packs == 1 and module is getattr(model, forgetful):
            module.cpu_linear = stale

    one._pack = pack_once_too_late
    staged = follower.poll()
    assert staged is not None
    with pytest.raises(WrongWeights) as refused:
        follower.swap(staged)
    assert not refused.value.is_lost
    assert follower.version == 0
    live.forget()
    assert follower._prove(staged.schema) == fingerprint(stored)


def test_value_that_the_published_dtype_cannot_hold_is_not_rounded_into_a_proof(tmp_path: Path) -> None:
    model = FakeModel(torch.float32, is_packed=False)
    follower, live, _ = following(tmp_path, model, checkpoint_of(torch.bfloat16))
    model.norm.weight.data[0] += 1e-6
    live.forget()
    held = follower.fingerprint
    assert held is not None
    specs = follower._held.schema  # type: ignore[union-attr]
    assert follower._prove(specs).differing(held) == ("norm.weight",)


def test_empty_parameters_are_never_proof(tmp_path: Path) -> None:
    """Hashes of emptied parameters agree whatever is served; ours change when a single packed value does."""
    model = FakeModel(torch.bfloat16, is_packed=True)
    follower, live, _ = following(tmp_path, model, checkpoint_of(torch.bfloat16))
    assert model.qkv_proj.weight.numel() == 0
    before = live.lanes()["q_proj.weight"]
    one = one_of(live, "q_proj.weight")
    assert one.rows is not None
    hurt = one.rows.clone()
    hurt[0, 0] += 1
    model.qkv_proj.weight = nn.Parameter(hurt, requires_grad=False)
    pack_fake(model.qkv_proj, True)
    live.forget()
    assert live.lanes()["q_proj.weight"] != before
    assert follower.version == 0


def test_parameter_that_is_empty_and_packed_nowhere_is_refused() -> None:
    model = FakeModel(torch.bfloat16, is_packed=True)
    del model.qkv_proj.cpu_linear
    with pytest.raises(ValueError, match="is empty in vLLM and no packed multiply holds it"):
        mapped(model)


def test_checkpoint_comes_back_bit_for_bit() -> None:
    model, stored = FakeModel(torch.bfloat16, is_packed=True), checkpoint_of(torch.bfloat16)
    fused = mapped(model)
    other = {name: t + 1 for name, t in stored.items()}
    put_back(fused, other.get)
    assert differing(fused, stored.get) == sorted(stored, key=list(dict.fromkeys(n for one in fused for n in one.parts)).index)
    put_back(fused, stored.get)
    assert differing(fused, stored.get) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_order_of_many_elements_is_found_from_numbers_of_sixteen_bits(dtype: torch.dtype) -> None:
    module = Shuffled(dtype)
    live = torch.zeros(1, 300, 400, dtype=dtype)
    order = _order_of(module, live, shuffle_fake)
    assert order is not None
    matrix = torch.arange(300 * 400, dtype=torch.float64)
    shuffled = shuffle_fake(module, matrix.view(1, 300, 400))
    assert shuffled is not None
    assert torch.equal(matrix[order], shuffled.flatten())


def test_shuffle_that_loses_values_is_refused() -> None:
    with pytest.raises(ValueError, match="changes the values of experts"):
        _order_of(nn.Module(), torch.zeros(1, 4, 4), lambda module, matrices: torch.zeros_like(matrices))


def test_store_of_another_model_is_refused_by_name() -> None:
    stored = checkpoint_of(torch.bfloat16)
    stored["lm_head.weight"] = stored.pop("norm.weight")
    with pytest.raises(ValueError, match=r"2 tensors are not on both sides, first lm_head\.weight, which only the store has"):
        VllmWeights(mapped(FakeModel(torch.bfloat16, is_packed=False)), specs_of(stored, "bfloat16"))
