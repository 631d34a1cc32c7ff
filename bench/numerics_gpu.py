"""What bit-exactness costs on a GPU: a decoder's step from the exact operations beside the best that may give a row other bits.

`python bench/numerics_gpu.py OUT_DIR` writes numerics_gpu.json (rows of name, peer, value, unit, ratio) and prints a table. Three variants
of one decoder, same run, same weights, CUDA graphs: `exact`; `mixed`, which keeps our norms, activations, scores and picks but multiplies
through torch's default path (cuBLAS, free to split sums) and attends through the faster of torch's fused kernels over dense keys; and
`torch`, all of it from torch. A ratio is a variant's time over the faster of the last two. Weights are random, layers few: times of whole
models are (step - ends) / layers run * layers of the model + ends, `ends` being the embedding, last norm, head, score and pick alone.
Shapes: T tokens, B sequences, D hidden, H and K query and key/value heads, E head size, F inner size, X experts, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollmill.ops.base import PAGE, Spans
from rollmill.ops.cuda import CudaOps, attention

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16
EPS = 1e-6
BANDWIDTH = 4.0e12
"""Bytes a second of the floor; a pure read reaches 4.2 to 4.3e12 on an H200."""
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


class Shape(NamedTuple):
    name: str
    layers: int
    all_layers: int
    d: int
    h: int
    k: int
    f: int
    x: int = 0
    top: int = 0
    e: int = 128
    v: int = 151_936


SHAPES = [
    Shape("Qwen3-1.7B", 6, 28, 2048, 16, 8, 6144),
    Shape("Qwen3-8B", 4, 36, 4096, 32, 8, 12288),
    Shape("Qwen3-30B-A3B", 2, 48, 2048, 32, 4, 768, x=128, top=8),
]


class Layer:
    def __init__(self, s: Shape) -> None:
        self.norm, self.norm2 = ones(s.d), ones(s.d)
        self.q_norm, self.k_norm = ones(s.e), ones(s.e)
        self.qkv, self.o = weight((s.h + 2 * s.k) * s.e, s.d), weight(s.d, s.h * s.e)
        if s.x:
            self.router, self.gate_up, self.down = weight(s.x, s.d), weight(s.x, 2 * s.f, s.d), weight(s.x, s.d, s.f)
        else:
            self.gate_up, self.down = weight(2 * s.f, s.d), weight(s.d, s.f)

    def weight_bytes(self, s: Shape, rows: int) -> float:
        """Read once a step; of experts those that `rows` tokens are expected to touch."""
        share = 1 - (1 - s.top / s.x) ** rows if s.x else 1.0
        return 2 * (self.qkv.numel() + self.o.numel() + share * (self.gate_up.numel() + self.down.numel()))


def ones(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=BF16, device=DEVICE)


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, device=DEVICE) * shape[-1] ** -0.5


class Exact:
    """Every operation from the exact profile."""

    name = "exact"

    def __init__(self) -> None:
        self.ops = CudaOps(DEVICE)

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, w)

    def head(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.ops.linear_fp32(x, w)

    def norm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, w, EPS)

    def add_norm(self, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.add_rms_norm(x, r, w, EPS)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.ops.rotate(x, cos, sin)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.swiglu(x)

    def sample(self, logits: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.ops.pick(logits, u)
        return ids, self.ops.score(logits, ids)[0]

    def score(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.ops.score(logits, ids)[0]

    def experts(self, h: torch.Tensor, layer: Layer, s: Shape) -> torch.Tensor:
        scores = self.head(h, layer.router).softmax(-1)
        ids = self.ops.top_ids(scores, s.top)
        gates = scores.gather(1, ids)
        return self.ops.experts(h, ids, gates / gates.sum(-1, keepdim=True), layer.gate_up, layer.down)


class Mixed(Exact):
    """Our row kernels around torch's default products."""

    name = "mixed"

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w)

    def head(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w.t(), out_dtype=torch.float32)

    def experts(self, h: torch.Tensor, layer: Layer, s: Shape) -> torch.Tensor:
        gates, ids = self.head(h, layer.router).softmax(-1).topk(s.top, -1)
        order = ids.flatten().argsort()
        ends = torch.searchsorted(ids.flatten()[order], torch.arange(s.x, device=DEVICE), right=True).int()
        up = self.swiglu(torch._grouped_mm(h[order // s.top], layer.gate_up.transpose(1, 2), offs=ends))
        y = torch._grouped_mm(up, layer.down.transpose(1, 2), offs=ends)
        weights = (gates / gates.sum(-1, keepdim=True)).flatten()[order]
        return torch.zeros_like(h).index_add_(0, order // s.top, (y * weights[:, None]).to(BF16))


class Torch(Mixed):
    """Everything from torch."""

    name = "torch"

    def norm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, w.shape, w, EPS)

    def add_norm(self, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + r
        return self.norm(x, w), x

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos.to(BF16) + torch.cat([-right, left], -1) * sin.to(BF16)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def sample(self, logits: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = logits.log_softmax(-1)
        ids = (logprobs.exp() / torch.empty_like(logprobs).exponential_()).argmax(-1)
        return ids, logprobs.gather(1, ids[:, None])[:, 0]

    def score(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Decoder:
    def __init__(self, s: Shape) -> None:
        torch.manual_seed(0)
        self.s, self.layers = s, [Layer(s) for _ in range(s.layers)]
        self.embed, self.last = torch.randn(s.v, s.d, dtype=BF16, device=DEVICE), ones(s.d)
        self.lm_head = weight(s.v, s.d) * 3
        angle = torch.arange(32768, device=DEVICE)[:, None] * 1e6 ** (-torch.arange(0, s.e, 2, device=DEVICE) / s.e)
        both = torch.cat([angle, angle], -1)[:, None]
        self.cos, self.sin = both.cos(), both.sin()

    def forward(self, by: Exact, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, layers: int = 99) -> torch.Tensor:
        s = self.s
        x = F.embedding(tokens, self.embed)
        cos, sin = self.cos[positions], self.sin[positions]
        h = by.norm(x, self.last)
        for at, layer in enumerate(self.layers[:layers]):
            h, x = (by.norm(x, layer.norm), x) if at == 0 else by.add_norm(h, x, layer.norm)
            q, k, v = by.linear(h, layer.qkv).view(-1, s.h + 2 * s.k, s.e).split([s.h, s.k, s.k], 1)
            q, k = by.rotate(by.norm(q, layer.q_norm), cos, sin), by.rotate(by.norm(k, layer.k_norm), cos, sin)
            h, x = by.add_norm(by.linear(attend(at, q, k, v).reshape(-1, s.h * s.e), layer.o), x, layer.norm2)
            h = by.experts(h, layer, s) if s.x else by.linear(by.swiglu(by.linear(h, layer.gate_up)), layer.down)
        return by.add_norm(h, x, self.last)[0]


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A step as a graph, run three times before: kernels are compiled and proven, libraries have chosen."""
    torch.cuda.synchronize()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 15) -> dict[str, float]:
    """Median microseconds of each. They take turns, so that a chip that slows down as it warms slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds + 3):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: sorted(found[3:])[rounds // 2] for name, found in times.items()}


def best_of(run: Callable[[SDPBackend], Callable[[], Any]]) -> SDPBackend:
    """The faster fused kernel; one that refuses the shape is out."""
    times = {}
    for backend in BACKENDS:
        try:
            with sdpa_kernel(backend):
                times[backend] = in_turns({"": captured(run(backend))}, 5)[""]
        except RuntimeError as error:
            print(f"  {backend}: {str(error).splitlines()[0][:90]}", file=sys.stderr)
    return min(times, key=lambda b: times[b])


Rows = list[dict[str, Any]]


def decode(world: Decoder, batch: int, context: int, rows: Rows) -> None:
    s = world.s
    tokens = torch.randint(s.v, (batch,), device=DEVICE)
    positions = torch.full((batch,), context - 1, device=DEVICE)
    uniform = torch.rand(batch, dtype=torch.float64, device=DEVICE)
    width = -(-context // PAGE)
    table = torch.randperm(batch * width).view(batch, width).tolist()
    spans = Spans.of(new=[1] * batch, before=[context - 1] * batch, pages=table, device=DEVICE)
    exact, mixed, plain = Exact(), Mixed(), Torch()
    pages = exact.ops.new_pages(batch * width, num_layers=s.layers, num_kv_heads=s.k, head_dim=s.e, dtype=BF16)
    pages.memory_L2PKSE.normal_()
    # The same bytes seen as dense keys and values: every sequence owns as many positions as it has keys.
    dense = pages.memory_L2PKSE.view(s.layers, 2, batch, s.k, width * PAGE, s.e)[..., :context, :]

    def paged(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages.write(layer, k, v, spans)
        return pages.attend(layer, q, spans)

    def fused(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages.write(layer, k, v, spans)
        return F.scaled_dot_product_attention(q[:, :, None], dense[layer, 0], dense[layer, 1], enable_gqa=True)[:, :, 0]

    q = torch.randn(batch, s.h, s.e, dtype=BF16, device=DEVICE)
    kv = torch.randn(batch, s.k, s.e, dtype=BF16, device=DEVICE)
    backend = best_of(lambda _: lambda: [fused(at, q, kv, kv) for at in range(s.layers)])
    graphs = {}
    for by, attend in ((exact, paged), (mixed, fused), (plain, fused)):

        def step(layers: int, by: Exact = by, attend: Attend = attend) -> None:
            by.sample(by.head(world.forward(by, tokens, positions, attend, layers), world.lm_head), uniform)

        with sdpa_kernel(backend):
            graphs[by.name], graphs[f"{by.name} ends"] = captured(lambda: step(s.layers)), captured(lambda: step(0))
            graphs[f"{by.name} attention"] = captured(lambda: [attend(at, q, kv, kv) for at in range(s.layers)])  # noqa: B023
    times = in_turns(graphs)
    read = sum(layer.weight_bytes(s, batch) for layer in world.layers) + 4.0 * batch * context * s.k * s.e * s.layers
    floors = (read + 2.0 * s.v * s.d) / BANDWIDTH * 1e6, 2.0 * s.v * s.d / BANDWIDTH * 1e6
    report(rows, f"decode {s.name} batch {batch} context {context}", times, s, floors)
    for name in ("exact", "mixed"):
        us, peer = times[f"{name} attention"] / s.layers, times["mixed attention"] / s.layers
        rows.append(row(f"attention {s.name} batch {batch} context {context}", name, us, "us", peer))


def report(rows: Rows, name: str, times: dict[str, float], s: Shape, floors: tuple[float, float] | None) -> None:
    def whole(step: float, ends: float) -> float:
        return (step - ends) / s.layers * s.all_layers + ends

    model = {variant: whole(times[variant], times[f"{variant} ends"]) for variant in ("exact", "mixed", "torch")}
    peer = min(model["mixed"], model["torch"])
    for variant, us in model.items():
        rows.append(row(name, variant, us, "us", peer))
        rows[-1] |= {"step_us": round(times[variant], 1), "ends_us": round(times[f"{variant} ends"], 1), "layers": s.layers}
        if floors:
            rows[-1]["of_floor"] = round(whole(*floors) / us, 3)
    columns = "".join(f" {variant} {us:9.0f} us" for variant, us in model.items())
    beside = f"attention {100 * (times['exact attention'] / times['mixed attention'] - 1):+5.1f} %"
    print(f"{name:46s}{columns}  tax {100 * (model['exact'] / peer - 1):+5.1f} %  {beside}", flush=True)


def row(name: str, peer: str, value: float, unit: str, against: float) -> dict[str, Any]:
    return {"name": name, "peer": peer, "value": round(value, 2), "unit": unit, "ratio": round(value / against, 4)}


def forward(world: Decoder, lens: list[int], rows: Rows) -> None:
    """A trainer's forward: packed sequences, log-probabilities of all tokens."""
    s, total = world.s, sum(lens)
    tokens, targets = torch.randint(s.v, (2, total), device=DEVICE)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lens])
    exact, mixed, plain = Exact(), Mixed(), Torch()
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    lens_B = torch.tensor(lens, dtype=torch.int32, device=DEVICE)

    def packed(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Below `CudaOps.attend_packed`, whose lengths come from the host and cannot be captured.
        return attention.attend_packed(q, k.contiguous(), v.contiguous(), starts, lens_B, max(lens))

    def fused(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(len(lens), lens[0], -1, s.e).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    q = torch.randn(total, s.h, s.e, dtype=BF16, device=DEVICE)
    kv = torch.randn(total, s.k, s.e, dtype=BF16, device=DEVICE)
    backend = best_of(lambda _: lambda: fused(0, q, kv, kv))
    graphs = {}
    for by, attend in ((exact, packed), (mixed, fused), (plain, fused)):

        def step(layers: int, by: Exact = by, attend: Attend = attend) -> None:
            hidden = world.forward(by, tokens, positions, attend, layers)
            for h, t in zip(hidden.split(4096), targets.split(4096), strict=True):
                by.score(by.head(h, world.lm_head), t)

        with sdpa_kernel(backend):
            graphs[by.name], graphs[f"{by.name} ends"] = captured(lambda: step(s.layers)), captured(lambda: step(0))
            graphs[f"{by.name} attention"] = captured(lambda: attend(0, q, kv, kv))  # noqa: B023
    times = in_turns(graphs, 9)
    report(rows, f"forward {s.name} {len(lens)} x {lens[0]} tokens", times, s, None)
    rate = {name: sum(2 * s.h * s.e * n * n for n in lens) / times[f"{name} attention"] / 1e6 for name in ("exact", "mixed")}
    for name, value in rate.items():
        rows.append(row(f"attention forward {s.name} {len(lens)} x {lens[0]}", name, value, "TFLOP/s", rate["mixed"]))


@torch.no_grad()
def mismatch(world: Decoder, batch: int, steps: int, rows: Rows) -> None:
    """Tokens sampled one by one in a captured step, then scored again as packed sequences: log-probabilities that differ in any bit."""
    s, by = world.s, Exact()
    width = -(-steps // PAGE)
    table = torch.randperm(batch * width).view(batch, width)
    pages = by.ops.new_pages(batch * width, num_layers=s.layers, num_kv_heads=s.k, head_dim=s.e, dtype=BF16)
    live = Spans.of(new=[1] * batch, before=[0] * batch, pages=table.tolist(), device=DEVICE)
    spans = replace(live, longest=steps)
    tokens_BN = torch.zeros(batch, steps + 1, dtype=torch.int64, device=DEVICE)
    tokens_BN[:, 0] = torch.arange(batch, device=DEVICE)
    logprobs_BN = torch.zeros(batch, steps, device=DEVICE)
    position = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    uniform_NB = torch.rand(steps, batch, dtype=torch.float64, device=DEVICE)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages.write(layer, k, v, spans)
        return pages.attend(layer, q, spans)

    def step() -> None:
        spans.lens_B.copy_((position + 1).expand(batch))
        spans.slots_T.copy_(spans.table_BP.index_select(1, position // PAGE)[:, 0].long() * PAGE + position % PAGE)
        hidden = world.forward(by, tokens_BN.index_select(1, position)[:, 0], position.expand(batch), attend)
        ids, logprobs = by.sample(by.head(hidden, world.lm_head), uniform_NB.index_select(0, position)[0])
        tokens_BN.index_copy_(1, position + 1, ids[:, None])
        logprobs_BN.index_copy_(1, position, logprobs[:, None])
        position.add_(1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps - 1):
        graph.replay()
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began
    per, bad, largest = max(1, 16384 // steps), 0, 0.0
    for first in range(0, batch, per):
        part = tokens_BN[first : first + per]
        lens = [steps] * len(part)
        positions = torch.arange(steps, device=DEVICE).repeat(len(part))
        hidden = world.forward(by, part[:, :-1].reshape(-1), positions, lambda _, q, k, v: by.ops.attend_packed(q, k, v, lens))  # noqa: B023
        ids = part[:, 1:].reshape(-1)
        again = torch.cat([by.score(by.head(h, world.lm_head), t) for h, t in zip(hidden.split(4096), ids.split(4096), strict=True)])
        sampled = logprobs_BN[first : first + per].reshape(-1)
        bad += int((again.view(torch.int32) != sampled.view(torch.int32)).sum())
        largest = max(largest, float((again - sampled).abs().max()))
    name = f"mismatch {s.name} {s.layers} layers, {batch} x {steps} tokens sampled and scored again"
    rows.append({"name": name, "peer": "exact", "value": bad, "unit": "tokens", "ratio": bad / (batch * steps), "largest": largest})
    mean = float(logprobs_BN.mean())
    print(f"{name}: {bad} differ (largest {largest:.2e}, mean logprob {mean:.2f}); {batch * steps / took_s:,.0f} tokens/s", flush=True)


def main() -> None:
    out, quick = Path(sys.argv[1]), "quick" in sys.argv
    rows: Rows = []
    torch.backends.cuda.matmul.allow_tf32 = False
    for shape in SHAPES:
        world = Decoder(shape)
        with torch.no_grad():
            for batch in (8, 32) if quick else (1, 8, 32, 128, 256):
                decode(world, batch, 2048, rows)
            for lens in ([4096], [1024] * 4) if quick else ([4096], [1024] * 4, [8192]):
                forward(world, lens, rows)
        mismatch(world, 64 if quick else 256, 600 if quick or shape.x else 4000, rows)
        del world
        torch.cuda.empty_cache()
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        (out / "numerics_gpu.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
