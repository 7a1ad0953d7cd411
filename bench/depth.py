#!/usr/bin/env python3
"""depth: time per token after prompts of 1,024 to 32,768 tokens, and that of llama.cpp with flash attention.

    bench/depth.py [SHOAL]

A server with an int8 KV cache gets prompts of the depths DEPTHS ("1024 4096 16384") and generates 16 tokens after each.
The table has the mean time of a generated token and the speed of the prompt. A prompt extends the one before it, whose
KV cache is used again. Plan and peak of the server's memory are printed too. LLAMA_BIN names a folder with a natively
built llama-bench, which gets the same weights, threads and depths, `-fa 1`, and q8_0 for keys and values. SHAPE
(qwen3-0.6b) and QUANT (q4_0) of the random weights; they are kept in build/peers.
"""
import json
import os
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import sizes  # noqa: E402

TOKENS = 16
LIMIT = 7200  # seconds of a server


def model_path(shoal, shape, quant):
    path = f"{ROOT}/build/peers/{shape}-{quant}.gguf"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.exists(path):
        subprocess.run([shoal, "model", "new", "--quiet", "--shape", shape, "--type", quant, "--seed", "1", path],
                       check=True)
    return path


def tokens(n, vocabulary):
    return [(i * 7919 + 3) % vocabulary for i in range(n)]


def shoal_times(shoal, model, depths):
    """{depth: (seconds per token, seconds until the first one, tokens computed)}, plan and peak in bytes."""
    vocabulary = json.loads(subprocess.run([shoal, "model", "info", model, "--json"], check=True,
                                           capture_output=True).stdout)["vocab"]
    args = [shoal, "serve", model, "--port", "0", "--state", f"{ROOT}/build/peers/state", "--kv-cache-dtype", "i8",
            "--max-num-seqs", "1", "--max-model-len", str(max(depths) + TOKENS)]
    plan = sizes.plan_bytes(subprocess.run([*args, "--dry-run", "--json"], check=True, capture_output=True,
                                           text=True).stdout, "")
    server = sizes.Process(None, args, LIMIT)
    port = sizes.port_of(server)
    if not port:
        sys.exit(f"depth: {server.messages()}")
    found, before = {}, 0
    for depth in depths:
        asked = time.monotonic()
        first, last = sizes.stream(port, tokens(depth, vocabulary), TOKENS)
        found[depth] = (last - first) / (TOKENS - 1), first - asked, depth - before
        before = depth
        print(f"shoal {depth}: {found[depth]}", file=sys.stderr, flush=True)
    server.p.send_signal(signal.SIGTERM)
    server.read()
    server.wait()
    return found, plan, server.peak


def llama_times(folder, model, depths):
    """{depth: seconds per token} of llama-bench, and its commit."""
    found, commit = {}, None
    for depth in depths:
        args = ["-m", model, "-t", str(os.cpu_count()), "-p", "0", "-n", str(TOKENS), "-d", str(depth), "-fa", "1",
                "-ctk", "q8_0", "-ctv", "q8_0", "-r", "1", "-o", "json"]
        out = subprocess.run([f"{folder}/llama-bench", *args], check=True, capture_output=True, text=True).stdout
        result = json.loads(out)[0]
        found[depth], commit = 1 / result["avg_ts"], result["build_commit"]
        print(f"llama.cpp {depth}: {found[depth]}", file=sys.stderr, flush=True)
    return found, commit


def main():
    shoal = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else f"{ROOT}/build/shoal")
    depths = sorted(int(x) for x in os.environ.get("DEPTHS", "1024 4096 16384").split())
    shape, quant = os.environ.get("SHAPE", "qwen3-0.6b"), os.environ.get("QUANT", "q4_0")
    model = model_path(shoal, shape, quant)
    ours, plan, peak = shoal_times(shoal, model, depths)
    llama, commit = {}, None
    if os.environ.get("LLAMA_BIN"):
        llama, commit = llama_times(os.environ["LLAMA_BIN"], model, depths)
    peer = f"; llama.cpp {commit}, flash attention, q8_0 keys and values" if llama else ""
    print(f"{shape} {quant}, int8 keys and values, {os.cpu_count()} threads; plan {plan / sizes.MB:.0f} MB, peak "
          f"{peak / sizes.MB:.0f} MB{peer}\n")
    print("| tokens before | ms a token | new tokens of the prompt, tokens/s | llama.cpp, ms a token |")
    print("|---:|---:|---:|---:|")
    for depth in depths:
        each, first, new = ours[depth]
        print(f"| {depth:,} | {1000 * each:.0f} | {new / first:.0f} | "
              f"{f'{1000 * llama[depth]:.0f}' if llama else ''} |")


if __name__ == "__main__":
    main()
