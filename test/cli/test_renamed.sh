#!/bin/sh
# test_renamed: earlier names of values (src/base/renamed.c, docs/COMPATIBILITY.md) are accepted with one note on stderr, and give the same
# bytes as the current names.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
cd "$(dirname "$0")/../.." || exit 1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG=''

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
same() { if [ -s "$2" ] && cmp -s "$2" "$3"; then ok "$1"; else bad "$1" "'$2' and '$3' differ"; fi; }
# notes NAME COUNT COMMAND…: the command succeeds and stderr has COUNT notes about earlier names.
notes() {
    title=$1 count=$2
    shift 2
    "$@" >"$tmp/out" 2>"$tmp/err" </dev/null || { bad "$title" "exit $?: $(head -c 300 "$tmp/err")"; return; }
    got=$(grep -c 'is named .* since 0\.2; the old name still works$' "$tmp/err")
    if [ "$got" = "$count" ]; then ok "$title"; else bad "$title" "$got notes, not $count: $(head -c 300 "$tmp/err")"; fi
}

# ---- rules of worlds
for rules in seed:1 legacy:0; do
    name=${rules%:*} n=${rules#*:}
    notes "--world $name" "$n" "$shoal" world --world $name --policy rule random --maps 2 --steps 20 --agents 2
    notes "trace of $name" "$n" "$shoal" world --world $name --steps 30 --agents 3 --record "$tmp/$name.jsonl"
    notes "replay of the trace of $name" 0 "$shoal" world --replay "$tmp/$name.jsonl"
    printf 'rules: %s\nsize: 12\n' $name >"$tmp/$name.yaml"
    notes "rules: $name in a file" "$n" "$shoal" world --world "$tmp/$name.yaml" --steps 30 --agents 3 --record "$tmp/$name-file.jsonl"
    printf '{"reset": {"seed": 7, "options": {"rules": "%s"}}}\n{"reset": {"seed": 8, "options": {"rules": "%s"}}}\n{"state": {}}\n' $name $name >"$tmp/requests"
    "$shoal" world --pipe --agents 2 <"$tmp/requests" >"$tmp/$name.pipe" 2>"$tmp/err"
    if [ "$(grep -c 'still works' "$tmp/err")" = "$n" ]; then ok "rules of a reset: $name"; else bad "rules of a reset: $name" "$(cat "$tmp/err")"; fi
done
same "the same trace" "$tmp/seed.jsonl" "$tmp/legacy.jsonl"
same "the same trace from files" "$tmp/seed-file.jsonl" "$tmp/legacy-file.jsonl"
same "the same replies" "$tmp/seed.pipe" "$tmp/legacy.pipe"
if head -n 1 "$tmp/legacy.jsonl" | grep -q '"rules":{"rules":"seed",'; then ok "traces keep the stored name"; else bad "traces keep the stored name" "$(head -c 200 "$tmp/legacy.jsonl")"; fi

# ---- sections of a recipe
for section in learn:1 finetune:0; do
    printf 'model: test/models/fry-1\npersonas: [a=data/personas/critic.jsonl, b=data/personas/explorer.jsonl]\ntasks: [pick]\n%s: {lr: 0.001}\n' "${section%:*}" >"$tmp/${section%:*}.yaml"
    notes "section ${section%:*}" "${section#*:}" "$shoal" evolve "$tmp/${section%:*}.yaml" --runs "$tmp/runs" --dry-run --json
done
cat "$tmp/learn.yaml" >"$tmp/both.yaml" && echo 'finetune: {lr: 0.002}' >>"$tmp/both.yaml"
if "$shoal" evolve "$tmp/both.yaml" --runs "$tmp/runs" --dry-run >"$tmp/out" 2>"$tmp/err"; then bad "both names of a section" "accepted"
elif grep -q "sections 'learn' and 'finetune' are the same" "$tmp/err"; then ok "both names of a section"; else bad "both names of a section" "$(cat "$tmp/err")"; fi

# ---- operators and --compat
if "$shoal" model new --shape tiny-qwen3 --seed 3 "$tmp/m.gguf" 2>"$tmp/err"; then
    for i in 1 2; do
        "$shoal" adapter new --model "$tmp/m.gguf" --rank 4 --seed $i "$tmp/n$i" >"$tmp/out" 2>"$tmp/err"
        "$shoal" adapter blend --model "$tmp/m.gguf" --parents "$tmp/n$i" "$tmp/n$i" --child "$tmp/p$i" --compat legacy --mut 1 --mut-std 0.1 --seed $i >"$tmp/out" 2>"$tmp/err"
    done
    for name in seed:seed legacy:factor_blend; do
        n=0
        [ $name = seed:seed ] && n=1
        notes "adapter blend --compat ${name%:*}" "$n" "$shoal" adapter blend --model "$tmp/m.gguf" --parents "$tmp/p1" "$tmp/p2" --child "$tmp/${name%:*}" --compat "${name%:*}"
        notes "adapter blend --operator ${name#*:}" "$n" "$shoal" adapter blend --model "$tmp/m.gguf" --parents "$tmp/p1" "$tmp/p2" --child "$tmp/by-${name#*:}" --operator "${name#*:}"
    done
    for f in adapter_model.safetensors adapter_config.json; do
        same "$f of both names of --compat" "$tmp/seed/$f" "$tmp/legacy/$f"
        same "$f of both names of the operator" "$tmp/by-seed/$f" "$tmp/by-factor_blend/$f"
    done
    "$shoal" adapter inspect "$tmp/by-factor_blend" --model "$tmp/m.gguf" >"$tmp/out" 2>"$tmp/err"
    if grep -q 'operator.*seed' "$tmp/out"; then ok "lineages keep the stored name"; else bad "lineages keep the stored name" "$(cat "$tmp/out" "$tmp/err")"; fi
    for name in seed:1 factor_blend:0; do
        notes "world --crossover ${name%:*}" "${name#*:}" "$shoal" world test/models/fry-1 --num-adapters 2 --agents 2 --crossover "${name%:*}" --runs "$tmp/runs" --dry-run --json
        grep -o 'world-[0-9a-f]*' "$tmp/out" | head -n 1 >"$tmp/id-${name%:*}"
    done
    same "both names give the same run" "$tmp/id-seed" "$tmp/id-factor_blend"
else
    bad "model new" "$(cat "$tmp/err")"
fi

# ---- protocols
for pair in seed:legacy v4:revise v4c:revise-on-error v4ct:revise-on-error-tail v4t:revise-tail; do
    "$shoal" debate --show-protocol "${pair#*:}" >"$tmp/now" 2>"$tmp/err"
    if [ -s "$tmp/err" ]; then bad "--show-protocol ${pair#*:}" "$(cat "$tmp/err")"; else ok "--show-protocol ${pair#*:}"; fi
    notes "--show-protocol ${pair%:*}" 1 "$shoal" debate --show-protocol "${pair%:*}"
    same "one file by both names" "$tmp/now" "$tmp/out"
    printf 'protocol: %s\nagents: [{}, {}]\n' "${pair%:*}" >"$tmp/team.yaml"
    notes "team with protocol ${pair%:*}" 1 "$shoal" debate test/models/fry-1 --team "$tmp/team.yaml" --topic x --choices a b --dry-run
    for p in "${pair%:*}:1" "${pair#*:}:0"; do
        notes "--protocol ${p%:*}" "${p#*:}" "$shoal" debate test/models/fry-1 --agents base base --topic x --choices a b --protocol "${p%:*}" --dry-run
    done
done
"$shoal" debate --show-protocol legacy | sed 's/reply: legacy/reply: seed/' >"$tmp/reply.yaml"
notes "reply: seed" 1 "$shoal" debate test/models/fry-1 --agents base base --topic x --choices a b --protocol "$tmp/reply.yaml" --dry-run
for name in seed:1 legacy:0; do
    notes "debate --compat ${name%:*}" "${name#*:}" "$shoal" debate test/models/fry-1 --agents base base --topic x --choices a b --compat "${name%:*}" --dry-run
    notes "ask --compat ${name%:*}" "${name#*:}" "$shoal" ask test/models/fry-1 x --compat "${name%:*}" --dry-run
done
for command in "debate test/models/fry-1 --agents base base --topic x" "ask test/models/fry-1 x" "adapter blend --model test/models/fry-1 --parents a b --child c"; do
    # shellcheck disable=SC2086
    "$shoal" $command --compat other --dry-run >"$tmp/out" 2>"$tmp/err"
    if [ $? = 2 ] && grep -q "no compatibility with 'other'; there is legacy" "$tmp/err"; then ok "${command%% *} --compat other"; else bad "${command%% *} --compat other" "$(cat "$tmp/err")"; fi
done

# ---- options
# sets COMMAND WORD VALUE OPTION NOTES: the variable of WORD sets OPTION, with this number of notes.
sets() {
    variable=SHOAL_$(echo "$1_$2" | tr 'a-z-' 'A-Z_')
    env "$variable=$3" "$shoal" config explain "$1" --json >"$tmp/out" 2>"$tmp/err"
    if grep -q "\"$4\".*\"$3\".*\"$variable\"" "$tmp/out" && [ "$(grep -c "is named '$4' now" "$tmp/err")" = "$5" ]; then ok "$variable"
    else bad "$variable" "$(grep "\"$4\"" "$tmp/out" | head -c 200) $(head -c 200 "$tmp/err")"; fi
}
while read -r command word value option n; do sets "$command" "$word" "$value" "$option" "$n"; done <<'END'
run n 7 max-tokens 0
run n-predict 7 max-tokens 0
run temp 0.5 temperature 0
run lora f16 lora-dtype 1
chat n 7 max-tokens 0
chat n-predict 7 max-tokens 0
chat temp 0.5 temperature 0
synth n 7 max-tokens 0
synth temp 0.5 temperature 0
train max-new-tokens 7 max-tokens 1
train max-completion-length 7 max-tokens 0
ask adapters base adapter 0
ask internal-temp 0.5 internal-temperature 1
ask summary-temp 0.5 summary-temperature 1
ask output-temp 0.5 output-temperature 1
ask internal-tokens 7 internal-max-tokens 1
ask summary-tokens 7 summary-max-tokens 1
ask output-tokens 7 output-max-tokens 1
eval adapters x adapter 0
debate adapter x agents 0
debate adapters x agents 0
bench adapters 3 num-adapters 0
bench targets q_proj target 0
bench quant nf4 type 0
adapter child x out 0
adapter targets q_proj target 0
convert o x out 0
convert quant nf4 type 0
model quant nf4 type 0
pull to x out 0
END
printf '[chat]\nn = 5\nmax-tokens = 6\n' >"$tmp/both.conf"
"$shoal" config check "$tmp/both.conf" >"$tmp/out" 2>"$tmp/err"
if grep -q "'max-tokens' is set in line 2 already" "$tmp/err"; then ok "both words of an option"; else bad "both words of an option" "$(cat "$tmp/out" "$tmp/err")"; fi

