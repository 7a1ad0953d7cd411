#!/bin/sh
# test_activated: activated LoRA (aLoRA) from the command line: `shoal train --alora-invocation` writes PEFT's key and
# learns the last answer only; data, options and operators that do not fit are refused; a server computes a conversation
# once for the base model and two activated adapters, and its replies are those of a server without a cache. Prints
# "ok NAME" and "not ok NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
model=$PWD/test/models/fry-1
tmp=$(mktemp -d) || exit 1
server=
trap '[ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null; rm -rf "$tmp"' EXIT
command -v python3 >/dev/null || { echo "skip activated: python3 is not installed"; exit 0; }
cd "$tmp" || exit 1
export SHOAL_CONFIG=''

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
# passes NAME COMMAND…; refused NAME WORDS COMMAND…: the command fails and its message has WORDS.
passes() {
    name=$1
    shift
    if "$@" >out 2>log; then ok "$name"; else bad "$name" "$(tail -c 300 log)"; fi
}
refused() {
    name=$1 words=$2
    shift 2
    if "$@" >out 2>log; then bad "$name" "exit 0"
    elif grep -qF -- "$words" log; then ok "$name"
    else bad "$name" "$(tail -c 300 log)"; fi
}
has() { # NAME PATTERN FILE
    if grep -qE -- "$2" "$3"; then ok "$1"; else bad "$1" "$(cat "$3")"; fi
}

# Conversations of two answers; the last one is a word that differs between the two adapters.
python3 - <<'END'
import json
for name, word, numbers in (("first", "alpha", range(6)), ("second", "beta", range(6)), ("held", "alpha", range(20, 26))):
    with open(name + ".jsonl", "w") as f:
        for i in numbers:
            f.write(json.dumps({"messages": [
                {"role": "user", "content": "%d + %d = ?" % (i, i + 3)}, {"role": "assistant", "content": "answer: %d" % (2 * i + 3)},
                {"role": "user", "content": "check"}, {"role": "assistant", "content": word}]}) + "\n")
with open("p.jsonl", "w") as f:
    f.write(json.dumps({"prompt": [{"role": "user", "content": "check"}], "chosen": "alpha", "rejected": "beta"}) + "\n")
with open("q.jsonl", "w") as f:
    f.write(json.dumps({"prompt": [{"role": "user", "content": "check"}], "answer": "alpha"}) + "\n")
END
CALL='<|im_start|>user
'
train() { "$shoal" train "$model" --r 8 --lr 4e-3 --runs runs --quiet "$@"; }
for i in first second; do
    passes "$i" train --data $i.jsonl --out $i --epochs 25 --alora-invocation "$CALL"
done
passes "the plan" train --data first.jsonl --dry-run --alora-invocation "$CALL" --json
python3 - <<'END' && ok "the targets are those of the last answer" || bad "the targets are those of the last answer" "$(head -c 600 out)"
import json
parts = json.load(open("out"))["first_batch"][0]["parts"]
assert [p["text"] for p in parts if p["learned"]] == ["alpha<|im_end|>"], parts
END
python3 - <<'END' && ok "PEFT's key" || bad "PEFT's key" "$(cat first/adapter_config.json)"
import json
ids = json.load(open("first/adapter_config.json"))["alora_invocation_tokens"]
assert len(ids) >= 2 and all(isinstance(i, int) for i in ids), ids
END
passes "info" "$shoal" adapter info --model "$model" first
has "info names the invocation" 'activated LoRA: .*"<\|im_start\|>user\\n"' out
passes "list" "$shoal" adapter list first
has "list names it" '1 version, activated LoRA' out
passes "convert" "$shoal" adapter convert --model "$model" first first.gguf
passes "info of GGUF" "$shoal" adapter info --model "$model" first.gguf
has "GGUF keeps the invocation" 'activated LoRA: .*user' out
passes "continue" train --data second.jsonl --out continued --init-adapter first --max-steps 2
has "a continued adapter keeps the invocation" 'alora_invocation_tokens' continued/adapter_config.json
passes "dpo" train --method dpo --data p.jsonl --out dpo --max-steps 2 --alora-invocation "$CALL"
passes "grpo" train --method grpo --data q.jsonl --out grpo --max-steps 2 --num-generations 4 --max-new-tokens 4 --alora-invocation "$CALL"
passes "held-out data" train --data first.jsonl --out held --max-steps 4 --eval-data held.jsonl --gate-alpha 1 --alora-invocation "$CALL"

