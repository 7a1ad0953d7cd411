#!/bin/sh
# test_contamination: questions of the training data are found in another run: by `shoal eval`, `shoal debate`, a
# training that continues the adapter, and `shoal evolve`, whose founder is refused. Prints "ok NAME" and "not ok NAME:
# why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
model=$PWD/test/models/fry-1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
export SHOAL_CONFIG='' SHOAL_ALL_EXACT=1

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
has() { # NAME PATTERN FILE
    if grep -qE "$2" "$3"; then ok "$1"; else bad "$1" "$(cat "$3")"; fi
}
lacks() { # NAME PATTERN FILE
    if grep -qE "$2" "$3"; then bad "$1" "$(cat "$3")"; else ok "$1"; fi
}
contaminated() { # NAME ADAPTER QUESTIONS NEAR OF FILE
    python3 - "$@" <<'END' && ok "$1" || bad "$1" "$(cat "$6")"
import json, sys
name, adapter, questions, near, of, file = sys.argv[1:]
rows = [json.loads(line) for line in open(file)]
found = [c for row in rows for c in row.get("contaminated", [])]
assert [(c["adapter"], c["questions"], c["near"], c["of"]) for c in found] == \
    [(adapter, int(questions), int(near), int(of))], found
END
}
small() { "$shoal" train "$model" --max-steps 1 --bsz 1 --grad-accum 1 --r 1 --target q_proj --quiet "$@"; }

# Twenty training samples, one of them with a label; and twelve questions: three of the samples, one with other case and
# white space, one with another word, and seven new ones.
python3 - <<'END'
import json
known = ["Which river flows through the old town of Heidelberg?", "Why does ice float on water although it is solid?",
         "Who wrote the play in which a moor kills his wife?", "What did the first train in England carry in 1825?",
         "How many bones does an adult human have in one hand?"]
known += [f"How much is {i} and {i * 3}?" for i in range(15)]
asked = known[:2] + ["who wrote  THE play in which a moor kills his wife?", known[3], known[4].replace("adult", "old")]
asked += [f"How much is {i} and {i * 7}?" for i in range(50, 57)]
def write(name, questions, line):
    open(name, "w").write("".join(json.dumps(line(q)) + "\n" for q in questions))
chat = lambda q: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "yes"}]}
choice = lambda q: {"question": q, "choices": ["yes", "no"], "answer": 0}
write("train.jsonl", known[:3] + [f"Question: {known[3]}\nAnswer:"] + known[4:], chat)
write("other.jsonl", [f"How much is {i} and {i * 11}?" for i in range(20)], chat)
write("asked.jsonl", asked, choice)
write("test.jsonl", known, choice)
write("held.jsonl", known[:3] + [f"How much is {i} and {i * 7}?" for i in range(50, 57)], chat)
END

small --data train.jsonl --out a >log 2>&1 && small --data other.jsonl --out b >>log 2>&1 &&
    [ -f a/training_data.hashes ] && ok "training writes the hashes" || bad "training writes the hashes" "$(cat log)"
cat a/* >files
lacks "the adapter has no text of its data" Heidelberg files

"$shoal" eval "$model" --tasks asked.jsonl --adapter a b --json --quiet >out 2>log
contaminated "eval reports the questions" a 5 1 12 out
has "eval warns" "^warning: .*5 of 12 questions are in the training data of 'a' .*, 1 of them with other words" log
"$shoal" debate "$model" --tasks asked.jsonl --agents a b base --rounds 1 --samples 0 --json --quiet >out 2>log
contaminated "debate reports the questions" a 5 1 12 out
has "debate warns" "5 of 12 questions are in the training data of 'a'" log

"$shoal" adapter blend --model "$model" --parents b a --out child >log 2>&1
"$shoal" eval "$model" --tasks asked.jsonl --adapter child --json --quiet >out 2>log
contaminated "a blend inherits the data of its parents" child 5 1 12 out
small --data other.jsonl --init-adapter a --out next >log 2>&1
"$shoal" eval "$model" --tasks asked.jsonl --adapter next --json --quiet >out 2>log
contaminated "so does a training that continues" next 5 1 12 out

small --data other.jsonl --init-adapter a --eval-data held.jsonl --out refused >log 2>&1
has "held-out samples of an earlier training are refused" \
    '3 of 10 evaluation samples in .*held.jsonl.* hold out other samples' log
[ -e refused/adapter_config.json ] && bad "nothing is published" "$(ls refused)" || ok "nothing is published"

sed 's/a moor kills/a soldier kills/; s/Heidelberg/Ulm on the Danube/; s/ice float/ice stay/' held.jsonl >changed.jsonl
small --data train.jsonl --eval-data changed.jsonl --out near >log 2>&1
has "training warns of near duplicates in its own data" \
    'the questions of 3 of 10 evaluation samples are in the data with other words' log

recipe() { # FOUNDER TASK
    printf 'model: %s\npersonas: [a=%s, b=other.jsonl]\ntasks: [%s]\ntest_items: 8\n' "$model" "$1" "$2"
    printf 'train: {max_steps: 1, bsz: 1, grad_accum: 1, r: 1}\nfitness: {items: 4}\n'
    printf 'evolve: {search: none}\nrounds: 0\n'
}
for founder in train.jsonl a; do
    recipe $founder test.jsonl >recipe.yaml
    "$shoal" evolve recipe.yaml --quiet >log 2>&1
    has "evolve refuses the founder $founder" \
        "8 of 8 test questions of 'test.jsonl' are in the training data of founder 'a'.* take them out" log
done

rm a/training_data.hashes
"$shoal" eval "$model" --tasks asked.jsonl --adapter a --json --quiet >out 2>log
lacks "an adapter without the file is not reported" 'contaminated|training data' out
lacks "and gives no warning" 'training data' log
