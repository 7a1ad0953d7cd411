#!/usr/bin/env python3
"""train_torch: Shoal's training compared with a plain PyTorch loop, alternately, round by round.

    train_torch.py SHOAL ROUNDS SHAPE "QUANT …" "TYPE …" [SAMPLES [TOKENS [RANK]]]

Both train a new LoRA adapter (all projections, AdamW, clipping by the global norm) of a llama of that shape with random
weights, on the same token ids, every token a target. Every measurement is a separate process, which warms up and
measures one step: so memory is that of one training run, and a busy machine slows all alike. Medians of the ratios of
each round are printed, and the instruction sets that PyTorch uses.

PyTorch runs in its usual configuration for a CPU: all threads, frozen weights in the given type (f32 or bf16) with
adapters of the same type, a loss over all logits at once. A type that takes more than twice as long as another for a
short sample is omitted, with a message.
"""
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time


def token(i, vocab):
    return (i * 7919 + 3) % vocab


def peak_bytes():
    with open("/proc/self/status") as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith("VmHWM"))


def torch_step(shape, kind, samples, tokens, rank):
    """{"tps", "VmHWM"} of a step after a warm-up step with a single sample."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_default_dtype({"f32": torch.float32, "bf16": torch.bfloat16}[kind])
    d, heads, kv = shape["d_model"], shape["heads"], shape["kv_heads"]
    e = d // heads

    def frozen(rows, cols):
        return nn.Parameter(torch.empty(rows, cols).normal_(0, 0.02), requires_grad=False)

    class Linear(nn.Module):
        def __init__(self, rows, cols):
            super().__init__()
            self.w = frozen(rows, cols)
            self.a = nn.Parameter(torch.empty(rank, cols).uniform_(-1, 1) / math.sqrt(cols))
            self.b = nn.Parameter(torch.zeros(rows, rank))

        def forward(self, x):
            return F.linear(x, self.w) + F.linear(F.linear(x, self.a), self.b) * 2.0

    def rms_norm(x):  # all norm weights are 1
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    angle = torch.outer(torch.arange(tokens, dtype=torch.float32),
                        10000.0 ** (-torch.arange(0, e, 2, dtype=torch.float32) / e)).repeat(1, 2)
    cos, sin = angle.cos().to(torch.get_default_dtype()), angle.sin().to(torch.get_default_dtype())
    future = torch.full((tokens, tokens), float("-inf")).triu(1)

    def apply_rope(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = Linear(heads * e, d), Linear(d, heads * e)
            self.k, self.v = Linear(kv * e, d), Linear(kv * e, d)
            self.gate, self.up = Linear(shape["d_ff"], d), Linear(shape["d_ff"], d)
            self.down = Linear(d, shape["d_ff"])

        def forward(self, x):
            n, t, _ = x.shape
            split = lambda y, count: y.view(n, t, count, e).transpose(1, 2)
            repeat_kv = lambda y: y.repeat_interleave(heads // kv, dim=1)
            h = rms_norm(x)
            q, k = apply_rope(split(self.q(h), heads)), repeat_kv(apply_rope(split(self.k(h), kv)))
            scores = q @ k.transpose(2, 3) / math.sqrt(e) + future
            p = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
            att = (p @ repeat_kv(split(self.v(h), kv))).transpose(1, 2)
            x = x + self.o(att.reshape(n, t, heads * e))
            h = rms_norm(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    embed, layers = frozen(shape["vocab"], d), [Layer() for _ in range(shape["layers"])]
    head = embed if shape["tied"] else frozen(shape["vocab"], d)
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0)
    ids = torch.tensor([[token(1 + i * 131 + j, shape["vocab"]) for j in range(tokens)]
                        for i in range(samples)])

    def step(ids):
        x = F.embedding(ids, embed)
        for layer in layers:
            x = layer(x)
        logits = F.linear(rms_norm(x), head)[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, shape["vocab"]).float(), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        assert math.isfinite(loss.item())

    step(ids[:1])
    start = time.perf_counter()
    step(ids)
    return {"tps": samples * tokens / (time.perf_counter() - start), "VmHWM": peak_bytes()}


def json_lines(*command):
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def shoal_step(shoal, shape, quant, samples, tokens, rank):
    """The same for Shoal, and the number of forward passes of the step."""
    lines = json_lines(shoal, "bench", "--json", "--quiet", "--what", "train", "--reps", "1",
                       "--shape", shape, "--type", quant, "--samples", str(samples),
                       "--tokens", str(tokens), "--rank", str(rank))
    step, forward, memory = lines
    return {"tps": step["tps"], "VmHWM": memory["VmHWM"], "forwards": forward["ratio"]}


def torch_run(shape, kind, size):
    return json_lines(sys.executable, __file__, "--one", json.dumps(shape), kind, *map(str, size))[0]


def torch_description():
    """PyTorch's version and the instruction sets of its kernels and of oneDNN, which prints its own with a product."""
    code = ("import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x; "
            "print('version', torch.__version__, torch.__config__.show())")
    out = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True,
                         env={**os.environ, "ONEDNN_VERBOSE": "1"}).stdout
    found = [re.search(pattern, out, re.M)
             for pattern in (r"^version (\S+)", r"CPU capability usage: (.*)", r"cpu,isa:(.*)")]
    return "PyTorch %s; its kernels use %s; oneDNN uses %s" % tuple(m[1] if m else "nothing known" for m in found)


