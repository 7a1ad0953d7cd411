#!/usr/bin/env python3
"""train_oracle: an independent implementation of training in numpy and doubles.

    python3 test/oracle/train_oracle.py           writes test/golden/train/*.json
    python3 test/oracle/train_oracle.py --check   compares them with its results; ok/not ok lines

A golden file is one training run: of an adapter on, or of all weights of, a tiny model of test/golden/arch, whose
weights are a formula of their names (arch_oracle.py). Each update takes four samples, (4·update + 0 … 3) mod 8, as two
micro-batches of two.

    model      the file of test/golden/arch
    full       every weight is trained; else an adapter on all projections, A and B both non-zero
    adapter    [rank, alpha], and the flags rslora, dora
    options    as shoal's; warmup counts updates
    samples    [tokens, mask]: where the mask is 1, the token is predicted from those before it
    losses     of each update: the mean cross-entropy of its targets
    norms      of each update's gradient, before clipping
    gradients  of the first update, by the trainer's names: norm, then four entries, the first, the
               last and two between, of the mean over targets
    weights    norms after the last update

Derivatives come from the small tape below, which implements single array operations and no layers; a file is written
only if the tape agrees with central differences, and the model's results with those of test/golden/arch. It shares no
code with src/.
"""
import json
import math
import os
import sys

import numpy as np

sys.dont_write_bytecode = True  # write no bytecode into this folder
import arch_oracle
from arch_oracle import ALPHA, RANK, name_hash, weight

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "train")
SAMPLES, MICRO, PER_UPDATE = 8, 2, 4


# The tape: every operation on a tracked value is recorded with its backward function.

class Var:
    tape = []
    __array_ufunc__ = None  # makes numpy call Var's operator for `array + Var`

    def __init__(self, value, backward_fns=()):
        self.value, self.backward_fns, self.grad = value, backward_fns, None

    def __add__(self, other):
        return op(self.value + val(other), (self, lambda g: g), (other, lambda g: g))

    def __mul__(self, other):
        a, b = self.value, val(other)
        return op(a * b, (self, lambda g: g * b), (other, lambda g: g * a))

    def __matmul__(self, other):
        return matmul(self, other)

    def __rmatmul__(self, other):
        return matmul(other, self)

    def __pow__(self, n):
        a = self.value
        return op(a ** n, (self, lambda g: g * n * a ** (n - 1)))

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + -other

    def __truediv__(self, other):
        return self * other ** -1.0

    __radd__ = __add__
    __rmul__ = __mul__


def val(x):
    return x.value if isinstance(x, Var) else x


def op(value, *backward_fns):
    """The result of an operation, recorded if an input is tracked; else a plain array."""
    tracked = [(v, back) for v, back in backward_fns if isinstance(v, Var)]
    if not tracked:
        return value
    out = Var(value, tracked)
    Var.tape.append(out)
    return out


def unbroadcast(g, shape):
    g = g.sum(axis=tuple(range(g.ndim - len(shape))))
    wide = tuple(i for i, n in enumerate(shape) if n == 1 and g.shape[i] != 1)
    return g.sum(axis=wide, keepdims=True)


def matmul(a, b):
    x, y = val(a), val(b)
    return op(x @ y, (a, lambda g: g @ y.swapaxes(-1, -2)), (b, lambda g: x.swapaxes(-1, -2) @ g))


def exp(x):
    y = np.exp(val(x))
    return op(y, (x, lambda g: g * y))


def log(x):
    return op(np.log(val(x)), (x, lambda g: g / val(x)))


def tanh(x):
    y = np.tanh(val(x))
    return op(y, (x, lambda g: g * (1 - y * y)))


def total(x, axis):
    shape = val(x).shape
    return op(val(x).sum(axis=axis, keepdims=True), (x, lambda g: np.broadcast_to(g, shape)))


def reshape(x, *shape):
    before = val(x).shape
    return op(val(x).reshape(shape), (x, lambda g: g.reshape(before)))


def transpose(x, *axes):
    back = np.argsort(axes)
    return op(val(x).transpose(axes), (x, lambda g: g.transpose(back)))


def take(x, index):
    """x[index]; a row that is taken twice gets both gradients."""
    def back(g):
        out = np.zeros_like(val(x))
        np.add.at(out, index, g)
        return out
    return op(val(x)[index], (x, back))


def backward(loss):
    loss.grad = np.ones_like(loss.value)
    for v in reversed(Var.tape):
        if v.grad is None:
            continue
        for parent, back in v.backward_fns:
            g = unbroadcast(back(v.grad), parent.value.shape)
            parent.grad = g if parent.grad is None else parent.grad + g
    Var.tape.clear()


# The model, all positions of a sample at once.