refused "data without the invocation" "sample 1 does not have the adapter's invocation" train --data first.jsonl --out x --alora-invocation '<|im_start|>judge'
refused "prompts without it" "sample 1 does not have the adapter's invocation" train --method grpo --data q.jsonl --out x --alora-invocation '<|im_start|>judge'
refused "an empty invocation" "has 0 tokens" train --data first.jsonl --out x --alora-invocation ''
refused "DoRA" "leave --use-dora out" train --data first.jsonl --out x --use-dora --alora-invocation "$CALL"
refused "method es" "method es trains plain LoRA" train --method es --data first.jsonl --out x --alora-invocation "$CALL"
refused "with an initial adapter" "leave it or --init-adapter out" train --data first.jsonl --out x --init-adapter first --alora-invocation "$CALL"
refused "merge" "use it with --adapter" "$shoal" adapter merge "$model" first --out merged
refused "blend" "plain LoRA only" "$shoal" adapter blend --model "$model" --parents first second --out child

# up FLAGS…: starts a server; its address is in $url.
up() {
    [ -n "$server" ] && kill "$server" && wait "$server"
    : >listening
    "$shoal" serve "$model" --adapter first=first --adapter second=second --state state --port 0 --json --drain-seconds 2 "$@" >listening 2>log &
    server=$!
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' listening)
        [ -n "$url" ] && return 0
        sleep 0.1
    done
    bad "the server starts" "$(head -c 300 log)"
    exit 0
}
cat >client.py <<'END'
import json, sys, urllib.request
names = sys.argv[2:]
chat = [{"role": "user", "content": "2 + 5 = ?"}, {"role": "assistant", "content": "answer: 7"}, {"role": "user", "content": "check"}]
for name in names:
    body = json.dumps({"model": name, "messages": chat, "max_tokens": 8, "temperature": 0, "logprobs": True}).encode()
    r = json.load(urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body)))
    c = r["choices"][0]
    print(r["usage"]["prompt_tokens_details"]["cached_tokens"], json.dumps([c["message"]["content"], c["logprobs"]["content"]]))
END
up
BASE=$(python3 -c 'import json, sys, urllib.request; print([m["id"] for m in json.load(urllib.request.urlopen(sys.argv[1] + "/v1/models"))["data"] if m["id"] not in ("first", "second")][0])' "$url")
python3 client.py "$url" "$BASE" first second first >shared 2>log || bad "the requests" "$(tail -c 300 log)"
: >alone
for i in "$BASE" first second; do
    up
    python3 client.py "$url" "$i" >>alone 2>log || bad "a request alone" "$(tail -c 300 log)"
done
python3 - <<'END' && ok "base and adapters share the conversation, replies are those without a cache" || bad "base and adapters share the conversation, replies are those without a cache" "$(cut -c 1-60 shared alone)"
shared = [line.split(" ", 1) for line in open("shared")]
alone = [line.split(" ", 1) for line in open("alone")]
assert [r for _, r in shared] == [r for _, r in alone] + [alone[1][1]] and len(shared) == 4
cached = [int(n) for n, _ in shared]
assert cached[0] == 0 and cached[1] == cached[2] > 8 and cached[3] >= cached[1], cached
assert all(int(n) == 0 for n, _ in alone), alone
END
has "the first adapter answers" 'alpha' shared
has "the second adapter answers" 'beta' shared
