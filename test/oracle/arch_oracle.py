#!/usr/bin/env python3
"""arch_oracle: an independent implementation of each architecture in plain Python and doubles.

    python3 test/oracle/arch_oracle.py           writes test/golden/arch/*.json
    python3 test/oracle/arch_oracle.py --check   compares them with its results; ok/not ok lines

A golden file is a tiny model: its config.json, its tensors with their GGUF names, and its results. The weights are a
formula of the tensor's name, so that no weights are stored: see `weight` below, which test/model/test_arch.c repeats
bit for bit.

    config    config.json as Hugging Face writes it, by hand
    tensors   [name, shape, base, scale, gguf name or null]
    tokens    the input; positions begin at 0
    rows      the positions with results
    hidden    [layer][row][width]: the final norm of the residual stream after that layer
    logits    [row][vocabulary]
    adapter   [rank, alpha]; its tensors have PEFT's names and `weight`s of scale 0.25
    adapted   logits with the adapter, which adapts every projection
    gguf_keys required keys of the GGUF file other than sizes

It follows the papers and the model classes' public descriptions, and shares no code with src/. It uses the standard
library only, and takes about ten seconds.
"""
import json
import math
import os
import sys
from operator import mul

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "arch")
N_TOKENS = 40
ROWS = [0, 6, 7, 8, 9, 21, 38, 39]
RANK, ALPHA = 3, 6.0


def name_hash(name):
    h = 2166136261  # FNV-1a
    for byte in name.encode():
        h = ((h ^ byte) * 16777619) & 0xFFFFFFFF
    return h


def weight(h, i):
    """The i-th number of the tensor whose name hashes to h: a multiple of 2^-15 in [-1, 1)."""
    x = (h + i * 0x9E3779B9) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    x ^= x >> 16
    return ((x >> 16) - 32768) / 32768


def tensor(name, shape, base=0.0, scale=0.5):
    h = name_hash(name)
    n = shape[-1]
    rows = [[base + scale * weight(h, r * n + i) for i in range(n)]
            for r in range(shape[0] if len(shape) == 2 else 1)]
    return rows if len(shape) == 2 else rows[0]


def dot(a, b):
    return sum(map(mul, a, b))


def linear(w, x, bias=None):
    y = [dot(row, x) for row in w]
    return [a + b for a, b in zip(y, bias)] if bias else y


def rms_norm(x, weights, eps):
    r = 1 / math.sqrt(dot(x, x) / len(x) + eps)
    return [a * r * w for a, w in zip(x, weights)]


def layer_norm(x, weights, bias, eps):
    mean = sum(x) / len(x)
    c = [a - mean for a in x]
    r = 1 / math.sqrt(dot(c, c) / len(x) + eps)
    return [a * r * w + b for a, w, b in zip(c, weights, bias)]


