#!/usr/bin/env python3
"""An independent implementation of PEFT's adapters in plain Python and double precision.

Writes test/golden/adapter: two tiny llama bases (base: own head; tied: head = embedding), one PEFT
directory a case, and expected.txt with the logits of every position. It follows PEFT's forward
formulas module by module, in the order PEFT applies them, and shares no code with Shoal: an
adapter's tensors are read back from the files it wrote, the config is matched with Python's re.

    python3 test/oracle/adapter.py test/golden/adapter

Values are rounded to float32 when written, and everything after reading is double, so the logits
are those of the files. Nothing is near a tie; a comparison at 1e-5 relative is safe.
"""
import json
import math
import os
import random
import re
import struct
import sys

D, H, K, E, F, V, L = 8, 2, 1, 4, 12, 24, 2
EPS, THETA = 1e-5, 10000.0
PROJ = {
    "self_attn.q_proj": (H * E, D), "self_attn.k_proj": (K * E, D), "self_attn.v_proj": (K * E, D),
    "self_attn.o_proj": (D, H * E), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
}
TOKENS = [1, 5, 23, 7, 0, 14, 5]


def matrix(rng, rows, cols, std):
    return [[struct.unpack("f", struct.pack("f", rng.gauss(0, std)))[0] for _ in range(cols)] for _ in range(rows)]


def vector(rng, n, mean, std):
    return [struct.unpack("f", struct.pack("f", mean + rng.gauss(0, std)))[0] for _ in range(n)]