def torch_types(shape, types, rank):
    """The types that are worth a full measurement: without a type's instructions a step takes minutes."""
    tps = {kind: torch_run(shape, kind, (1, 64, rank))["tps"] for kind in types}
    for kind in types:
        if tps[kind] < max(tps.values()) / 2:
            print("torch %s: %.1f tokens/s for 1 x 64 tokens, %.1f with another type; left out" % (
                kind, tps[kind], max(tps.values())))
    return [kind for kind in types if tps[kind] >= max(tps.values()) / 2]


def rounds_run(sides, rounds):
    """Name → measurements, alternately."""
    measurements = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            measurements[name].append(run())
    return measurements


def median(measurements, key):
    return statistics.median(x[key] for x in measurements)


def report(measurements):
    for side, v in measurements.items():
        print("%-11s %8.1f tokens/s  %6.0f MB  %d rounds" % (
            side, median(v, "tps"), 1e-6 * median(v, "VmHWM"), len(v)))
        if "forwards" in v[0]:
            print("%11s a step takes %.2f forward passes" % ("", median(v, "forwards")))
    for own in (side for side in measurements if side.startswith("shoal")):
        for peer in (side for side in measurements if side.startswith("torch")):
            speed = [a["tps"] / b["tps"] for a, b in zip(measurements[own], measurements[peer])]
            print("%s / %s: x %.2f the tokens a second, %.2f of the memory" % (
                own, peer, statistics.median(speed),
                median(measurements[own], "VmHWM") / median(measurements[peer], "VmHWM")))


def main(shoal, rounds, name, quants, types, samples="4", tokens="512", rank="8"):
    size = [int(samples), int(tokens), int(rank)]
    model = os.path.join("build", "peers", name + "-shape.gguf")
    if not os.path.exists(model):
        subprocess.run([shoal, "model", "new", "--quiet", "--shape", name, "--type", "q4_0",
                        model], check=True)
    shape = json_lines(shoal, "model", "info", model, "--json")[0]
    if shape["arch"] != "llama":
        sys.exit("train_torch: '%s' is no llama" % name)
    sides = {}
    for quant in quants.split():
        sides["shoal " + quant] = lambda quant=quant: shoal_step(shoal, name, quant, *size)
    print("%s, rank %d, %d x %d tokens; %s" % (name, size[2], size[0], size[1], torch_description()))
    for kind in torch_types(shape, types.split(), size[2]):
        sides["torch " + kind] = lambda kind=kind: torch_run(shape, kind, size)
    sys.stdout.flush()
    report(rounds_run(sides, int(rounds)))


if sys.argv[1] == "--one":
    print(json.dumps(torch_step(json.loads(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))))
else:
    main(*sys.argv[1:])