class TrainedModel(arch_oracle.Model):
    """`params` has the trained weights, with the trainer's names; `tracked` has them as Vars on the tape."""

    def __init__(self, case, spec):
        super().__init__(case)
        self.full, self.dora = spec["full"], spec["dora"]
        self.scale = ALPHA / (math.sqrt(RANK) if spec["rslora"] else RANK)
        self.w = {name: np.array(v) for name, v in self.w.items()}
        self.params = self.w if self.full else {}
        self.dora_norms = {}
        for l in range(0 if self.full else len(self.layers)):
            for p in self.names:
                self.declare_lora(l, p)
        self.tracked = self.params

    def lora_name(self, l, p, what):
        return "0.layers.%d.%s.lora_%s" % (l, self.names[p], what)

    def declare_lora(self, l, p):
        peft = "base_model.model." + (self.path % l + self.names[p]).replace("language_model.", "")
        rows, cols = self.sizes[p]
        for what, shape, base in (("A.weight", (RANK, cols), 0.0), ("B.weight", (rows, RANK), 0.0),
                                  ("magnitude_vector", (rows,), 1.5))[:3 if self.dora else 2]:
            values = arch_oracle.tensor(peft + ".lora_" + what, shape, base, 0.25)
            self.params[self.lora_name(l, p, what)] = np.array(values)

    def get(self, name):
        return self.tracked.get(name, self.w.get(name))

    def norm(self, name, x):
        g, n = self.get(name + ".weight"), val(x).shape[-1]
        if self.neo:
            x = x - total(x, -1) * (1 / n)
        x = x * (total(x * x, -1) * (1 / n) + self.eps) ** -0.5
        if self.neo:
            return x * g + self.get(name + ".bias")
        return x * (g + 1.0 if self.gemma else g)

    def project(self, l, p, x):
        name = self.path % l + self.names[p]
        w, bias = self.get(name + ".weight"), self.get(name + ".bias")
        y = x @ transpose(w, 1, 0)
        if not self.full:
            a, b = (self.get(self.lora_name(l, p, k + ".weight")) for k in "AB")
            y = y + (x @ transpose(a, 1, 0)) @ transpose(b, 1, 0) * self.scale
            if self.dora:
                # as in PEFT, the norm of the rows is a constant in the gradient
                if name not in self.dora_norms:
                    merged = w + self.scale * val(b) @ val(a)
                    self.dora_norms[name] = np.sqrt((merged * merged).sum(axis=1))
                m = self.get(self.lora_name(l, p, "magnitude_vector"))
                y = y * (m * (1 / self.dora_norms[name]))
        return y if bias is None else y + bias

    def split(self, l, x, heads, which):
        """[T, heads·E] → [heads, T, E], normed and rotated."""
        t, half = val(x).shape[0], self.e // 2
        x = transpose(reshape(x, t, heads, self.e), 1, 0, 2)
        if self.qk_norm and which:
            x = self.norm(self.path % l + "self_attn.%s_norm" % which, x)
        if not self.layers[l][0] or not which:
            return x
        frequencies, gain = self.layers[l][0]
        angle = np.outer(np.arange(t), np.tile(frequencies, 2))
        quarter = np.zeros((self.e, self.e))  # (x1, x2) → (-x2, x1)
        quarter[half:, :half], quarter[:half, half:] = -np.eye(half), np.eye(half)
        return x * (gain * np.cos(angle)) + (x @ quarter) * (gain * np.sin(angle))

    def attention(self, l, h):
        window, group, t = self.layers[l][1], self.heads // self.kv, val(h).shape[0]
        q = self.split(l, self.project(l, "q", h), self.heads, "q")
        k = self.split(l, self.project(l, "k", h), self.kv, "k")
        v = self.split(l, self.project(l, "v", h), self.kv, "")
        q = reshape(q, self.kv, group, t, self.e)
        k, v = reshape(k, self.kv, 1, t, self.e), reshape(v, self.kv, 1, t, self.e)
        distance_back = np.arange(t)[:, None] - np.arange(t)[None, :]
        mask_visible = (distance_back >= 0) & ((distance_back < window) if window else True)
        e = exp((q @ transpose(k, 0, 1, 3, 2)) * self.scalar ** -0.5) * mask_visible
        out = reshape((e / total(e, -1)) @ v, self.heads, t, self.e)
        return self.project(l, "o", reshape(transpose(out, 1, 0, 2), t, self.heads * self.e))

    def act(self, x):
        if self.neo or self.gemma:
            return 0.5 * x * (tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)) + 1.0)
        return x * (exp(-x) + 1.0) ** -1.0

    def mlp(self, l, h):
        up = self.project(l, "up", h)
        up = self.act(up) if self.neo else self.act(self.project(l, "gate", h)) * up
        return self.project(l, "down", up)

    def layer(self, l, x):
        at, after = self.path % l, lambda name, h: h
        names = ("ln_1", "ln_2") if self.neo else ("input_layernorm", "post_attention_layernorm")
        if self.gemma:
            names = ("input_layernorm", "pre_feedforward_layernorm")
            after = lambda name, h: self.norm(at + name, h)
        x = x + after("post_attention_layernorm", self.attention(l, self.norm(at + names[0], x)))
        return x + after("post_feedforward_layernorm", self.mlp(l, self.norm(at + names[1], x)))

    def logits(self, tokens):
        embed = self.get("transformer.wte.weight" if self.neo
                         else self.prefix + ".embed_tokens.weight")
        x = take(embed, tokens)
        if self.gemma:
            x = x * math.sqrt(self.d)
        if self.neo:
            x = x + take(self.get("transformer.wpe.weight"), np.arange(len(tokens)))
        for l in range(len(self.layers)):
            x = self.layer(l, x)
        head = embed if self.tied else self.get("lm_head.weight")
        return self.norm(self.last_norm, x) @ transpose(head, 1, 0)

    def nll(self, tokens, mask):
        """The negative log-likelihood, summed over the targets."""
        at = np.flatnonzero(mask[1:])
        z = take(self.logits(tokens), at)
        z = z - val(z).max(axis=-1, keepdims=True)
        target_logits = take(z, (np.arange(len(at)), np.array(tokens)[at + 1]))
        return total(log(total(exp(z), -1)), (0, 1)) - reshape(total(target_logits, 0), 1, 1)

    def gradients(self, samples):
        """(mean loss, mean gradients) of one update."""
        self.tracked = {name: Var(v) for name, v in self.params.items()}
        self.dora_norms.clear()
        targets = sum(int(mask[1:].sum()) for _, mask in samples)
        loss = 0.0
        for tokens, mask in samples:
            nll = self.nll(tokens, mask)
            loss += nll.value.item()
            backward(nll)
        grads = {name: (np.zeros_like(v.value) if v.grad is None else v.grad) / targets
                 for name, v in self.tracked.items()}
        self.tracked = self.params
        return loss / targets, grads