"$shoal" adapter new --model test/models/fry-1 --rank 2 --seed 3 "$tmp/zero" >"$tmp/out" 2>"$tmp/err" &&
    "$shoal" adapter blend --model test/models/fry-1 --parents "$tmp/zero" "$tmp/zero" --out "$tmp/fry" --compat legacy --mut 1 --mut-std 0.2 --quiet >"$tmp/out" 2>"$tmp/err" ||
    bad "adapter blend --out" "$(head -c 300 "$tmp/err")"
generate() { "$shoal" run test/models/fry-1 --chat 'sort: k b x' --threads 1 "$@" >"$tmp/out" 2>"$tmp/err"; }
generate --adapter "$tmp/fry" --max-tokens 9 --temperature 0 && cp "$tmp/out" "$tmp/words"
generate --max-tokens 9 --temperature 0
if cmp -s "$tmp/out" "$tmp/words"; then bad "an adapter with an effect" "$(head -c 200 "$tmp/out")"; else ok "an adapter with an effect"; fi
for flags in "--lora $tmp/fry -n 9 --temp 0" "--lora=$tmp/fry --n-predict 9 --temp 0" "--lora $tmp/fry --lora-dtype f32 --n 9 --temp 0"; do
    # shellcheck disable=SC2086
    generate $flags
    same "run ${flags#--lora?"$tmp"/fry }" "$tmp/words" "$tmp/out"
    if grep -q 'is named' "$tmp/err"; then bad "no note of llama.cpp's words" "$(cat "$tmp/err")"; else ok "no note of llama.cpp's words"; fi
