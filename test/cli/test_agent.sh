#!/bin/sh
# test_agent: shoal agent: the list of tools, questions as an argument and on stdin, steps and answers, limits, errors of
# the command line. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
shoal=$(realpath "${SHOAL:-build/shoal}")
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG='' LANG=C.UTF-8 HOME="$tmp"
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
agent() { "$shoal" agent models/fry --exact "$@" >"$tmp/out" 2>"$tmp/err" </dev/null; }

# same NAME GOT WANT; has NAME FILE TEXT
same() { if [ "$2" = "$3" ]; then ok "$1"; else bad "$1" "'$2' is not '$3'"; fi; }
has() { if grep -qF -- "$3" "$2"; then ok "$1"; else bad "$1" "no '$3' in $(cat "$2")"; fi; }
# refused NAME TEXT ARGUMENT...: a usage error with the text.
refused() {
    name=$1 text=$2
    shift 2
    agent "$@"
    same "$name: status" $? 2
    has "$name" "$tmp/err" "$text"
}

"$shoal" agent --list-tools >"$tmp/out"
same "tools are listed" "$(cut -d' ' -f1 "$tmp/out" | tr '\n' ' ')" \
    "calculator clock knowledge memory_search memory_write ask debate read_file list_files python sh check_code http_get "

agent 'sort: k b x'
same "a question that needs no tool" "$(tail -n 1 "$tmp/out")" "answer: b k x"
has "the end is reported" "$tmp/err" "answered, 1 step"

mkdir "$tmp/notes" && printf 'The rooms.\n\nThe room of tom is 217.\n' >"$tmp/notes/rooms.txt"
printf '豆腐は冷蔵庫にあります。\n' >"$tmp/notes/豆腐.txt"
"$shoal" knowledge add "$tmp/k.db" "$tmp/notes" --quiet >/dev/null || bad "knowledge" "cannot be added"
agent --tools knowledge --knowledge "$tmp/k.db" --form react --max-steps 2 --max-tokens 40 --json --quiet 'in which room is tom?'
same "the form react: status" $? 0
python3 - "$tmp/out" <<'PY'
import json, sys
v = json.loads(open(sys.argv[1]).read())
steps = v['steps']
good = v['end'] in ('answered', 'step limit') and steps[-1]['tool'] is None and len(steps) <= 3
good &= all(abs(sum(s['probabilities'].values()) - 1) < 1e-4 for s in steps)
good &= all(s['tool'] is None or (set(s['arguments']) == {'query'} and isinstance(s['observation'], str)) for s in steps)
print('ok the JSON of a run' if good else 'not ok the JSON of a run: %s' % v)
PY

printf 'sort: k b x\n\nsort: d a c\n' | "$shoal" agent models/fry --exact --json --quiet >"$tmp/out" 2>"$tmp/err"
same "each line of stdin is a message" "$(wc -l <"$tmp/out")" 2
cp "$tmp/out" "$tmp/first"
printf 'sort: k b x\n\nsort: d a c\n' | "$shoal" agent models/fry --exact --json --quiet --threads 1 >"$tmp/out" 2>"$tmp/err"
changing='s/"seconds":[0-9.e-]*//g; s/"cached":[0-9]*//g'
same "the same with one thread" "$(sed "$changing" "$tmp/out")" "$(sed "$changing" "$tmp/first")"

agent --agent examples/agent.yaml --json --quiet 'sort: k b x'
has "a file is an agent" "$tmp/out" '"probabilities":{"calculator":'
printf 'tools: [clock]\nmax_tokens: 2\n' >"$tmp/agent.yaml"
agent --agent "$tmp/agent.yaml" --json --quiet 'sort: k b x'
has "the tools of the file" "$tmp/out" '"probabilities":{"clock":'
has "the limits of the file" "$tmp/out" '"truncated":true'
agent --agent "$tmp/agent.yaml" --max-tokens 40 --json --quiet 'sort: k b x'
has "options override the file" "$tmp/out" '"truncated":false'
printf 'tools: [clock]\nsteps: 2\n' >"$tmp/agent.yaml"
refused "an unknown key of the file" "agent.yaml', line 2: unknown key 'steps'" --agent "$tmp/agent.yaml" question

agent --form react --temperature 3 --top-p 1 --json --quiet 'sort: k b x'
same "an answer of random bytes: status" $? 0
if python3 -c 'import json, sys; assert "\ufffd" in json.load(open(sys.argv[1], encoding="utf-8"))["answer"]' "$tmp/out"; then
    ok "it is valid text"
else
    bad "it is valid text" "$(cat "$tmp/out")"
fi

refused "an unknown tool" "there is no tool 'abacus'" --tools abacus question
refused "the tool knowledge without a database" "needs --knowledge DB" --tools knowledge question
refused "files without a folder" "needs --root DIR" --tools read_file question
refused "http_get without hosts" "needs --allow-host HOST" --tools http_get question
refused "an unknown form" "there is no form 'xml'" --form xml question
refused "two tools of one name" "two tools" --tools clock,clock question
agent --tools calculator --max-model-len 64 question
same "no room: status" $? 1
has "no room says what to do" "$tmp/err" "--max-model-len"