# The update.

def learning_rate(o, step):
    if step < o["warmup"]:
        return o["lr"] * (step + 1) / o["warmup"]
    progress = (step - o["warmup"]) / (o["updates"] - o["warmup"])
    factor = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress}
    if o["lr_scheduler"] == "constant":
        return o["lr"]
    return o["lr"] * (o["min_lr_ratio"] + (1 - o["min_lr_ratio"]) * factor[o["lr_scheduler"]])


def decays(name, shape):
    """Matrices have weight decay; norms, biases, magnitudes and the embeddings of tokens and positions have none."""
    return len(shape) == 2 and not any(part in name for part in ("embed_tokens", "wte", "wpe"))


def norm(v):
    return math.sqrt(sum(float((x * x).sum()) for x in v))


class AdamW:
    def __init__(self, o):
        self.o, self.t, self.m, self.v = o, 0, {}, {}

    def step(self, params, grads, lr):
        o, size = self.o, norm(grads.values())
        self.t += 1
        clip = min(1, o["max_grad_norm"] / size)
        for name, w in params.items():
            g = grads[name] * clip
            m = self.m[name] = o["beta1"] * self.m.get(name, 0) + (1 - o["beta1"]) * g
            v = self.v[name] = o["beta2"] * self.v.get(name, 0) + (1 - o["beta2"]) * g * g
            m, v = m / (1 - o["beta1"] ** self.t), v / (1 - o["beta2"] ** self.t)
            if decays(name, w.shape):
                w *= 1 - lr * o["weight_decay"]
            w -= lr * m / (np.sqrt(v) + o["eps"])
        return size


# The cases, and checks of their correctness.

def spec(model, **k):
    options = {"updates": 50, "lr": 4e-3, "lr_scheduler": "cosine", "warmup": 5,
               "min_lr_ratio": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
               "weight_decay": 0.05, "max_grad_norm": 2.0}
    out = {"model": model, "full": False, "rslora": False, "dora": False}
    for key, value in k.items():
        (options if key in options else out)[key] = value
    return dict(out, options=options)


CASES = {
    "lora-llama": spec("llama-llama3"),
    "lora-llama-biased": spec("llama-biased", lr_scheduler="linear"),
    "lora-qwen2": spec("qwen2", beta2=0.95),
    "lora-qwen3": spec("qwen3"),
    "lora-gemma3": spec("gemma3", lr_scheduler="constant", lr=1e-3, eps=1e-6),
    "lora-gemma3-multimodal": spec("gemma3-multimodal"),
    "lora-gpt-neo": spec("gpt-neo", lr=2e-3, eps=1e-5),
    "rslora-llama": spec("llama-llama3", rslora=True),
    "dora-llama": spec("llama-llama3", dora=True, weight_decay=0.0),
    "full-llama": spec("llama-llama3", full=True, updates=10),
    "full-qwen3": spec("qwen3", full=True, updates=10),
    "full-gemma3": spec("gemma3", full=True, updates=10),
    "full-gpt-neo": spec("gpt-neo", full=True, updates=10),
}


