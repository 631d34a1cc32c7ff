"""The weights a vLLM worker really computes with, under their checkpoint names: readable, patched in place, reversible and provable.

vLLM fuses q/k/v, gate/up and all experts of a layer into one parameter each, pads the vocabulary and, on CPUs, hides most matrices
inside packed multiplies whose parameters are then empty, and shuffles those of experts. Nothing is proved from a copy: what a packed
multiply holds is read back through itself, and a shuffled parameter is put in order again.
Runs inside vLLM's process and knows no version. Shapes: N rows (outputs), K columns (inputs), X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollmill.weights.bits import dtype_of, host_bytes, tensor_of
from rollmill.weights.live import TensorPatch
from rollmill.weights.proof import Lanes, add
from rollmill.weights.schema import TensorSpec
from rollmill.weights.shard import Held, whole

# Rows of the unit matrix that are multiplied at once when a packed matrix is read back.
_PROBE_ROWS = 256
_WIDTHS = ("input_size_per_partition", "input_size", "embedding_dim")
"""What vLLM's linear layers and embeddings call their number of inputs, the share of this worker first."""
_EXPERT_PARTS = {"w13_weight": ("gate", "up"), "w2_weight": ("down",)}
_EXPERT_NAMES = ({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, {"gate": "w1", "up": "w3", "down": "w2"})
Shuffle = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor | None]
"""vLLM's own: the matrices of experts as its kernel wants them, or None where it takes them as they are."""
Pack = Callable[[torch.nn.Module, bool], None]
"""vLLM's own: make the module's packed multiply anew from its weight, and drop the weight when told to."""


class Fused:
    """One parameter of vLLM and the checkpoint tensors that lie in it, one below the other."""

    def __init__(
        self,
        holders: Sequence[torch.nn.Module],
        attribute: str,
        parts: Mapping[str, tuple[int, int]],
        pack: Pack,
        order: torch.Tensor | None = None,
    ) -> None:
        self.holders, self.attribute, self.parts, self._pack = list(holders), attribute, dict(parts), pack
        self.order = order
        """Of the elements of one expert, where vLLM shuffled them: element i of its memory is element order[i] of the matrix."""
        live = self._live()
        self.is_emptied = live.numel() == 0
        # An embedding that is also the LM head is there twice or more: looked up in the parameter, multiplied from packed copies,
        # of which each module that shares the parameter has its own.
        self.packed = [holder for holder in self.holders if attribute == "weight" and _hides_weight(holder)]
        if self.is_emptied and not self.packed:
            raise ValueError(f"{next(iter(self.parts))} is empty in vLLM and no packed multiply holds it; its values cannot be shown")
        self.dtype = live.dtype
        self.rows: torch.Tensor | None = None if self.is_emptied or order is not None else live
        """What patches are written into; vLLM's own memory where that has the bits that are published, else a copy."""

    def _live(self) -> torch.Tensor:
        """vLLM's memory, the matrices of experts one below the other."""
        live = getattr(self.holders[0], self.attribute).data
        return live.flatten(0, 1) if live.dim() == 3 else live

    @property
    def is_in_place(self) -> bool:
        return not self.is_emptied and self.rows is not None and self.rows.data_ptr() == self._live().data_ptr()

    def served(self) -> torch.Tensor:
        """What the next forward computes with, in vLLM's dtype; where copies of it disagree, one that is wrong."""
        if self.is_emptied:
            expected = None if self.rows is None else self.rows.to(self.dtype)
        else:
            expected = self._live() if self.order is None else self._ordered(self._live())
        for holder in self.packed:
            told = _read_back(holder, self.dtype)
            if expected is None:
                expected = told
            told = _with_signed_zeros(told, expected)
            if not torch.equal(told, expected):
                return told
        assert expected is not None, "an emptied parameter lives in a packed multiply"
        return expected

    def _ordered(self, live: torch.Tensor) -> torch.Tensor:
        assert self.order is not None
        out = torch.empty_like(live)
        out.view(-1, len(self.order))[:, self.order] = live.view(-1, len(self.order))
        return out

    def keep_copy(self, dtype: torch.dtype) -> None:
        """Patch a copy in the published dtype from now on; `commit` brings it to where it is served."""
        self.rows = self.served().to(dtype, copy=True)

    def commit(self) -> None:
        """Serve what `rows` says."""
        assert self.rows is not None, "a parameter is committed after it was mapped"
        self.serve(self.rows)

    def serve(self, rows: torch.Tensor) -> None:
        live = self._live()
        if self.is_emptied:
            for holder in self.holders:
                setattr(holder, self.attribute, torch.nn.Parameter(rows.to(self.dtype, copy=True), requires_grad=False))
        elif self.order is not None:
            live.copy_(rows.to(self.dtype).view(-1, len(self.order))[:, self.order].view(live.shape))
        elif rows.data_ptr() != live.data_ptr():
            live.copy_(rows)
        for holder in self.packed:
            self._pack(holder, self.is_emptied)


