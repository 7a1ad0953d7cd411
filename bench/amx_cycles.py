#!/usr/bin/env python3
"""amx_cycles: predicted speed of the AMX kernels, from counts of their instructions and measured costs.

    amx_cycles.py [--shape NAME] [--threads N] [--bench build/shoal] [--kernels build/test_kernels]

It prints, for the matrix shapes of a prompt of 512 tokens, the tile products, tile loads, tile stores and 512-bit
vector steps of each kernel, its cycles on one core and Gop/s; then the parts of a whole prompt and tokens/s. With
--bench it measures the same prompts, with --kernels the same products, and prints both side by side.

A prediction contains the counted operations only: no barriers, no TLB misses, no imbalance of threads. So it is a goal,
and the share of it that a measurement reaches shows what remains. The units of a core overlap: a step costs as much as
the unit that it occupies longest; comments name the exceptions. Each part of a prompt is divided among the threads.
"""
import argparse
import json
import math
import os
import re
import subprocess
import sys

# Costs in cycles, measured on one idle Sapphire Rapids core. A cycle is a 16th of the time of a full tile product: 3.1
# to 3.2 GHz in every run.
GHZ = 3.15
LOAD_L1, LOAD_L2 = 8, 21    # a tile load of 1 KiB, rows next to each other
LOAD_L3 = 102               # 10 bytes per cycle
STORE = 15                  # a tile store to the L1 cache, any number of rows
STORE_WAIT = 50             # a tile store right after the product that it waits for
VECTOR = 1                  # a 512-bit step while tile instructions are in flight: one port, not two
VECTOR_ALONE = 0.46         # the same without tile instructions
READ_L3 = 10                # bytes per cycle
WRITE_L2, WRITE_L3 = 16, 7  # bytes per cycle of results, the read for ownership included
READ_MEMORY = 4.6           # bytes per cycle, one core
DEQUANTIZE = {"bf16": math.inf, "q8_0": 4.7, "q4_0": 5.9}  # weights per cycle, to bf16 in a scratch panel
TRANSPOSE = {"bf16": 7.9, "q8_0": 3.4}  # weights per cycle, of W for dX = dY W, dequantized before
WEIGHT_BYTES = {"bf16": 2, "q8_0": 1.13, "q4_0": 0.63}  # with f32 scales
L1_BYTES, L2_BYTES, L2_WAYS, L2_COLORS = 48 << 10, 2 << 20, 16, 32  # pages of different colors share no cache set

# Vector steps for 16 numbers.
FOLD = 3           # int32 sums of a block of 32: convert, product of scales, multiply-add
UNPACK = 5         # 64 bytes of nibbles as two vectors of int8
EXP = 12           # 2^x
SILU = EXP + 8     # silu(gate) * up, rounded to bf16
SOFTMAX = EXP + 6  # maximum, scale, exp, sum, division, rounding to bf16
QUANTIZE = 8       # largest value, scale, rounding, packing to int8
NORM, ROPE = 4, 4

TOKENS = 512
# D width, F ffn, H heads, K kv heads, E head size, L layers, V vocabulary
SHAPES = {
    "smollm-135m": dict(D=576, F=1536, H=9, K=3, E=64, L=30, V=49152),
    "qwen3-0.6b": dict(D=1024, F=3072, H=16, K=8, E=128, L=28, V=151936),
    "fry-1": dict(D=192, F=512, H=6, K=2, E=32, L=6, V=768),
}


def tile_product(rows):
    """Cycles of a product of `rows` rows with 16 outputs; fewer than 8 rows save nothing."""
    return min(16, max(9.4, rows + 1.5))