done
# lora NAME MESSAGE FLAGS…: stderr has the message.
lora() {
    title=$1 message=$2
    shift 2
    "$shoal" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    if grep -qF "$message" "$tmp/err"; then ok "$title"; else bad "$title" "$(head -c 300 "$tmp/err")"; fi
}
for dtype in f32 f16 bf16 i8; do lora "--lora $dtype" "the option 'lora' is named 'lora-dtype' now" run test/models/fry-1 -p x --lora $dtype --dry-run; done
lora "--lora FILE of eval" "adapter '$tmp/none' does not exist" eval test/models/fry-1 --tasks pick --n 2 --lora "$tmp/none"
lora "--lora FILE of debate" "adapter '$tmp/none' does not exist" debate test/models/fry-1 --topic x --choices a b --lora "$tmp/none"
lora "--lora FILE of a command without adapters" "no element '$tmp/none'" bench --what peak --lora "$tmp/none"
lora "--lora without a value" "'--lora' needs a value" run test/models/fry-1 -p x --lora

talk() { echo 'sort: k b x' | "$shoal" chat test/models/fry-1 --store "$tmp/chat.db" --threads 1 --quiet "$@" >"$tmp/out" 2>"$tmp/err"; }
talk --max-tokens 5 --temperature 0 && cp "$tmp/out" "$tmp/talk"
talk -n 5 --temp 0
same "both words of chat" "$tmp/talk" "$tmp/out"
for flags in "--max-tokens 4 --temperature 0" "--n 4 --temp 0"; do
    # shellcheck disable=SC2086
    if talk --team --agents 1 --iterations 1 --facts rules $flags; then ok "chat --team $flags"; else bad "chat --team $flags" "$(head -c 300 "$tmp/err")"; fi
