#!/bin/sh
# test_compatibility: the command lines of earlier programs, with 'shoal' in front: each runs, or prints one line that
# says what replaces it and exits with 2. docs/COMPATIBILITY.md has the table of the program.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG='' SHOAL_CACHE="$tmp/cache" SHOAL_DEBATE_MAX_TOKENS=4 SHOAL_WORLD_AGENTS=5 SHOAL_WORLD_STEPS=5 SHOAL_WORLD_GENERATIONS=1 \
    SHOAL_WORLD_EVAL_MAPS=1
unset MODEL_PATH MODEL_TYPE MAX_TOKENS TEMPERATURE ENABLE_ONLINE_LEARNING LORA_RANK LEARNING_RATE BATCH_SIZE MUTATION_RATE ELITE_RATIO WORLD_SIZE INITIAL_ENERGY \
    ENERGY_FROM_FOOD NUM_LLM_AGENTS ENERGY_PER_STEP MODE

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
holds() { if grep -qF -- "$2" "$3"; then ok "$1"; else bad "$1" "no '$2' in: $(head -c 300 "$3")"; fi; }

# ---- the table
"$shoal" help --compatibility >"$tmp/table"
awk '/^\| command line, variable or key/ { in_table = 1; getline; next } !/^\|/ { in_table = 0 } in_table' docs/COMPATIBILITY.md >"$tmp/documented"
if [ -s "$tmp/table" ] && cmp -s "$tmp/table" "$tmp/documented"; then ok "docs/COMPATIBILITY.md has the table"
else bad "docs/COMPATIBILITY.md has the table" "$(diff "$tmp/documented" "$tmp/table" | head -n 5)"; fi

# ---- the command lines, in a folder with the models and files that they name
mkdir -p "$tmp/here/Qwen" "$tmp/here/llm-jp" "$tmp/here/google" "$tmp/here/data" "$tmp/here/models" && cd "$tmp/here" || exit 1
model=$root/test/models/fry-1
for name in Qwen/Qwen3-4B-Instruct-2507 llm-jp/llm-jp-3-150m-instruct3 google/gemma-3-1b-it; do ln -s "$model" $name; done
"$shoal" convert "$model" --out models/gemma-3-1b-it-q4_0.gguf --quiet && cp models/gemma-3-1b-it-q4_0.gguf models/smollm-135m-instruct.q4_k_m.gguf ||
    { bad "the models exist" "convert failed"; exit 1; }
for p in a b c; do
    printf '{"messages": [\n  {"role": "user", "content": "2 + %s = ?"},\n  {"role": "assistant", "content": "%s"}\n]}\n' $p $p >data/sft_persona_$p.jsonl
done

# run LINE: its output is in out and err, its exit code in $code.
run() {
    echo 'sort: k b x' >"$tmp/in"
    eval "\"\$shoal\" $1" <"$tmp/in" >"$tmp/out" 2>"$tmp/err"
    code=$?
}
works() {
    run "$1"
    if [ $code != 0 ]; then bad "$1" "exit $code: $(tail -c 300 "$tmp/err")"
    elif ! grep -q '^this is: shoal ' "$tmp/err"; then bad "$1" "no note: $(head -c 300 "$tmp/err")"
    else ok "$1"; fi
}
replaced() {
    run "$1"
    if [ $code != 2 ]; then bad "$1" "exit $code, not 2: $(head -c 300 "$tmp/err")"
    elif [ -s "$tmp/out" ] || [ "$(wc -l <"$tmp/err")" != 1 ]; then bad "$1" "not one line: $(cat "$tmp/out" "$tmp/err")"
    elif ! grep -qE "^shoal: [^ ]+: .*('shoal |'make test'|leave this out)" "$tmp/err"; then bad "$1" "no replacement: $(cat "$tmp/err")"
    else ok "$1"; fi
}