def ceil(a, b):
    return -(-a // b)


def l2_miss_share(size):
    """The share of a buffer, read again and again in order, that the L2 cache has evicted before.

    Pages fall on cache sets at random; those of a color with more pages than ways evict each other.
    """
    mean = size / 4096 / L2_COLORS
    p, fits = math.exp(-mean), 0.0
    for n in range(1, L2_WAYS + 1):
        p *= mean / n
        fits += n * p
    return max(0, 1 - fits / mean)


def store_cycles(size, whole):
    """Cycles that `size` bytes of results take; `whole` is the size of the buffer."""
    return size / (WRITE_L3 if whole > L2_BYTES else WRITE_L2)


class Work:
    """Counts of one kernel on one matrix shape, and its cycles on one core."""

    def __init__(self, ops):
        self.ops, self.products, self.loads, self.stores, self.vector, self.cycles = ops, 0, 0, 0, 0, 0

    def add(self, times, cycles, products=0, loads=0, stores=0, vector=0):
        self.products += times * products
        self.loads += times * loads
        self.stores += times * stores
        self.vector += times * vector
        self.cycles += times * cycles

    def gops(self):
        return self.ops * GHZ / self.cycles


def exact_product(rows, k, n, kind):
    """Y [rows, n] = X [rows, k] W [n, k]: int8 sums of 32 inputs times their scales, tiles of equal even height.

    The sums of a block leave their tile and are folded six blocks later. Stores and loads are hidden, but the product
    and the fold were never measured to overlap: 63 to 65 cycles for 16 rows in every order of the instructions.
    """
    work, tiles, panels, blocks = Work(2 * rows * k * n), ceil(rows, 16), ceil(n, 16), ceil(k, 32)
    tall = 2 * ceil(rows, 2 * tiles)
    fold = FOLD * tall
    work.add(tiles * panels * blocks, fold * VECTOR + tile_product(tall), 1, 2, 1, fold)
    if kind == "q4_0":  # once for eight tiles
        work.add(ceil(tiles, 8) * panels * blocks, 4 * UNPACK * VECTOR, vector=4 * UNPACK)
    work.add(tiles * panels, store_cycles(64 * tall, 4 * rows * n))
    return work


def tiles_2x2(work, rows, k, n, result_bytes, hidden=0):
    """Products of 32 rows by 32 outputs, bf16: in a step four products use two tiles of each operand.

    The rows come from the L2 cache, as far as they fit; the weights from L1 if both operands of a block fit there.
    `hidden` vector steps per step are computed between products.
    """
    columns, steps, absent = ceil(n, 32), ceil(k, 32), l2_miss_share(2 * rows * k + 64 * k)
    rows_load = LOAD_L2 + absent * (LOAD_L3 - LOAD_L2)
    weights_load = LOAD_L1 if 4 * 32 * k <= L1_BYTES else LOAD_L2
    for m in range(0, rows, 32):
        tall = [min(16, rows - at) for at in (m, m + 16) if at < rows]  # rows of each tile
        tiles, height = len(tall), sum(tall)
        step = max(2 * sum(map(tile_product, tall)), tiles * rows_load + 2 * weights_load, hidden * VECTOR)
        work.add(columns * steps, step, 2 * tiles, tiles + 2, vector=hidden)
        end = 2 * tiles * STORE_WAIT + store_cycles(height * 32 * result_bytes, rows * n * result_bytes)
        work.add(columns, end, stores=2 * tiles)


def known_rows_product(rows, k, n, kind, gated=False):
    """The same in bf16, W dequantized for two panels at a time in every call.

    `gated`: panels of gate and up side by side, of which only silu(gate) * up is stored, as bf16.
    """
    work = Work(2 * rows * k * n)
    silu = 32 * SILU / ceil(k, 32) if gated else 0
    tiles_2x2(work, rows, k, n, 1 if gated else 4, silu)
    work.add(1, k * n / DEQUANTIZE[kind])
    return work


def backward_product(rows, k, n, kind):
    """dX [rows, k] = dY [rows, n] W [n, k] in bf16: W is transposed in tiles, dY is rounded to tiles of rows."""
    work = Work(2 * rows * k * n)
    tiles_2x2(work, rows, n, k, 4)
    work.add(1, k * n / TRANSPOSE[kind])
    work.add(rows * n / 16, 64 / READ_L3, vector=0.5)
    return work


def attention(tokens, heads, size):
    """Causal attention of one prompt in bf16: blocks of 32 queries by 32 keys. Softmax runs between the products."""
    blocks = heads * ceil(tokens, 32) * (ceil(tokens, 32) + 1) // 2
    work = Work(blocks * 4 * 32 * 32 * size)
    products, steps = 8 * size // 32, 64 * SOFTMAX
    work.add(blocks, products * tile_product(16) + 4 * STORE + steps * VECTOR, products, products, 4, steps)
    return work


def elementwise(numbers, steps, read=4, written=2):
    """Every 16 numbers: vector steps, `read` bytes per number from the L3 cache, `written` to it."""
    work = Work(0)
    work.add(numbers / 16, 16 * read / READ_L3 + 16 * written / WRITE_L3 + steps * VECTOR_ALONE, vector=steps)
    return work


def matrices(s):
    """Name → (inputs, outputs) of the matrices of a layer; the products that share an input are one."""
    return {
        "qkv": (s["D"], (s["H"] + 2 * s["K"]) * s["E"]),
        "o": (s["H"] * s["E"], s["D"]),
        "gate, up": (s["D"], 2 * s["F"]),
        "down": (s["F"], s["D"]),
    }


def prompt(s, kind, exact):
    """Name → Work of the parts of a prompt of TOKENS tokens. For its one output row the head only reads weights."""
    parts, rows = {}, TOKENS
    for name, (k, n) in matrices(s).items():
        gated = name == "gate, up"
        parts[name] = exact_product(rows, k, n, kind) if exact else known_rows_product(rows, k, n, kind, gated)
    parts["attention"] = attention(rows, s["H"], s["E"])
    parts["norms"] = elementwise(2 * rows * s["D"], NORM)
    parts["rope, K, V"] = elementwise(rows * (s["H"] + 2 * s["K"]) * s["E"], ROPE)
    if exact:
        parts["silu"] = elementwise(rows * s["F"], SILU, 8, 4)
        parts["quantize"] = elementwise(rows * sum(k for k, _ in matrices(s).values()), QUANTIZE, 4, 1)
    for work in parts.values():
        work.cycles *= s["L"]
    parts["weights"] = Work(0)
    read = s["L"] * sum(k * n for k, n in matrices(s).values()) + s["D"] * s["V"]
    parts["weights"].add(1, read * WEIGHT_BYTES[kind] / READ_MEMORY)
    return parts


KERNELS = [("exact", exact_product, "q8_0"), ("exact", exact_product, "q4_0"), ("known", known_rows_product, "bf16"),
           ("known", known_rows_product, "q8_0"), ("known", known_rows_product, "q4_0"),
           ("dX", backward_product, "bf16"), ("dX", backward_product, "q8_0")]


def kernels_print(s):
    print(f"{'kernel':<12}{'rows':>5}{'K':>6}{'N':>6}{'products':>10}{'loads':>10}{'stores':>9}{'vector':>11}"
          f"{'cycles':>12}{'Gop/s':>8}")

    def row(label, shape, w):
        print(f"{label:<12}" + "".join(f"{x:>{6 - (i == 0)}}" for i, x in enumerate(shape)) +
              f"{w.products:>10.0f}{w.loads:>10.0f}{w.stores:>9.0f}{w.vector:>11.0f}{w.cycles:>12.0f}{w.gops():>8.0f}")
    for name, kernel, kind in KERNELS:
        for rows in (TOKENS, 20) if name != "dX" else (TOKENS,):
            for k, n in matrices(s).values():
                row(f"{name} {kind}", (rows, k, n), kernel(rows, k, n, kind))
    row("attention", (TOKENS, s["E"], s["H"]), attention(TOKENS, s["H"], s["E"]))


def bench(shoal, threads, name, kind, exact):
    """tokens/s of `shoal bench --what prefill`."""
    out = subprocess.run([shoal, "bench", "--json", "--quiet", "--what", "prefill", "--reps", "5", "--shape", name,
                          "--type", kind, "--threads", str(threads)] + ["--exact"] * exact, check=True,
                         stdout=subprocess.PIPE, text=True).stdout
    line = json.loads(out.splitlines()[0])
    if line["level"] != "amx":
        sys.exit(f"amx_cycles: the processor level here is {line['level']}, not amx")
    return line["tps"]


def prompts_print(name, threads, shoal):
    """tokens/s of a prompt for each number class and weight type, and the times of its parts in ms."""
    print(f"\n{name}, a prompt of {TOKENS} tokens, {threads} threads: predicted tokens/s" +
          (", measured, measured / predicted" if shoal else "") + "; ms of each part")
    for exact, kind in [(True, "q8_0"), (True, "q4_0"), (False, "bf16"), (False, "q8_0"), (False, "q4_0")]:
        parts = prompt(SHAPES[name], kind, exact)
        ms = {part: 1e-6 * w.cycles / GHZ / threads for part, w in parts.items()}
        tps = 1e3 * TOKENS / sum(ms.values())
        measured = bench(shoal, threads, name, kind, exact) if shoal else 0
        print(f"{'exact' if exact else 'fast':<6}{kind:<5}{tps:>8.0f}" +
              (f"{measured:>8.0f}{measured / tps:>6.2f}" if shoal else "") + "  " +
              ", ".join(f"{part} {t:.1f}" for part, t in ms.items()))


def products_print(test_kernels):
    """Products of one thread, and the lines of `test_kernels --bench [TYPE]` for the level amx."""
    print("\nproducts on one core, Gop/s: predicted, measured, measured / predicted")
    columns = [("q8_0", "q8_0", exact_product, "q8_0"), ("q4_0", "q4_0", exact_product, "q4_0"),
               ("", "bf16 fast", known_rows_product, "bf16")]
    for argument, column, kernel, kind in columns:
        out = subprocess.run([test_kernels, "--bench"] + [argument] * bool(argument), check=True,
                             stdout=subprocess.PIPE, text=True).stdout
        section = re.search(r"^amx, Gop/s.*\n((?: .*\n)*)", out, re.M)
        for line in section[1].splitlines() if section else []:
            rows, k, n = map(int, line.split()[:3])
            measured = float(re.search(rf" {column} +([\d.]+)", line)[1])
            if rows > 4:  # fewer rows of int8 do not use tiles
                predicted = kernel(rows, k, n, kind).gops()
                print(f"{column:<10}{rows:>5}{k:>6}{n:>6}{predicted:>8.0f}{measured:>8.0f}{measured / predicted:>6.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=SHAPES, default="smollm-135m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bench", metavar="SHOAL", help="also measure prompts with this program")
    parser.add_argument("--kernels", metavar="TEST_KERNELS", help="also measure products with this program")
    args = parser.parse_args()
    kernels_print(SHAPES[args.shape])
    prompts_print(args.shape, args.threads, args.bench)
    if args.kernels:
        products_print(args.kernels)


main()
