#!/bin/sh
# test_vocab: `shoal train` of embedding and head: PEFT's files of whole tables, token rows and low-rank parts, training
# that continues from them, and refusals. Prints "ok NAME" and "not ok NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
export SHOAL_CONFIG='' SHOAL_ALL_EXACT=1

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
model=$root/test/models/fry-1
"$shoal" model data --tasks pick --n 40 --seed 3 40.jsonl --quiet
train() { # OUT OPTION…
    out=$1
    shift
    "$shoal" train "$model" --data 40.jsonl --out "$out" --r 4 --max-steps 12 --bsz 4 --lr 0.003 --json --quiet "$@" >"$out.json" 2>"$out.log"
}

# The tensors outside of the layers and the keys of the config that name them; and the loss fell.
files() { # NAME OUT EXPECTED
    python3 - "$2" "$3" <<'END' && ok "$1" || bad "$1" "$(cat "$2.json" "$2.log")"
import json, struct, sys
out, expected = sys.argv[1], json.loads(sys.argv[2])
raw = open(out + "/adapter_model.safetensors", "rb").read()
tensors = json.loads(raw[8:8 + struct.unpack("<Q", raw[:8])[0]])
prefix = "base_model.model."
found = {k[len(prefix):]: v["shape"] for k, v in tensors.items() if k.startswith(prefix) and ".layers." not in k}
config = json.load(open(out + "/adapter_config.json"))
found["config"] = [config["modules_to_save"], config.get("trainable_token_indices"), config["target_modules"]]
assert found == expected, found
effect = json.loads(open(out + ".json").read().splitlines()[-1])["effect"]
assert effect["after"] < 0.9 * effect["before"], effect
END
}
vocab=$(python3 -c "import json; c = json.load(open('$model/config.json')); print(c['vocab_size'], c['hidden_size'], sep=', ')")
v=${vocab%,*} d=${vocab#*, }

train tables --target q_proj --modules-to-save embed_tokens lm_head
files "whole tables" tables "{\"model.embed_tokens.weight\": [$vocab], \"lm_head.weight\": [$vocab], \"config\": [[\"embed_tokens\", \"lm_head\"], null, [\"q_proj\"]]}"
train rows --target q_proj v_proj --trainable-token-indices 40 7-9,5
files "token rows" rows "{\"model.embed_tokens.token_adapter.trainable_tokens_delta\": [5, $d], \"config\": [null, {\"embed_tokens\": [5, 7, 8, 9, 40]}, [\"q_proj\", \"v_proj\"]]}"
train lowrank --target q_proj,embed_tokens lm_head
files "low-rank parts" lowrank "{\"model.embed_tokens.lora_embedding_A\": [4, $v], \"model.embed_tokens.lora_embedding_B\": [$d, 4], \"lm_head.lora_A.weight\": [4, $d], \"lm_head.lora_B.weight\": [$v, 4], \"config\": [null, null, [\"embed_tokens\", \"lm_head\", \"q_proj\"]]}"

for start in tables rows lowrank; do
    if train "again-$start" --init-adapter "$start" && python3 - "$start.json" "again-$start.json" <<'END'; then
import json, sys
first, second = (json.loads(open(f).read().splitlines()[-1])["effect"] for f in sys.argv[1:])
assert abs(second["before"] - first["after"]) < 1e-4 and second["after"] < second["before"], (first, second)
END
        ok "training continues from $start"
    else
        bad "training continues from $start" "$(cat "again-$start.json" "again-$start.log")"
    fi
done

"$shoal" train "$model" --data 40.jsonl --out rows2 --r 4 --max-steps 12 --bsz 4 --lr 0.003 --quiet --target q_proj v_proj \
    --trainable-token-indices 40 7-9,5 --threads 1 >/dev/null 2>log
if cmp -s rows/adapter_model.safetensors rows2/adapter_model.safetensors; then ok "same bytes with one thread"; else bad "same bytes with one thread" "$(cat log)"; fi

refused() { # NAME MESSAGE OPTION…
    name=$1 message=$2
    shift 2
    if train refused "$@"; then
        bad "$name" "accepted"
    elif grep -qF -- "$message" refused.log; then
        ok "$name"
    else
        bad "$name" "$(cat refused.log)"
    fi
}
refused "another module to save" "'mlp' cannot be trained as a whole; embed_tokens and lm_head can" --modules-to-save lm_head mlp
refused "a token outside the vocabulary" "'$v' is neither a token id nor a range of ids from 0 to $((v - 1))" --trainable-token-indices "$v"
refused "a token twice" "token 6 is named twice" --trainable-token-indices 6 5-7
refused "a table in two ways" "'lm_head' is in more than one of target" --target lm_head --modules-to-save lm_head
refused "DoRA of the head" "DoRA is for the projections of the layers" --target lm_head q_proj --use-dora
refused "evolution strategies" "method es is for plain LoRA: leave --modules-to-save out" --method es --modules-to-save lm_head
printf 'model: %s\ntasks: [pick]\npersonas: [a=40.jsonl, b=40.jsonl]\ntrain:\n  use-dora: true\n' "$model" >recipe.yaml
"$shoal" evolve recipe.yaml --runs runs >out 2>log
if grep -q "evolution is for plain LoRA: leave --use-dora out" log; then ok "evolution"; else bad "evolution" "$(cat out log)"; fi