def write_safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name in sorted(tensors):
        t = tensors[name]
        shape = [len(t), len(t[0])] if isinstance(t[0], list) else [len(t)]
        flat = [x for row in t for x in row] if isinstance(t[0], list) else t
        raw = struct.pack("<%df" % len(flat), *flat)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = open(path, "rb").read()
    n = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, t in json.loads(raw[8:8 + n]).items():
        if name == "__metadata__":
            continue
        a, b = t["data_offsets"]
        flat = list(struct.unpack("<%df" % ((b - a) // 4), raw[8 + n + a:8 + n + b]))
        s = t["shape"]
        out[name] = flat if len(s) == 1 else [flat[i * s[1]:(i + 1) * s[1]] for i in range(s[0])]
    return out


def write_base(folder, tied, rng):
    os.makedirs(folder, exist_ok=True)
    t = {"model.embed_tokens.weight": matrix(rng, V, D, 1.0), "model.norm.weight": vector(rng, D, 1, 0.2)}
    if not tied:
        t["lm_head.weight"] = matrix(rng, V, D, 0.5)
    for layer in range(L):
        p = "model.layers.%d." % layer
        t[p + "input_layernorm.weight"] = vector(rng, D, 1, 0.2)
        t[p + "post_attention_layernorm.weight"] = vector(rng, D, 1, 0.2)
        for name, (rows, cols) in PROJ.items():
            t[p + name + ".weight"] = matrix(rng, rows, cols, 0.4)
    write_safetensors(folder + "/model.safetensors", t)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "num_attention_heads": H,
        "num_key_value_heads": K, "head_dim": E, "intermediate_size": F, "vocab_size": V, "num_hidden_layers": L,
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 64, "tie_word_embeddings": tied,
        "hidden_act": "silu", "torch_dtype": "float32",
    }
    json.dump(config, open(folder + "/config.json", "w"), indent=2, sort_keys=True)


# The cases: base, config, and tensors in the file that the config does not mention.
CASES = {
    "plain": ("base", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]}),
    "rslora": ("base", {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": "all-linear"}),
    "patterns": ("base", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "up_proj", "down_proj"],
                          "exclude_modules": ["1.mlp.up_proj"], "rank_pattern": {"layers.0.self_attn.q_proj": 3, "down_proj": 1},
                          "alpha_pattern": {r"1\..*q_proj": 9, "k_proj": 1.5}}),
    "layers": ("base", {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1],
                        "layers_pattern": ["blocks", "layers"]}),
    "regex": ("tied", {"r": 3, "lora_alpha": 2, "target_modules": r".*\.(0|1)\..*[kv]_proj"}),
    "dora": ("base", {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": "all-linear"}),
    "dora_mixed": ("tied", {"r": 2, "lora_alpha": 4, "use_dora": True, "use_rslora": True,
                            "target_modules": ["o_proj", "down_proj", "q_proj"], "rank_pattern": {"1.self_attn.o_proj": 5}}),
    "dora_head": ("base", {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": ["v_proj", "lm_head"]}),
    "saved": ("base", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved_tied": ("tied", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("base", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "trainable_token_indices": [23, 5, 7]}),
    "tokens_tied": ("tied", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "trainable_token_indices": [14, 0]}),
    "tokens_both": ("base", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
                             "trainable_token_indices": {"embed_tokens": [5], "lm_head": [9, 2, 20]}}),
    "tables": ("base", {"r": 3, "lora_alpha": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"],
                        "alpha_pattern": {"lm_head": 6}, "rank_pattern": {"embed_tokens": 2}}),
    "tables_tied": ("tied", {"r": 3, "lora_alpha": 4, "target_modules": ["embed_tokens", "lm_head"]}),
    "resized_tied": ("tied", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}),
    "saved_tying": ("tied", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"],
                             "ensure_weight_tying": True}),
    "saved_untying": ("tied", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "activated": ("base", {"r": 3, "lora_alpha": 4, "target_modules": "all-linear",
                           "alora_invocation_tokens": [7, 0]}),
}


def module_names():
    return ["model.layers.%d.%s" % (i, p) for i in range(L) for p in PROJ] + ["model.embed_tokens", "lm_head"]


def is_selected(key, name, c):
    if key == "all-linear":
        return name not in ("model.embed_tokens", "lm_head")
    if isinstance(key, str):
        return re.fullmatch(key, name) is not None
    return any(name == k or name.endswith("." + k) for k in key or [])


def is_targeted(name, c):
    if not is_selected(c["target_modules"], name, c) or is_selected(c.get("exclude_modules"), name, c):
        return False
    if c.get("layers_to_transform") is None:
        return True
    m = re.match(r".*\.layers\.(\d+)\.", name)
    return m is not None and int(m.group(1)) in c["layers_to_transform"]


def pattern_value(table, name, default):
    for key, value in (table or {}).items():
        if re.match(r"(.*\.)?(%s)$" % key, name):
            return value
    return default


def proj_shape(name):
    if name in ("model.embed_tokens", "lm_head"):
        return V, D
    return PROJ[name.split(".", 3)[3]]


def write_case(folder, name, base, config, rng):
    os.makedirs(folder, exist_ok=True)
    prefix, t = "base_model.model.", {}
    weights = read_safetensors("%s/../%s/model.safetensors" % (folder, base))
    for m in module_names():
        if not is_targeted(m, config):
            continue
        r, (out, inner) = pattern_value(config.get("rank_pattern"), m, config["r"]), proj_shape(m)
        if m == "model.embed_tokens":
            t[prefix + m + ".lora_embedding_A"] = matrix(rng, r, V, 0.5)
            t[prefix + m + ".lora_embedding_B"] = matrix(rng, D, r, 0.5)
        else:
            t[prefix + m + ".lora_A.weight"] = matrix(rng, r, inner, 0.5)
            t[prefix + m + ".lora_B.weight"] = matrix(rng, out, r, 0.5)
        if config.get("use_dora"):
            t[prefix + m + ".lora_magnitude_vector"] = vector(rng, out, 1.2, 0.3)
        if m in ("model.embed_tokens", "lm_head"):  # PEFT adds the base's own table
            table = weights.get(m + ".weight", weights["model.embed_tokens.weight"])
            t[prefix + m + ".base_layer.weight"] = table
    for m in config.get("modules_to_save", []):
        t[prefix + {"lm_head": "lm_head", "embed_tokens": "model.embed_tokens"}[m] + ".weight"] = matrix(rng, V, D, 0.7)
    ids = config.get("trainable_token_indices", {})
    for m, v in (ids if isinstance(ids, dict) else {"embed_tokens": ids}).items():
        where = {"lm_head": "lm_head", "embed_tokens": "model.embed_tokens"}[m]
        t[prefix + where + ".token_adapter.trainable_tokens_delta"] = matrix(rng, len(v), D, 0.7)
    if name == "resized_tied":  # in place, so embedding and head
        t[prefix + "model.embed_tokens.weight"] = matrix(rng, V, D, 0.7)
    write_safetensors(folder + "/adapter_model.safetensors", t)
    config = dict(config, peft_type="LORA", base_model_name_or_path=base, lora_dropout=0.0, bias="none")
    json.dump(config, open(folder + "/adapter_config.json", "w"), indent=2, sort_keys=True)


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


class Net:
    def __init__(self, root, base, case):
        self.w = read_safetensors("%s/%s/model.safetensors" % (root, base))
        self.tied = "lm_head.weight" not in self.w
        self.c = json.load(open("%s/%s/adapter_config.json" % (root, case)))
        raw = read_safetensors("%s/%s/adapter_model.safetensors" % (root, case))
        self.a = {k[len("base_model.model."):]: v for k, v in raw.items()}
        self.embed = self.w["model.embed_tokens.weight"]
        if self.tied:
            self.w["lm_head.weight"] = self.embed
        self.head = self.w["lm_head.weight"]
        saved = self.c.get("modules_to_save", [])
        if "embed_tokens" in saved:
            self.embed = self.a["model.embed_tokens.weight"]
            if self.tied and self.c.get("ensure_weight_tying"):
                self.head = self.embed
        elif "model.embed_tokens.weight" in self.a:
            self.embed = self.a["model.embed_tokens.weight"]
            if self.tied:
                self.head = self.embed
        if "lm_head" in saved:
            self.head = self.a["lm_head.weight"]
        ids = self.c.get("trainable_token_indices") or {}
        ids = ids if isinstance(ids, dict) else {"embed_tokens": ids}
        rows = self.a.get("model.embed_tokens.token_adapter.trainable_tokens_delta")
        if "embed_tokens" in ids:
            self.embed = self.replace_rows(self.embed, ids["embed_tokens"], rows)
            if self.tied:
                self.head = self.replace_rows(self.head, ids["embed_tokens"], rows)
        if "lm_head" in ids:
            self.head = self.replace_rows(self.head, ids["lm_head"], self.a["lm_head.token_adapter.trainable_tokens_delta"])

    @staticmethod
    def replace_rows(table, ids, rows):
        table = [list(r) for r in table]
        for i, row in zip(ids, rows):
            table[i] = row
        return table

    def scale(self, m):
        r = pattern_value(self.c.get("rank_pattern"), m, self.c["r"])
        alpha = pattern_value(self.c.get("alpha_pattern"), m, self.c["lora_alpha"])
        return alpha / math.sqrt(r) if self.c.get("use_rslora") else alpha / r

    def linear(self, m, x):
        w = self.head if m == "lm_head" else self.w[m + ".weight"]
        y = [dot(row, x) for row in w]
        if not is_targeted(m, self.c) or not self.active:
            return y
        a, b, s = self.a[m + ".lora_A.weight"], self.a[m + ".lora_B.weight"], self.scale(m)
        update = [dot(row, x) for row in a]
        update = [s * dot(row, update) for row in b]
        if not self.c.get("use_dora"):
            return [p + q for p, q in zip(y, update)]
        mag, out = self.a[m + ".lora_magnitude_vector"], []
        for n in range(len(w)):
            full = [w[n][k] + s * math.fsum(b[n][i] * a[i][k] for i in range(len(a))) for k in range(len(x))]
            ratio = mag[n] / math.sqrt(dot(full, full))
            out.append(y[n] + (ratio - 1) * y[n] + ratio * update[n])  # PEFT's form
        return out

    def embedding(self, token):
        x, m = self.embed[token], "model.embed_tokens"
        if not is_targeted(m, self.c):
            return list(x)
        a, b, s = self.a[m + ".lora_embedding_A"], self.a[m + ".lora_embedding_B"], self.scale(m)
        return [x[d] + s * math.fsum(a[i][token] * b[d][i] for i in range(len(a))) for d in range(D)]

    def norm(self, x, name):
        r = 1 / math.sqrt(dot(x, x) / len(x) + EPS)
        return [v * r * g for v, g in zip(x, self.w[name])]

    @staticmethod
    def rope(x, pos):
        out = list(x)
        for i in range(E // 2):
            angle = pos * THETA ** (-2.0 * i / E)
            c, s = math.cos(angle), math.sin(angle)
            out[i], out[i + E // 2] = x[i] * c - x[i + E // 2] * s, x[i + E // 2] * c + x[i] * s
        return out

    def first_active(self, tokens):
        """The first position that the adapter changes: PEFT's calculate_alora_offsets, counted from the beginning."""
        invocation = self.c.get("alora_invocation_tokens")
        if invocation is None:
            return 0
        starts = [i for i in range(len(tokens)) if tokens[i:i + len(invocation)] == invocation]
        return max(starts, default=len(tokens))

    def run(self, tokens):
        cache, logits = [([], []) for _ in range(L)], []
        for pos, token in enumerate(tokens):
            self.active = pos >= self.first_active(tokens)
            x = self.embedding(token)
            for layer in range(L):
                p = "model.layers.%d." % layer
                h = self.norm(x, p + "input_layernorm.weight")
                q = self.linear(p + "self_attn.q_proj", h)
                cache[layer][0].append(self.rope(self.linear(p + "self_attn.k_proj", h), pos))
                cache[layer][1].append(self.linear(p + "self_attn.v_proj", h))
                attn = []
                for head in range(H):
                    qh = self.rope(q[head * E:(head + 1) * E], pos)
                    scores = [math.exp(dot(qh, k) / math.sqrt(E)) for k in cache[layer][0]]
                    z = math.fsum(scores)
                    attn += [math.fsum(s / z * v[i] for s, v in zip(scores, cache[layer][1])) for i in range(E)]
                x = [u + v for u, v in zip(x, self.linear(p + "self_attn.o_proj", attn))]
                h = self.norm(x, p + "post_attention_layernorm.weight")
                g, u = self.linear(p + "mlp.gate_proj", h), self.linear(p + "mlp.up_proj", h)
                h = [a / (1 + math.exp(-a)) * b for a, b in zip(g, u)]
                x = [u + v for u, v in zip(x, self.linear(p + "mlp.down_proj", h))]
            logits.append(self.linear("lm_head", self.norm(x, "model.norm.weight")))
        return logits


def main(root):
    rng = random.Random(20)
    write_base(root + "/base", False, rng)
    write_base(root + "/tied", True, rng)
    with open(root + "/expected.txt", "w") as f:
        f.write("# case base, then the tokens, then one line of %d logits a position\n" % V)
        for name, (base, config) in CASES.items():
            write_case("%s/%s" % (root, name), name, base, config, rng)
            f.write("%s %s\n%d %s\n" % (name, base, len(TOKENS), " ".join(map(str, TOKENS))))
            for row in Net(root, base, name).run(TOKENS):
                f.write(" ".join("%.9g" % x for x in row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