def silu(x):
    return x / (1 + math.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def softmax(scores):
    top = max(scores)
    e = [math.exp(s - top) for s in scores]
    total = sum(e)
    return [a / total for a in e]


# Rotary positions: inverse frequencies, and the factor of cosine and sine.

def rope_default(dim, theta):
    return [theta ** (-2 * i / dim) for i in range(dim // 2)], 1.0


def rope_linear(dim, theta, factor):
    return [f / factor for f in rope_default(dim, theta)[0]], 1.0


def rope_llama3(dim, theta, factor, low, high, original):
    out = []
    for f in rope_default(dim, theta)[0]:
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            out.append(f)
        elif wavelength > original / low:
            out.append(f / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * f / factor + smooth * f)
    return out, 1.0


def rope_yarn(dim, theta, factor, original, beta_fast=32, beta_slow=1):
    def correction_dim(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
    low = max(math.floor(correction_dim(beta_fast)), 0)
    high = min(math.ceil(correction_dim(beta_slow)), dim - 1)
    out = []
    for i, f in enumerate(rope_default(dim, theta)[0]):
        ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
        out.append(f / factor * ramp + f * (1 - ramp))
    return out, 0.1 * math.log(factor) + 1


def rotate(x, pos, rope):
    frequencies, gain = rope
    half = len(x) // 2
    out = list(x)
    for i, f in enumerate(frequencies):
        c, s = gain * math.cos(pos * f), gain * math.sin(pos * f)
        out[i] = x[i] * c - x[half + i] * s
        out[half + i] = x[half + i] * c + x[i] * s
    return out


class Model:
    """A decoder whose variants are attributes; `layers` is a list of (rope, window) pairs."""

    def __init__(self, case):
        self.__dict__.update(case)
        self.w = {}
        self.tensors = []
        self.path = self.prefix + ".layers.%d." if not self.neo else "transformer.h.%d."
        if self.neo:
            self.names = {"q": "attn.attention.q_proj", "k": "attn.attention.k_proj",
                          "v": "attn.attention.v_proj", "o": "attn.attention.out_proj",
                          "up": "mlp.c_fc", "down": "mlp.c_proj"}
        else:
            self.names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj",
                          "v": "self_attn.v_proj", "o": "self_attn.o_proj",
                          "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
        hd, kd = self.heads * self.e, self.kv * self.e
        self.sizes = {"q": (hd, self.d), "k": (kd, self.d), "v": (kd, self.d), "o": (self.d, hd),
                      "gate": (self.f, self.d), "up": (self.f, self.d), "down": (self.d, self.f)}
        self.declare_tensors()

    def add(self, name, shape, gguf, base=0.0, scale=0.5):
        self.w[name] = tensor(name, shape, base, scale)
        self.tensors.append([name, list(shape), base, scale, None if self.neo else gguf])

    def add_norm(self, name, width, gguf):
        base = 0.0 if self.gemma else 1.0
        self.add(name, (width,), gguf, base)
        if self.neo:
            self.add(name[:-len("weight")] + "bias", (width,), None)

    def declare_tensors(self):
        gguf = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
                "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
        if self.neo:
            self.add("transformer.wte.weight", (self.v, self.d), None, scale=1.0)
            self.add("transformer.wpe.weight", (self.config["max_position_embeddings"], self.d),
                     None, scale=1.0)
        else:
            self.add(self.prefix + ".embed_tokens.weight", (self.v, self.d), "token_embd.weight",
                     scale=1.0)
        for l in range(len(self.layers)):
            at, blk = self.path % l, "blk.%d." % l
            for p, name in self.names.items():
                self.add(at + name + ".weight", self.sizes[p], blk + gguf[p] + ".weight")
                if p in self.biased:
                    self.add(at + name + ".bias", (self.sizes[p][0],), blk + gguf[p] + ".bias")
            if self.neo:
                norms = [("ln_1", None), ("ln_2", None)]
            elif self.gemma:
                norms = [("input_layernorm", "attn_norm"),
                         ("post_attention_layernorm", "post_attention_norm"),
                         ("pre_feedforward_layernorm", "ffn_norm"),
                         ("post_feedforward_layernorm", "post_ffw_norm")]
            else:
                norms = [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")]
            for name, g in norms:
                self.add_norm(at + name + ".weight", self.d, "%s%s.weight" % (blk, g))
            if self.qk_norm:
                for p in "qk":
                    self.add_norm(at + "self_attn.%s_norm.weight" % p, self.e,
                                  "%sattn_%s_norm.weight" % (blk, p))
        last = "transformer.ln_f" if self.neo else self.prefix + ".norm"
        self.add_norm(last + ".weight", self.d, "output_norm.weight")
        if not self.tied:
            self.add("lm_head.weight", (self.v, self.d), "output.weight")
        self.embed = self.w["transformer.wte.weight" if self.neo
                            else self.prefix + ".embed_tokens.weight"]
        self.head = self.embed if self.tied else self.w["lm_head.weight"]
        self.last_norm = last

    def norm(self, name, x):
        g = self.w[name + ".weight"]
        if self.neo:
            return layer_norm(x, g, self.w[name + ".bias"], self.eps)
        return rms_norm(x, [1 + a for a in g] if self.gemma else g, self.eps)

    def project(self, l, p, x):
        name = self.path % l + self.names[p]
        y = linear(self.w[name + ".weight"], x, self.w.get(name + ".bias"))
        if self.adapter:
            # PEFT names follow the text model, even if a multimodal file has other tensor names
            peft = "base_model.model." + name.replace("language_model.", "")
            a = tensor(peft + ".lora_A.weight", (RANK, len(x)), 0.0, 0.25)
            b = tensor(peft + ".lora_B.weight", (len(y), RANK), 0.0, 0.25)
            y = [u + ALPHA / RANK * v for u, v in zip(y, linear(b, linear(a, x)))]
        return y

    def attention(self, l, q, keys, values, pos):
        window = self.layers[l][1]
        first = max(0, pos + 1 - window) if window else 0
        out = []
        for h in range(self.heads):
            g = h // (self.heads // self.kv)
            own = slice(h * self.e, (h + 1) * self.e)
            shared = slice(g * self.e, (g + 1) * self.e)
            p = softmax([dot(q[own], k[shared]) / math.sqrt(self.scalar)
                         for k in keys[first:pos + 1]])
            for i in range(self.e):
                out.append(sum(a * v[shared][i] for a, v in zip(p, values[first:pos + 1])))
        return out

    def norm_and_rotate_heads(self, l, x, which, pos):
        out = []
        for i in range(0, len(x), self.e):
            head = x[i:i + self.e]
            if self.qk_norm:
                head = self.norm(self.path % l + "self_attn.%s_norm" % which, head)
            out += rotate(head, pos, self.layers[l][0]) if self.layers[l][0] else head
        return out

    def mlp(self, l, x):
        up = self.project(l, "up", x)
        if self.neo:
            return self.project(l, "down", [gelu(a) for a in up])
        act = gelu if self.gemma else silu
        gate = self.project(l, "gate", x)
        return self.project(l, "down", [act(a) * b for a, b in zip(gate, up)])

    def layer(self, l, x, cache, pos):
        at = self.path % l
        before = at + ("ln_1" if self.neo else "input_layernorm")
        h = self.norm(before, x)
        q = self.norm_and_rotate_heads(l, self.project(l, "q", h), "q", pos)
        cache[l][0].append(self.norm_and_rotate_heads(l, self.project(l, "k", h), "k", pos))
        cache[l][1].append(self.project(l, "v", h))
        h = self.project(l, "o", self.attention(l, q, cache[l][0], cache[l][1], pos))
        if self.gemma:
            h = self.norm(at + "post_attention_layernorm", h)
        x = [a + b for a, b in zip(x, h)]
        middle = "ln_2" if self.neo else ("pre_feedforward_layernorm" if self.gemma
                                          else "post_attention_layernorm")
        h = self.mlp(l, self.norm(at + middle, x))
        if self.gemma:
            h = self.norm(at + "post_feedforward_layernorm", h)
        return [a + b for a, b in zip(x, h)]

    def run(self, tokens, adapter):
        self.adapter = adapter
        cache = [([], []) for _ in self.layers]
        hidden = [[] for _ in self.layers]
        logits = []
        for pos, token in enumerate(tokens):
            x = list(self.embed[token])
            if self.gemma:
                x = [a * math.sqrt(self.d) for a in x]
            if self.neo:
                x = [a + b for a, b in zip(x, self.w["transformer.wpe.weight"][pos])]
            for l in range(len(self.layers)):
                x = self.layer(l, x, cache, pos)
                if pos in ROWS:
                    hidden[l].append(self.norm(self.last_norm, x))
            if pos in ROWS:
                logits.append(linear(self.head, hidden[-1][-1]))
        return hidden, logits


def base_config(case, kind, class_name):
    return {"architectures": [class_name], "model_type": kind, "hidden_size": case["d"],
            "intermediate_size": case["f"], "num_hidden_layers": len(case["layers"]),
            "num_attention_heads": case["heads"], "num_key_value_heads": case["kv"],
            "head_dim": case["e"], "vocab_size": case["v"], "max_position_embeddings": 64,
            "rms_norm_eps": case["eps"], "hidden_act": "silu"}


def shape(**k):
    case = {"prefix": "model", "neo": False, "gemma": False, "qk_norm": False, "biased": "",
            "tied": False, "d": 24, "heads": 4, "kv": 2, "e": 16, "f": 40, "v": 48, "eps": 1e-5,
            "gguf_keys": []}
    case.update(k)
    case.setdefault("scalar", case["e"])
    return case


def llama3():
    rope = rope_llama3(16, 10000.0, 8.0, 1.0, 4.0, 32)
    c = shape(layers=[(rope, 0)] * 2, gguf_keys=["rope_freqs.weight"])
    c["config"] = dict(base_config(c, "llama", "LlamaForCausalLM"), rope_theta=10000.0,
                       tie_word_embeddings=False,
                       rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0,
                                     "original_max_position_embeddings": 32})
    return c


def llama_biased():
    rope = rope_linear(8, 10000.0, 4.0)
    c = shape(layers=[(rope, 0)] * 2, e=8, tied=True,
              biased=("q", "k", "v", "o", "gate", "up", "down"),
              gguf_keys=["llama.rope.scaling.type", "linear", "llama.rope.scaling.factor"])
    c["config"] = dict(base_config(c, "llama", "LlamaForCausalLM"), attention_bias=True,
                       mlp_bias=True, tie_word_embeddings=True,
                       rope_scaling={"type": "linear", "factor": 4.0})
    return c


def qwen2():
    rope = rope_yarn(16, 100.0, 4.0, 600)  # a ramp over pairs 2 to 7, both its ends inside
    c = shape(layers=[(rope, 0)] * 2, tied=True, biased=("q", "k", "v"), eps=1e-6,
              gguf_keys=["qwen2.rope.scaling.type", "yarn", "qwen2.rope.scaling.factor",
                         "qwen2.rope.scaling.original_context_length"])
    c["config"] = dict(base_config(c, "qwen2", "Qwen2ForCausalLM"), rope_theta=100.0,
                       tie_word_embeddings=True, use_sliding_window=False, sliding_window=32,
                       max_window_layers=2,
                       rope_scaling={"rope_type": "yarn", "factor": 4.0,
                                     "original_max_position_embeddings": 600})
    return c


def qwen3():
    rope = rope_default(16, 1000000.0)
    c = shape(layers=[(rope, 0)] * 2, tied=True, qk_norm=True, eps=1e-6)
    c["config"] = dict(base_config(c, "qwen3", "Qwen3ForCausalLM"), tie_word_embeddings=True,
                       rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
                       layer_types=["full_attention"] * 2)
    return c


def gemma_config(c, kind):
    config = base_config(c, kind, "Gemma3ForCausalLM")
    del config["hidden_act"]
    config.update(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=c["scalar"],
                  attn_logit_softcapping=None, final_logit_softcapping=None)
    return config


def gemma3():
    full_rope, local_rope = rope_linear(8, 1000000.0, 8.0), rope_default(8, 10000.0)
    layers = [(local_rope, 8)] * 5 + [(full_rope, 0), (local_rope, 8)]
    c = shape(gemma=True, layers=layers, d=16, e=8, heads=2, kv=1, f=24, v=40, tied=True,
              qk_norm=True, eps=1e-6,
              gguf_keys=["gemma3.attention.sliding_window", "gemma3.rope.scaling.type", "linear",
                         "gemma3.rope.freq_base", "gemma3.attention.key_length"])
    c["config"] = dict(gemma_config(c, "gemma3_text"), sliding_window=8, rope_theta=1000000.0,
                       rope_local_base_freq=10000.0,
                       rope_scaling={"rope_type": "linear", "factor": 8.0})
    return c


def gemma3_multimodal():
    full_rope, local_rope = rope_default(8, 500000.0), rope_default(8, 2000.0)
    layers = [(full_rope, 0), (local_rope, 7), (local_rope, 7)]
    c = shape(prefix="language_model.model", gemma=True, layers=layers, e=8, heads=8, kv=4,
              tied=True, qk_norm=True, eps=1e-6, scalar=20)
    text = dict(gemma_config(c, "gemma3_text"), sliding_window=7,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0}})
    del text["num_attention_heads"], text["num_key_value_heads"]  # then the defaults of the class apply: 8 and 4
    c["config"] = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                   "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
    return c


def gpt_neo():
    layers = [(None, 0), (None, 8), (None, 0), (None, 8)]
    c = shape(neo=True, layers=layers, heads=3, kv=3, e=8, scalar=1, f=96, tied=True,
              biased=("o", "up", "down"))
    c["config"] = {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo",
                   "hidden_size": c["d"], "num_layers": 4, "num_heads": 3,
                   "intermediate_size": None, "vocab_size": c["v"], "max_position_embeddings": 48,
                   "layer_norm_epsilon": c["eps"], "activation_function": "gelu_new",
                   "attention_types": [[["global", "local"], 2]], "window_size": 8}
    return c


CASES = {"llama-llama3": llama3, "llama-biased": llama_biased, "qwen2": qwen2, "qwen3": qwen3,
         "gemma3": gemma3, "gemma3-multimodal": gemma3_multimodal, "gpt-neo": gpt_neo}


def rounded(x):
    return [rounded(a) for a in x] if isinstance(x, list) else float("%.8g" % x)


def golden(name):
    case = CASES[name]()
    model = Model(case)
    h = name_hash(name + " tokens")
    tokens = [int((weight(h, i) + 1) / 2 * case["v"]) for i in range(N_TOKENS)]
    hidden, logits = model.run(tokens, False)
    adapted = model.run(tokens, True)[1]
    return {"config": case["config"], "tensors": model.tensors, "tokens": tokens, "rows": ROWS,
            "hidden": rounded(hidden), "logits": rounded(logits), "adapter": [RANK, ALPHA],
            "adapted": rounded(adapted), "gguf_keys": case["gguf_keys"]}


def golden_text(g):
    lines = ['"%s": %s' % (k, json.dumps(v)) for k, v in g.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def distance(a, b):
    """The largest difference of two nested lists of numbers; infinite if their shapes differ."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max([distance(x, y) for x, y in zip(a, b)], default=0)
    return abs(a - b) if isinstance(a, float) and isinstance(b, float) else math.inf


def check(name):
    with open(os.path.join(FOLDER, name + ".json")) as f:
        have = json.load(f)
    want = golden(name)
    numbers = ("hidden", "logits", "adapted")
    for key in want:
        if key in numbers:
            if not distance(have[key], want[key]) < 1e-6:
                return "'%s' differs by %g" % (key, distance(have[key], want[key]))
        elif have.get(key) != json.loads(json.dumps(want[key])):
            return "'%s' differs" % key
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