done

# ---- one word for one meaning in the options of all commands (not in the keys of recipes)
"$shoal" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p' >"$tmp/commands"
while read -r command; do
    "$shoal" "$command" --help-all | sed '/^keys of the recipe/,$d' | sed -n 's/^  --\(\[no-\]\)\{0,1\}\([a-z0-9-]*\).*/\2/p' >"$tmp/options.$command"
done <"$tmp/commands"
if [ "$(cat "$tmp"/options.* | wc -l)" -gt 300 ]; then ok "options of all commands"; else bad "options of all commands" "$(cat "$tmp"/options.* | wc -l)"; fi
# Each line has a word, the word to use instead, and the commands in which the word has another meaning.
while read -r word use except; do
    left=''
    while read -r command; do
        case " $except " in *" $command "*) ;; *) ! grep -qx -- "$word" "$tmp/options.$command" || left="$left $command" ;; esac
    done <"$tmp/commands"
    if [ -z "$left" ]; then ok "no --$word"; else bad "no --$word" "--$use instead in$left"; fi
done <<'END'
temp temperature
[a-z]*-temp temperature
n max-tokens debate eval model grow team agent
n-predict max-tokens
max-new-tokens max-tokens
max-completion-length max-tokens
random-seed seed
lora adapter
loras adapter
adapters adapter chat
o out
to out
output out
output-dir out
child out
quant type
dtype type
targets target
target-modules target
END
left=''
while read -r command; do
    grep -qxE 'top-p|top-k|min-p' "$tmp/options.$command" || continue
    for word in temperature max-tokens top-p top-k min-p seed; do grep -qx "$word" "$tmp/options.$command" || left="$left $command: --$word"; done
done <"$tmp/commands"
if [ -z "$left" ]; then ok "sampling options"; else bad "sampling options" "missing:$left"; fi