works 'uv run python scripts/run_debate_local.py --topic "ping" --rounds 0'
holds "--rounds 0 prints its notice" "[info] Rounds set to 0; skipping debate execution." "$tmp/out"
if [ "$(grep -c 'this agent uses the base model' "$tmp/err")" = 3 ]; then ok "a missing adapter is a warning"; else bad "a missing adapter is a warning" "$(cat "$tmp/err")"; fi
while read -r line; do works "$line"; done <<'END'
uv run python scripts/train_lora_persona.py --data data/sft_persona_a.jsonl --out adapters/persona_a --r 32 --epochs 1 --bsz 1 --grad_accum 16
uv run python scripts/train_lora_persona.py --data data/sft_persona_b.jsonl --out adapters/persona_b
uv run python scripts/train_lora_persona.py --data data/sft_persona_c.jsonl --out adapters/persona_c
python scripts/train_lora_persona.py --data data/sft_persona_a.jsonl --out adapters/short --r 16 --grad_accum 32 --lr 2e-4 --target q_proj k_proj v_proj o_proj gate_proj up_proj down_proj
train_lora_persona --data data/sft_persona_a.jsonl --out adapters/other --base google/gemma-3-1b-it --r 2
uv run python scripts/run_debate_local.py --topic "2 + 3 は？" --rounds 3
uv run python scripts/run_debate_local.py --topic "2 + 3 は？"
python scripts/run_debate_local.py --topic "テスト"
run_debate_local --topic "ping" --adapters adapters/persona_a adapters/persona_b adapters/persona_c --rounds 1
uv run python scripts/evolve_loras.py --parents adapters/persona_a adapters/persona_b --child adapters/gen1_child_ab --alpha 0.6 --mut 0.03 --mut-std 0.01
uv run python scripts/evolve_loras.py --parents adapters/persona_a adapters/persona_b --child adapters/gen1_ab --alpha 0.5 --mut 0.05
uv run python scripts/evolve_loras.py --parents adapters/persona_a adapters/persona_b --child adapters/persona_d --alpha 0.6 --mut 0.03
python scripts/export_merge_utils.py --adapter adapters/persona_a --out merged
python scripts/export_merge_utils.py --base Qwen/Qwen3-4B-Instruct-2507 --adapter adapters/persona_a --out merged
merge --base Qwen/Qwen3-4B-Instruct-2507 --adapter adapters/persona_a --out merged.gguf
vllm serve Qwen/Qwen3-4B-Instruct-2507 --port 8000 --max-model-len 512 --tensor-parallel-size 1 --enable-lora --max-loras 8 --max-lora-rank 64 --lora-modules persona_a:adapters/persona_a persona_b:adapters/persona_b persona_c:adapters/persona_c --dry-run
vllm serve Qwen/Qwen3-4B-Instruct-2507 --tensor-parallel-size 2 --lora-modules persona_a=adapters/persona_a --dry-run
END
holds "several processors" "--tensor-parallel-size: one process computes" "$tmp/err"
for f in adapters/persona_a/adapter_config.json adapters/gen1_ab/adapter_model.safetensors merged/config.json merged.gguf; do
    if [ -s $f ]; then ok "$f"; else bad "$f" "it was not written"; fi
done
"$shoal" adapter blend --compat legacy --model "$model" --parents adapters/persona_a adapters/persona_b --out direct --alpha 0.6 --mut 0.03 >"$tmp/out" 2>&1
if cmp -s direct/adapter_model.safetensors adapters/persona_d/adapter_model.safetensors; then ok "evolve_loras is adapter blend"; else bad "evolve_loras is adapter blend" "$(head -c 300 "$tmp/out")"; fi
while read -r line; do replaced "$line"; done <<'END'
uv sync
uv sync --no-dev
uv venv
uv add lighteval
uv add "langgraph>=1.0.0"
uv run python -m compileall src scripts
uv run ruff check src scripts
docker compose up -d --build
docker compose up -d vllm
docker compose build trainer
docker exec -it vllm-qwen3 bash -lc "python -"
uv run python scripts/ping_vllm_persona.py --base-url http://localhost:8000/v1 --persona persona_a --prompt "2 + 3 は？"
uv run python scripts/ping_vllm_persona.py --persona persona_c --prompt "2 + 3 は？"
./scripts/eval_with_harness.sh
python -m lm_eval --model openai-chat-completions --model_args model=Qwen/Qwen3-4B-Instruct-2507:persona_a,base_url=http://localhost:8000/v1/chat/completions --tasks arc_easy,winogrande,hellaswag --batch_size auto --apply_chat_template --output_path out/persona_a_eval.json
pip install -r requirements.txt
pip install huggingface-hub
pip install llama-cpp-python
python test_distributed_extensions.py
python test_agent_models.py
python test_system_prompt_tuning.py
python test_llm_jp_fixed_v2.py
huggingface-cli download HuggingFaceTB/SmolLM-135M-Instruct-GGUF smollm-135m-instruct.q4_k_m.gguf --local-dir .
python test_agent.py
streamlit run streamlit_ui.py
streamlit run streamlit_simple_test.py
python test_ollama_connection.py
END

# ---- the team
console='python Console/console_app.py --model-type huggingface --model-name llm-jp/llm-jp-3-150m-instruct3'
each='--internal-model llm-jp/llm-jp-3-150m-instruct3 --output-model google/gemma-3-1b-it --summary-model google/gemma-3-1b-it'
works "$console --agents 2 --iterations 1"
works "python Console/console_app.py --model-type llama --model-path ./models/gemma-3-1b-it-q4_0.gguf --agents 3 --iterations 2"
works "$console $each --internal-temp 0.8 --output-temp 0.6 --summary-temp 0.5 --internal-tokens 200 --output-tokens 300 --summary-tokens 150 --agents 3 --iterations 2 --parallel --debug"
works "$console --internal-temp 0.7 --output-temp 0.6 --summary-temp 0.5 --agents 2 --iterations 1 --parallel"
works "$console $each --internal-temp 0.9 --output-temp 0.5 --summary-temp 0.4 --agents 4 --iterations 3 --parallel --no-local-files --debug --log"
works "$console --debug --log"
works "$console --no-local-files --agents 2 --internal-tokens 100 --output-tokens 150"
works "$console --agents 4 --iterations 2 --parallel --internal-temp 0.8 --output-temp 0.7"
works "$console --no-summary --cache-folder ./cache/models --agents 1"