class VllmWeights:
    """Live weights for a follower, over the parameters of one vLLM model on a CPU."""

    def __init__(self, fused: Sequence[Fused], published: Mapping[str, TensorSpec]) -> None:
        self._fused = {name: one for one in fused for name in one.parts}
        if missing := sorted(published.keys() ^ self._fused.keys()):
            where = "the store" if missing[0] in published else "vLLM's model"
            raise ValueError(
                f"{len(missing)} tensors are not on both sides, first {missing[0]}, which only {where} has; "
                "start vLLM with the model that is trained, unquantised and with the same tied embeddings"
            )
        for one in fused:
            self._prepare(one, {dtype_of(published[name].dtype) for name in one.parts})
        self._held = {name: whole(TensorSpec(name=name, dtype=published[name].dtype, shape=self._view(name).shape)) for name in self._fused}
        self._dirty: set[Fused] = set()
        self._proved: dict[Fused, dict[str, Lanes]] = {}

    def _prepare(self, one: Fused, dtypes: set[torch.dtype]) -> None:
        if len(dtypes) != 1:
            raise ValueError(f"{', '.join(one.parts)} are one parameter in vLLM and are published in {len(dtypes)} dtypes; publish one")
        (dtype,) = dtypes
        if one.rows is None or one.dtype != dtype:
            one.keep_copy(dtype)

    def _view(self, name: str) -> torch.Tensor:
        one = self._fused[name]
        start, stop = one.parts[name]
        assert one.rows is not None
        return one.rows[start:stop]

    @property
    def num_packed(self) -> int:
        return len({one for one in self._fused.values() if one.packed})

    @property
    def num_copied(self) -> int:
        return len({one for one in self._fused.values() if not one.is_in_place})

    def held(self) -> Mapping[str, Held]:
        return self._held

    def read(self, name: str) -> np.ndarray:
        return host_bytes(self._view(name))

    def load(self, name: str, data: np.ndarray) -> None:
        spec = self._held[name].spec
        self._view(name).copy_(tensor_of(data, spec.dtype, spec.shape))
        self._dirty.add(self._fused[name])

    def stage(self, patches: Sequence[TensorPatch]) -> list[TensorPatch]:
        return list(patches)

    def apply(self, staged: Sequence[TensorPatch]) -> None:
        self._write((patch, patch.codes) for patch in staged)

    def revert(self, staged: Sequence[TensorPatch]) -> None:
        self._write((patch, patch.before) for patch in staged)

    def _write(self, changes: Iterator[tuple[TensorPatch, np.ndarray]]) -> None:
        for patch, codes in changes:
            if len(codes):
                name = patch.held.spec.name
                host_bytes(self._view(name)).view(codes.dtype)[patch.positions] = codes
                self._dirty.add(self._fused[name])
        for one in self._dirty:
            self._proved.pop(one, None)
            one.commit()
        self._dirty.clear()

    def lanes(self) -> dict[str, Lanes]:
        """Parameters that were not written since their last proof are not read again; `forget` makes the next proof a full one."""
        for one in set(self._fused.values()) - self._proved.keys():
            self._proved[one] = dict(self._prove(one))
        return {name: lanes for proved in self._proved.values() for name, lanes in proved.items()}

    def forget(self) -> None:
        self._proved.clear()

    def _prove(self, one: Fused) -> Iterator[tuple[str, Lanes]]:
        served = one.served()
        for name, (start, stop) in one.parts.items():
            held = self._held[name]
            part = served[start:stop]
            low = part.to(dtype_of(held.spec.dtype))
            lanes = held.lanes(host_bytes(low))
            # A value that the published dtype cannot hold would be rounded away by the cast and pass for the published one.
            yield name, lanes if torch.equal(low.to(part.dtype), part) else add(lanes, (1, 1))


def fused_parameters(model: torch.nn.Module, pack: Pack, names: Collection[str] = (), shuffle: Shuffle | None = None) -> list[Fused]:
    """Every parameter of a vLLM model with the checkpoint tensors in it, by the model's own table of what it fuses.

    `names` are those of the checkpoint, which tell how it calls the matrices of its experts.
    """
    fusing: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    holders: dict[int, list[torch.nn.Module]] = {}
    found: dict[int, tuple[str, dict[str, tuple[int, int]], torch.Tensor | None]] = {}
    for path, module in model.named_modules():
        for attribute, live in module.named_parameters(recurse=False):
            # Tied modules share one parameter, and the first path is the one that checkpoints name.
            holders.setdefault(id(live), []).append(module)
            if id(live) not in found:
                if attribute in _EXPERT_PARTS and live.dim() == 3:
                    parts, order = _expert_parts(path, attribute, live, names), shuffle and _order_of(module, live, shuffle)
                else:
                    parts, order = _parts(path, module, attribute, live, fusing), None
                found[id(live)] = attribute, parts, order
    return [Fused(holders[key], attribute, parts, pack, order) for key, (attribute, parts, order) in found.items()]


