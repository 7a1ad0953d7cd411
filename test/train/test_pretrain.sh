#!/bin/sh
# test_pretrain: `shoal pretrain`: a stopped run continues with the same bits, whatever the processor level and the number
# of threads; its model has the recipe's tokens, template and dtype; the starter model's recipe still makes the first 200
# updates of its log, to the bit. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
export SHOAL_CONFIG=''

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
same() { # NAME A B
    if [ -n "$2" ] && [ "$2" = "$3" ]; then ok "$1"; else bad "$1" "'$2' and '$3'"; fi
}
pretrain() { "$shoal" pretrain "$@" --exact --quiet >out 2>&1; }
checkpoint() { # FOLDER UPDATE: the hash in the log
    grep "\"checkpoint_at\":$2," "$1/log.jsonl" | grep -oE '[0-9a-f]{64}'
}
weights() { sha256sum "$1/model.safetensors" | cut -c1-64; }

cp "$root/models/fry/chat_template.jinja" . 2>/dev/null ||
    printf '{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}' >chat_template.jinja
cat >recipe.yaml <<'END'
shape: fry-1
vocab: 420
tokenizer_items: 100
special_tokens: ["<|image|>", "<think>", "</think>"]
prose: 2
chat_template: chat_template.jinja
mix: [copy=1, sums=1, dialogue=0.5, tools=0.5, about=1]
final_mix: [copy=1, judge=1, machine=1]
final_mix_from: 6
chain_of_thought_fraction: 0.5
think: 0.5
multi_turn: 0.5
debate: 0.2
steps: 12
rows: 512
dtype: bf16
eval_every: 12
eval_items: 4
save_every: 5
seed: 7
END
pretrain recipe.yaml --out whole --tensorboard && ok "a run" || bad "a run" "$(cat out)"
pretrain recipe.yaml --out parts --stop-at 4 --threads 1 && pretrain recipe.yaml --out parts --stop-at 7 &&
    echo '{"update":9,"loss":9}' >>parts/log.jsonl && cp whole/events.out.tfevents.* parts &&
    head -c 100 parts/events.out.tfevents.* >parts/events.out.tfevents.0000000001.shoal &&
    pretrain recipe.yaml --out parts --tensorboard ||
    bad "a run in parts" "$(cat out)"
same "a run in three parts makes the same weights" "$(weights whole)" "$(weights parts)"
same "checkpoints have the same bits" "$(checkpoint whole 5)" "$(checkpoint parts 5)"
kept() { grep -oE '"(update|accuracy_at|checkpoint_at)":[0-9]+' "$1/log.jsonl" | tr '\n' ' '; }
same "the log of a run in parts has the updates of a whole one, none after a checkpoint twice" "$(kept whole | sed 's/"checkpoint_at":5 /"checkpoint_at":4 "checkpoint_at":5 "checkpoint_at":7 /')" "$(kept parts)"
if command -v python3 >/dev/null; then
    for at in whole parts; do
        if n=$(python3 "$root/test/train/event_files.py" $at $at/log.jsonl 2>why) && [ "$n" -gt 5 ]
        then ok "event files of $at have the log's figures, each update once"; else bad "event files of $at" "$n $(tail -n 1 why)"; fi
    done
else
    echo "skip event files: there is no python3"
fi
if [ -e parts/checkpoint.bin ]; then bad "a finished run has no checkpoint" "it has"; else ok "a finished run has no checkpoint"; fi
sed '/^final_mix/d' recipe.yaml >one-mix.yaml
pretrain one-mix.yaml --out one-mix
same "final_mix changes nothing before its update" "$(checkpoint whole 5)" "$(checkpoint one-mix 5)"
if [ "$(checkpoint whole 10)" = "$(checkpoint one-mix 10)" ]; then bad "final_mix changes the samples" "it does not"; else ok "final_mix changes the samples"; fi
same "the accuracy covers both mixes" "$(grep -oE '"(machine|sums)":' whole/log.jsonl | sort | tr '\n' ' ')" '"machine": "sums": '
sed 's/judge=1/juge=1/' recipe.yaml >typo.yaml
pretrain typo.yaml --out typo
grep -q "final_mix: no task family in 'juge=1'" out && ok "an unknown family is refused" || bad "an unknown family is refused" "$(cat out)"
SHOAL_CPU=scalar pretrain recipe.yaml --out scalar --stop-at 2
pretrain recipe.yaml --out native --stop-at 2
same "the scalar level makes the same bits" "$(checkpoint scalar 2)" "$(checkpoint native 2)"
if [ -e native/model.safetensors ] && [ -e native/checkpoint.bin ]; then ok "a stopped run writes model and checkpoint"; else bad "a stopped run writes model and checkpoint" "$(ls native)"; fi

python3 - whole <<'END' && ok "tokens, template and dtype are the recipe's" || bad "tokens, template and dtype are the recipe's" "see above"
import json, sys
folder = sys.argv[1]
tokens = {t["content"]: t for t in json.load(open(folder + "/tokenizer.json"))["added_tokens"]}
assert tokens["<|image|>"]["special"] and not tokens["<think>"]["special"] and not tokens["</think>"]["special"], tokens
assert json.load(open(folder + "/tokenizer_config.json"))["chat_template"] == open("chat_template.jinja").read()
assert json.load(open(folder + "/config.json"))["torch_dtype"] == "bfloat16"
END
sed 's/bf16/q8_0/' recipe.yaml >q8.yaml
pretrain q8.yaml --out q8
grep -q "'q8_0' is none of f32, bf16 and f16" out && ok "an unknown dtype is refused" || bad "an unknown dtype is refused" "$(cat out)"
printf '{%% if %%}' >bad.jinja
sed 's/chat_template.jinja/bad.jinja/' recipe.yaml >template.yaml
pretrain template.yaml --out template
grep -q "bad.jinja" out && ok "a broken chat template is refused" || bad "a broken chat template is refused" "$(cat out)"

printf 'shape: fry-1\nvocab: 700\ntokenizer_items: 100\nsteps: 1\nrows: 4096\neval_every: 0\n' >plain.yaml
pretrain plain.yaml --out plain && ok "a recipe without a mix and a template" || bad "a recipe without a mix and a template" "$(cat out)"
{ cat plain.yaml; echo 'mix: [tools=1]'; } >tools.yaml
pretrain tools.yaml --out tools
grep -q "the model has no chat template that knows tools" out && ok "tools without a template are refused" || bad "tools without a template are refused" "$(cat out)"
{ cat plain.yaml; echo 'mix: [needle=1]'; } >needle.yaml
pretrain needle.yaml --out needle
grep -q "after the model's 512 positions: leave its family out of the mix" out && ok "a family of long texts is refused" || bad "a family of long texts is refused" "$(cat out)"

log=$root/models/fry/log.jsonl
if grep -q '"checkpoint_at":200,' "$log"; then
    pretrain "$root/models/fry/recipe.yaml" --out fry --stop-at 200 || bad "the starter model's recipe runs" "$(cat out)"
    same "the starter model's recipe makes the first 200 updates of its log" "$(checkpoint fry 200)" \
        "$(grep '"checkpoint_at":200,' "$log" | grep -oE '[0-9a-f]{64}')"
else
    echo "skip the starter model's recipe: its log has no checkpoint"
fi