# ---- the world
works "python main.py"
cat >.env <<'END'
# settings
MODEL_PATH=models/smollm-135m-instruct.q4_k_m.gguf
MODEL_TYPE=gguf  # gguf, mlx, pytorch
MAX_TOKENS=30    # speed
TEMPERATURE=0.7
ENABLE_ONLINE_LEARNING=true
LORA_RANK=4
export LEARNING_RATE="0.0001"
BATCH_SIZE=8
MUTATION_RATE=0.1
ELITE_RATIO=0.2  # top 20%
WORLD_SIZE = 12
INITIAL_ENERGY=100.0
ENERGY_FROM_FOOD=20.0
NUM_LLM_AGENTS=3
ENERGY_PER_STEP=0.5
MODE="mixed"
CURIOSITY=0.5
END
works "./run.sh"
holds "the keys of .env are options" \
    "this is: shoal world --world legacy models/smollm-135m-instruct.q4_k_m.gguf --temperature 0.7 --learn gradient --r 4 --lr 0.0001 --batch-size 8 --mutation-rate 0.1 --elites 4" "$tmp/err"
holds "and rules of survival" "--elites 4 --size 12 --energy 100 --food-energy 20 --agents 3" "$tmp/err"
holds "a key of another kind of policy" "MODE: all agents of a world have one kind of policy" "$tmp/err"
holds "the energy of a step" "ENERGY_PER_STEP: a step costs 1 energy" "$tmp/err"
holds "an unknown key" ".env: CURIOSITY is not known and has no effect" "$tmp/err"
for key in MODEL_TYPE MAX_TOKENS; do holds "$key has no effect" "$key: a" "$tmp/err"; done
export ENABLE_ONLINE_LEARNING=false DOWNLOAD_MODEL=1 ARCHITECTURE=1
works "python main.py --dry-run"
holds "a variable overrides .env" "--learn none" "$tmp/err"
for key in DOWNLOAD_MODEL ARCHITECTURE; do holds "$key has no effect" "$key: a document" "$tmp/err"; done
export ELITE_RATIO=many
run "python main.py --dry-run"
if [ $code = 2 ]; then ok "a fraction that is not a number"; else bad "a fraction that is not a number" "exit $code"; fi

# ---- settings
cat >config.yaml <<'END'
distributed_coordination:
  enable: true
  consensus_algorithm: "simple_majority"
  load_balance_strategy: "hybrid"
monitoring:
  enable_prometheus: true
  prometheus_port: 8000
  alert_check_interval: 30.0
  notification_channels:
    - type: "webhook"
      url: "http://localhost:8080/alerts"
autoscaling:
  enable: true
  scaling_strategy: "hybrid"
  min_workers: 1
  max_workers: 10
  target_cpu_utilization: 0.7
performance_optimization:
  enable: true
  enable_compression: true
  compression_algorithm: "lz4"
  enable_auto_optimization: true
END
"$shoal" config check config.yaml >"$tmp/out" 2>"$tmp/err"
code=$?
sed -n 's/^| key `\([^`]*\)` | \(.*\) |$/\1: \2/p' "$tmp/table" >"$tmp/keys"
sed 's/^config.yaml:[1-9][0-9]*: //' "$tmp/out" >"$tmp/explained"
if [ $code = 1 ] && [ -s "$tmp/keys" ] && cmp -s "$tmp/keys" "$tmp/explained"; then ok "a line for each key of YAML"; else bad "a line for each key of YAML" "exit $code: $(diff "$tmp/keys" "$tmp/explained" | head -n 5)"; fi
printf 'other: {key: 1}\n' >other.yaml
"$shoal" config check other.yaml >"$tmp/out" 2>"$tmp/err"
holds "an unknown key" "other.yaml:1: other.key: not known" "$tmp/out"
run "doctor --config config.yaml"
if [ $code = 2 ]; then holds "--config names no YAML" "'shoal config check config.yaml' says what replaces its keys" "$tmp/err"; else bad "--config names no YAML" "exit $code"; fi

# ---- what is not known, and a base that is not there
run "python scripts/other.py --topic x"
holds "an unknown script" "no command 'python'" "$tmp/err"
run "run_debate_local --topic x --adapters --rounds 0"
holds "a flag without its value" "'--adapters' needs a value" "$tmp/err"
mkdir "$tmp/empty" && cd "$tmp/empty" && ln -s "$model" "$tmp/empty/fry" || exit 1
run "run_debate_local --topic x --rounds 0 --base fry"
if [ $code = 0 ] && ! grep -q "is used" "$tmp/err"; then ok "--base"; else bad "--base" "exit $code: $(cat "$tmp/err")"; fi
run "run_debate_local --topic x --rounds 0 --base none"
if [ $code = 1 ]; then ok "a base that is missing"; else bad "a base that is missing" "exit $code: $(cat "$tmp/err")"; fi
run "run_debate_local --topic x --rounds 0"
holds "the starter model is the base" "there is no 'hf:Qwen/Qwen3-4B-Instruct-2507' here ('shoal pull' downloads it): 'models/fry' is used; --base names another model" "$tmp/err"
cd "$root" || exit 1