def _parts(path: str, module: Any, attribute: str, live: torch.Tensor, fusing: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, int]]:
    prefix, _, leaf = path.rpartition(".")
    names = [f"{prefix}.{part}.{attribute}" for part in fusing.get(leaf, (leaf,))]
    sizes = list(module.output_partition_sizes) if leaf in fusing else [_num_rows(module, live)]
    if len(sizes) != len(names):
        raise ValueError(f"{path} has {len(sizes)} parts in vLLM and {len(names)} in its table; this model is not supported")
    edges = np.cumsum([0, *sizes]).tolist()
    return {name.lstrip("."): (start, stop) for name, start, stop in zip(names, edges[:-1], edges[1:], strict=True)}


def _expert_parts(path: str, attribute: str, live: torch.Tensor, names: Collection[str]) -> dict[str, tuple[int, int]]:
    steps = path.split(".")
    prefix = ".".join(steps[: steps.index("experts") + 1])
    called = next((c for c in _EXPERT_NAMES if f"{prefix}.0.{c['down']}.weight" in names), _EXPERT_NAMES[0])
    inside = _EXPERT_PARTS[attribute]
    height = live.shape[1] // len(inside)
    order = [(expert, part) for expert in range(live.shape[0]) for part in inside]
    return {f"{prefix}.{x}.{called[part]}.weight": (at * height, (at + 1) * height) for at, (x, part) in enumerate(order)}


def _order_of(module: torch.nn.Module, live: torch.Tensor, shuffle: Shuffle) -> torch.Tensor | None:
    """Where vLLM's shuffle takes the elements of one expert, found out by shuffling their numbers, as many bits as fit at a time."""
    bits = 8 * live.dtype.itemsize
    words = {16: torch.int16, 32: torch.int32}[bits]
    index = torch.arange(live.shape[1] * live.shape[2])
    order = torch.zeros_like(index)
    for shift in range(0, 32, bits):
        told = shuffle(module, (index >> shift).to(words).view(live.dtype).view(1, *live.shape[1:]))
        if told is None:
            return None
        order |= (told.view(words).flatten().long() & ((1 << bits) - 1)) << shift
    if not torch.equal(order.sort().values, index):
        raise ValueError("vLLM changes the values of experts when it shuffles them; its layout on this CPU is not supported")
    return order


def differing(fused: Sequence[Fused], checkpoint: Callable[[str], torch.Tensor | None]) -> list[str]:
    """Names whose served values are not those of the checkpoint that vLLM loaded: for these the map would be a guess."""
    wrong = []
    for one in fused:
        served = one.served()
        for name, (start, stop) in one.parts.items():
            stored = checkpoint(name)
            part = served[start:stop]
            if stored is None or stored.shape != part.shape or not torch.equal(stored.to(one.dtype), part):
                wrong.append(name)
    return wrong


def put_back(fused: Sequence[Fused], checkpoint: Callable[[str], torch.Tensor | None]) -> None:
    """Serve the checkpoint again, after weights to start from could not be proved."""
    for one in fused:
        rows = one.served().clone()
        for name, (start, stop) in one.parts.items():
            stored = checkpoint(name)
            assert stored is not None, "the map was proved against this checkpoint"
            rows[start:stop] = stored
        one.serve(rows)


def _num_rows(module: Any, live: torch.Tensor) -> int:
    if (num_words := getattr(module, "org_vocab_size", None)) is not None:
        return int(num_words)
    return len(live) if live.numel() else int(sum(module.output_partition_sizes))


def _hides_weight(module: torch.nn.Module) -> bool:
    """Whether the multiply holds a packed copy: vLLM's plain fallback is a function of its arguments alone."""
    return getattr(getattr(module, "cpu_linear", None), "__closure__", None) is not None


def _read_back(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """The matrix inside a packed multiply, exactly: a row of the unit matrix picks one column, all other terms being zero."""
    num_inputs = next(getattr(module, name) for name in _WIDTHS if hasattr(module, name))
    columns = []
    for first in range(0, num_inputs, _PROBE_ROWS):
        unit = torch.zeros(min(_PROBE_ROWS, num_inputs - first), num_inputs, dtype=dtype)
        unit[torch.arange(len(unit)), torch.arange(first, first + len(unit))] = 1
        columns.append(module.cpu_linear(unit, module.weight, None))
    return torch.cat(columns).t().contiguous()


def _with_signed_zeros(told: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """A sum cannot tell -0.0 from 0.0, and neither can any forward: where both are zero the expected sign stands."""
    return torch.where((told == 0) & (expected == 0), expected, told)