def sample(name, i, vocab):
    h = name_hash("%s sample %d" % (name, i))
    draw = lambda at, n: int((weight(h, at) + 1) / 2 * n)
    n = 8 + draw(0, 33)
    mask = [draw(100 + j, 5) > 1 for j in range(n)]
    return [draw(1 + j, vocab) for j in range(n)], np.array(mask)


def check_against_arch_oracle(net, s):
    """Asserts that the model has the results of arch_oracle."""
    if s["rslora"] or s["dora"]:
        return
    with open(os.path.join(arch_oracle.FOLDER, s["model"] + ".json")) as f:
        g = json.load(f)
    off = net.logits(g["tokens"])[g["rows"]] - g["logits" if s["full"] else "adapted"]
    assert abs(off).max() < 1e-6, "logits differ by %g" % abs(off).max()


def check_against_finite_differences(net, one, grads):
    """Asserts for each tensor that the gradient along one direction equals the central difference."""
    targets, h = one[1][1:].sum(), 1e-5
    for name, w in net.params.items():
        d = np.reshape([weight(name_hash(name + "?"), i) for i in range(w.size)], w.shape)
        losses_at = []
        for offset in (h, -h):
            w += offset * d
            losses_at.append(net.nll(*one).item() / targets)
            w -= offset * d
        slope, gradient = (losses_at[0] - losses_at[1]) / (2 * h), float((grads[name] * d).sum())
        assert abs(slope - gradient) < 1e-6 * (1 + norm([grads[name]]) * norm([d])), \
            "%s: slope %g, gradient %g" % (name, slope, gradient)


def rounded(x):
    return [rounded(a) for a in x] if isinstance(x, (list, tuple)) else float("%.8g" % x)


def entries(g):
    g = g.ravel()
    return [norm([g])] + [g[i * (g.size - 1) // 3] for i in range(4)]


def golden(name):
    s = CASES[name]
    case = arch_oracle.CASES[s["model"]]()
    net = TrainedModel(case, s)
    samples = [sample(name, i, case["v"]) for i in range(SAMPLES)]
    check_against_arch_oracle(net, s)
    check_against_finite_differences(net, samples[0], net.gradients(samples[:1])[1])
    out = {"losses": [], "norms": []}
    adamw = AdamW(s["options"])
    for step in range(s["options"]["updates"]):
        batch = [samples[(PER_UPDATE * step + j) % SAMPLES] for j in range(PER_UPDATE)]
        loss, grads = net.gradients(batch)
        if step == 0:
            out["gradients"] = {k: rounded(entries(g)) for k, g in grads.items()}
        size = adamw.step(net.params, grads, learning_rate(s["options"], step))
        out["norms"].append(rounded(size))
        out["losses"].append(rounded(loss))
    out["weights"] = {k: rounded(norm([w])) for k, w in net.params.items()}
    return dict(s, adapter=[RANK, ALPHA], micro_batch=MICRO,
                samples=[[t, [int(b) for b in m]] for t, m in samples], **out)


def distance(a, b):
    """The largest relative difference of two nested values; infinite if their shapes differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return math.inf if a.keys() != b.keys() else max(distance(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max([distance(x, y) for x, y in zip(a, b)], default=0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) / (1e-3 + max(abs(a), abs(b)))
    return 0 if a == b else math.inf


def golden_text(g):
    lines = []
    for k, v in g.items():
        if k in ("gradients", "weights"):
            v = "{\n%s\n}" % ",\n".join("  %s: %s" % (json.dumps(n), json.dumps(x))
                                       for n, x in v.items())
        else:
            v = json.dumps(v)
        lines.append('"%s": %s' % (k, v))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def check(name):
    with open(os.path.join(FOLDER, name + ".json")) as f:
        have = json.load(f)
    try:
        want = json.loads(json.dumps(golden(name)))
    except AssertionError as e:
        return str(e)
    for key in want:
        off = distance(have.get(key), want[key])
        if not off < 1e-6:
            return "'%s' differs by %g" % (key, off)
    return None


def main():
    failed = False
    for name in CASES:
        if sys.argv[1:] == ["--check"]:
            why = check(name)
            failed |= why is not None
            print("not ok oracle %s: %s" % (name, why) if why else "ok oracle " + name)
        else:
            with open(os.path.join(FOLDER, name + ".json"), "w") as f:
                f.write(golden_text(golden(name)))
    sys.exit(failed)


if __name__ == "__main__":
    main()
