#!/bin/sh
# test_old_files: files that earlier versions wrote open with this version and give the recorded results: adapters, recipes and settings
# with every option name and alias, runs to resume, recorded calls, worlds, a server's state and its backup.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary. Needs no network but loopback.
#
# test/fixtures/0.1 holds the files, the command lines (commands.txt) and the expected values (expected.txt). test/fixtures/make.sh made
# them with the program of that version. Command lines come from there and not from here, because a rename must not change their spelling.
#
# A renamed option, recipe key, JSON key or file needs an alias or a migration, never a changed fixture. Checks that compare "calls" compare
# request keys: if they change, stores of earlier runs no longer answer the calls that they hold.
# RECORD=FILE appends values that expected.txt lacks to FILE; only make.sh sets it.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
cd "$(dirname "$0")/.." || exit 1
root=$PWD
old=$root/test/fixtures/0.1
tmp=$(mktemp -d) || exit 1
server=''
stop() {
    [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server"; }
    server=''
}
trap 'stop; rm -rf "$tmp"' EXIT
unset SHOAL_API_KEY SHOAL_ALERT_SLACK HF_TOKEN
export SHOAL_CONFIG='' SHOAL_CACHE=cache LC_ALL=C
# Keys and values were f32 in 0.1. Runs of 0.1 that are continued have f32 without an option.
named=$(for c in ASK CHAT DEBATE EMBED EVAL EVOLVE PRETRAIN RUN SERVE SYNTH TRAIN; do echo SHOAL_${c}_KV_CACHE_DTYPE; done)
kv_f32() { for v in $named; do export "$v=f32"; done; }
kv_default() { for v in $named; do unset "$v"; done; }
kv_f32

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
here=$tmp/here
mkdir -p "$here/models/fry" && cp -r "$old/." "$here/" && cp "$root"/test/models/fry-1/config.json "$root"/test/models/fry-1/model.safetensors \
    "$root"/test/models/fry-1/tokenizer*.json "$here/models/fry/" && chmod -R go= "$here" && cd "$here" && mkdir new || { bad "copy of the fixtures" "cannot be made"; exit 1; }

expected() { awk -v name="$1" '$1 == name { sub(/^[^ ]* /, ""); print; exit }' expected.txt; }
typed() { awk -v name="$1:" '$1 == name { sub(/^[^ ]* /, ""); print; exit }' commands.txt; }
# same NAME VALUE: the value is the recorded one.
same() {
    want=$(expected "$1")
    if [ -z "$2" ]; then bad "$1" "no value; stderr: $(tail -c 300 new/err 2>/dev/null)"
    elif [ -z "$want" ] && [ -n "${RECORD:-}" ]; then echo "$1 $2" >>"$RECORD"; ok "$1"
    elif [ "$want" = "$2" ]; then ok "$1"
    else bad "$1" "$(printf '%.300s, not %.300s' "$2" "$want")"; fi
}
holds() { if grep -qF -- "$2" "$3"; then ok "$1"; else bad "$1" "no '$2' in: $(head -c 300 "$3")"; fi; }
inside='' # a prefix of commands, such as bwrap
# go NAME: runs a command of commands.txt; its output is in new/out. Returns 1, and reports it, when the command fails.
go() {
    line=$(typed "$1")
    [ -n "$line" ] || { bad "$1" "commands.txt has no such line"; return 1; }
    eval "$inside \"\$shoal\" $line --quiet --exact --threads 1" >new/out 2>new/err </dev/null && return 0
    bad "$1" "exit $? of: $(printf '%.200s' "$line"): $(tail -n 1 new/err | cut -c1-300)"
    return 1
}
# gives NAME EXTRACTOR…: the command succeeds, and the extractor prints the recorded value.
gives() {
    go "$1" || return
    name=$1
    shift
    same "$name" "$("$@" 2>>new/err)"
}

# Extractors. They look for hashes, names and numbers, not for keys, so that a renamed key of an output is no failure.
one_line() { tr -s '\n' ' ' <"$1" | sed 's/ $//'; }
sum() { cat >new/summed && [ -s new/summed ] && sha256sum <new/summed | cut -d' ' -f1; }
hash_of() { "$shoal" adapter info "$1" --model models/fry --json --exact --threads 1 --quiet | sed 's/.*"hash":"\([0-9a-f]*\)".*/\1/'; }
hashes_of() { for d in "$@"; do [ ! -e "$d/adapter_config.json" ] || hash_of "$d"; done | tr '\n' ' ' | sed 's/ $//'; }
found() { grep -oE "$1" "$2" | tr '\n' ' ' | sed 's/ *$//'; }
evaluated_adapters() { sed 's/,"manifest":.*//' new/out >new/results && found 'gen_[0-9]+/[a-z0-9]+' new/results; }
last_hash() { sed 's/,"manifest":.*//' "$1" | grep -oE '[0-9a-f]{64}' | tail -n 1; }
calls() { "$shoal" replay --list --store "$1" | cut -c1-16 | sort | sum; }
numbers() { grep -oE -e '-?[0-9]+\.[0-9]+(e-?[0-9]+)?' "$1" | awk '{ printf "%.6g\n", $1 }' | sort | sum; }
generations() { grep -oE '[0-9a-f]{64}' "$1/evolution.jsonl" | sum; }
tree() { grep -oE '[a-z0-9]+ +[0-9.]+ \([^)]*\) +[0-9a-f]{8}' "$1" | awk '{ printf "%s %s ", $1, $NF }' | sed 's/ $//'; }
# 0.1 listed killed runs as running.
runs_table() { awk '{ sub("interrupted", "running", $3); print $1, $2, $3 }' "$1" | sort | tr '\n' ' ' | sed 's/ $//'; }
minds_of() { grep -oE '[0-9a-f]{64}' "$1/state.json" | sort | sum; }

# new_run PREFIX: the folder of a run that the fixtures do not have.
new_run() { for r in runs/"$1"-*; do [ -e "$old/$r" ] || echo "$r"; done; }
# continued NAME RUN STEPS: the run did not begin at its first step, so it has read the checkpoint.
continued() {
    steps=$(grep -c . "$2/train.jsonl" 2>/dev/null) || steps=0
    if [ "$steps" -gt 0 ] && [ "$steps" -lt "$3" ]; then ok "$1"; else bad "$1" "$steps of $3 steps in '$2'"; fi
}

# ---- adapters
for a in lora rslora dora child mind lora.gguf; do
    "$shoal" adapter inspect "adapters/$a" --model models/fry --json --exact --threads 1 --quiet >new/out 2>new/err
    same "adapter.$a" "$(found '[0-9a-f]{64}' new/out)" # its own hash, and those of its lineage
done
same adapter.rejected "$(hash_of "$(echo adapters/lora/rejected-*)" 2>new/err)"
for a in adapters/lora adapters/lora.gguf adapters/dora adapters/rslora adapters/mind runs/old-s1/adapters/gen_2/*; do
    "$shoal" run models/fry --chat 'number?' --adapter "$a" --choices 1 2 --json --exact --threads 1 >new/out 2>new/err
    same "computed.${a##*/}" "$(numbers new/out)"
done
gives adapter.list found '[0-9a-f]{12}|first|second|best' new/out
gives adapter.convert hash_of new/back
gives adapter.blend hash_of new/child
gives adapter.resize hash_of new/small
gives adapter.new hash_of new/begun
go adapter.merge && ok adapter.merge

# ---- recorded calls
"$shoal" replay --list --store runs/calls.db >new/list 2>new/err
left=''
for k in $(expected calls); do
    grep -q "^$k" new/list || left="$left $k is not listed"
    "$shoal" replay "$k" --store runs/calls.db --threads 1 >new/out 2>new/err && grep -q 'same bits' new/out || left="$left $k: $(head -n 1 new/out) $(head -n 1 new/err)"
done
if [ -z "$left" ]; then ok "replay of recorded calls"; else bad "replay of recorded calls" "$left"; fi

kv_default

# ---- runs; trainings that were killed after a checkpoint
gives runs.list runs_table new/out
for m in dpo:16 rloo:10 es:12; do
    steps=${m#*:} m=${m%:*}
    gives half.$m hashes_of half/$m half/$m/a half/$m/b
    continued "checkpoint of $m" "$(new_run train-$m)" "$steps"
done
# The name of a run depends on the absolute path of its output, so its log continues only below the path that it was made in.
if bwrap --dev-bind / / true 2>/dev/null; then
    cp "$shoal" new/shoal
    inside="bwrap --dev-bind / / --tmpfs /tmp --bind $here /tmp/shoal-0.1 --chdir /tmp/shoal-0.1"
    before=$(echo runs/train-sft-*) program=$shoal shoal=new/shoal
    gives half.sft hashes_of half/sft
    shoal=$program inside=''
    # The times in the first lines tell a log that was continued from one that began again.
    head -n 2 "$before/train.jsonl" >new/head
    if [ "$(echo runs/train-sft-*)" = "$before" ] && [ "$(grep -c . "$before/train.jsonl")" = 24 ] && head -n 2 "$old/$before/train.jsonl" | cmp -s - new/head
    then ok "a resumed training continues its log"; else bad "a resumed training continues its log" "$(wc -l runs/train-sft-*/train.jsonl | tr '\n' ' ')"; fi
else
    gives half.sft hashes_of half/sft
    echo "skip a resumed training continues its log: bwrap cannot run"
fi

kv_f32

# ---- recipes and options, by their names and by their aliases. Held-out samples from the training data are refused now, and
# training options that a recipe does not name follow from its data: it names the defaults of 0.1 here.
sed -i '/^eval_data: /d' recipes/train.yaml
sed -i 's|^train: {|&bsz: 1, grad_accum: 16, kv_cache_dtype: f32, |' recipes/synth.yaml
for r in recipe.train:recipe recipe.aliases:aliases alias.train:flags; do gives "${r%:*}" hash_of "new/${r#*:}"; done
gives recipe.dpo hash_of new/dpo
gives recipe.es hash_of new/es
gives forms hash_of new/forms
gives recipe.rloo hash_of new/rloo
gives alias.rloo hash_of new/rloo-flags
go recipe.pretrain && same recipe.pretrain "$("$shoal" model info new/tiny --json | grep -oE '[0-9a-f]{64}')"
eval "\"\$shoal\" $(typed recipe.synth) --exact --threads 1" >new/out 2>new/err </dev/null
same recipe.synth "$(found '[0-9a-f]{64}' new/synth.jsonl)"
holds "recorded calls are used again" "8 of 8" new/err
same synthesized "$(hash_of new/synthesized)"
same calls "$("$shoal" replay --list --store runs/calls.db | cut -c1-16 | sort | tr '\n' ' ' | sed 's/ $//')"
gives synth.topics calls new/topics.db
gives recipe.breed generations new/runs/again
gives recipe.coefficients generations new/runs/again-c
gives recipe.strategies generations new/runs/again-e
for r in rules map flags; do gives world.$r last_hash new/$r.jsonl; done
for e in tasks:eval working:working shots:shots team:team; do gives "eval.${e%:*}" calls "new/${e#*:}.db"; done
same eval.items "$(numbers new/items.jsonl)"
export SHOAL_DEBATE_BASE=false # version 0.1 did not ask the base model
for d in team:debate judge:judge agents:agents; do gives "debate.${d%:*}" calls "new/${d#*:}.db"; done
gives alias.debate calls new/adapters.db
unset SHOAL_DEBATE_BASE
for a in ask:ask alias.ask:iter ask.path:path ask.protocol:protocol ask.slots:slots; do gives "${a%:*}" calls "new/${a#*:}.db"; done
for r in batch choices regex; do gives run.$r calls new/$r.db; done
gives run.schema calls new/json.db
gives run.grammar calls new/gbnf.db
gives run.short one_line new/out
gives embed numbers new/out

# Commands KIND/VALUE: each value that an option takes is accepted.
for kind in $(sed -n 's|^\([a-z]*\)/.*|\1|p' commands.txt | sort -u); do
    failed=''
    for name in $(sed -n "s|^\\($kind/[^:]*\\):.*|\\1|p" commands.txt); do
        eval "\"\$shoal\" $(typed "$name") --quiet --exact --threads 1" >new/out 2>new/err </dev/null || failed="$failed $name: $(tail -n 2 new/err | head -n 1)"
    done
    if [ -z "$failed" ]; then ok "values of $kind"; else bad "values of $kind" "$failed"; fi
done
while read -r key words; do
    failed='' section=${key%.*} part=", ${key#*.}: "
    [ "$section" = top ] && part="${key#*.}: "
    for word in $words; do
        sed "s|, @$section\$|$part$word|; s|^@$section\$|$part$word|; s|, @$section}|$part$word}|; s|, @[a-z]*}|}|; /^@/d" recipes/small.yaml >new/small.yaml
        "$shoal" evolve new/small.yaml --dry-run --quiet >new/out 2>new/err || failed="$failed $word: $(head -n 1 new/err)"
    done
    if [ -z "$failed" ]; then ok "values of $key"; else bad "values of $key" "$failed"; fi
done <values.txt

kv_default

# ---- settings: every line of the files and every variable sets an option to its value
# Two options that are one option now cannot both be set. Each half of the settings lacks one of the two.
for half in '1 adapter.child chat.n chat.temp' '2 adapter.out chat.max-tokens chat.temperature'; do
    dropped=${half#* } half=${half%% *}
    awk -v dropped=" $dropped " '/^\[/ { section = substr($0, 2, length($0) - 2) }
        { print index(dropped, " " section "." $1 " ") ? "" : $0 }' settings/options.conf >settings/options-$half.conf
    grep -vE "^SHOAL_($(echo "$dropped" | tr 'a-z. -' 'A-Z_|_'))=" settings/env.txt >settings/env-$half.txt
done
for f in options-1 options-2 aliases aliases-*; do
    f=$(basename "$(echo settings/$f.conf)")
    case $f in *'*'*) continue ;; esac
    "$shoal" config check "settings/$f" >new/out 2>new/err || bad "config check $f" "$(head -n 1 new/err)"
    for c in $(sed -n 's/^\[\(.*\)\]$/\1/p' "settings/$f"); do "$shoal" config explain "$c" --config "settings/$f" --json 2>>new/err; done >new/out
    awk -v file="settings/$f" 'NR == FNR { split($0, v, " = "); if (v[2] != "") value[FNR] = v[2]; next }
        match($0, file ":[0-9]+\"") { n = substr($0, RSTART + length(file) + 1, RLENGTH - length(file) - 2)
            if (index($0, "\"" value[n] "\"") || (value[n] != "" && /"secret":true/)) delete value[n] }
        END { for (n in value) printf "line %s (%s) ", n, value[n] }' "settings/$f" new/out >new/left
    if [ -s new/left ]; then bad "settings in $f" "$(head -c 300 new/left)"; else ok "settings in $f"; fi
done
left=''
for c in $(for half in 1 2; do sed -n "s/^\[\(.*\)\]$/\1:$half/p" settings/options.conf; done); do
    variables=settings/env-${c#*:}.txt c=${c%:*}
    upper=$(echo "$c" | tr a-z A-Z)
    # shellcheck disable=SC2046
    env $(grep "^SHOAL_${upper}_" $variables) "$shoal" config explain "$c" --json 2>new/err >new/out
    n=$(grep -c "^SHOAL_${upper}_" $variables)
    # a renamed option gets one note
    grep -v "^the option '.*' is named '.*' now" new/err >new/other
    [ "$(grep -c "\"SHOAL_${upper}_[A-Z0-9_]*\"" new/out)" = "$n" ] && [ ! -s new/other ] && [ -z "$(sort new/err | uniq -d)" ] ||
        left="$left $c: $(head -n 1 new/other)"
done
if [ -z "$left" ]; then ok "settings in variables"; else bad "settings in variables" "$left"; fi
sed 's/"max-waiting": "2048"/"max-waiting": "1024"/' settings/defaults.json >new/defaults.json
printf 'defaults = defaults.json\n' >new/pinned.conf
"$shoal" config explain serve --config new/pinned.conf >new/out 2>new/err
holds "changed defaults are reported" "was 1024" new/err
go metrics
left=''
for m in $(grep -ohE 'shoal_[a-z0-9_]+' settings/alerts.yaml settings/dashboard.json | sed -E 's/_(bucket|sum|count)$//' | sort -u); do
    grep -qE "$m(_count|_sum)?([^a-z0-9_]|\$)" new/out || left="$left $m"
done
if [ -z "$left" ]; then ok "metrics of alert rules and dashboard"; else bad "metrics of alert rules and dashboard" "there is no$left"; fi

SHOAL_CPU=scalar "$shoal" doctor --json >new/out 2>new/err
holds "SHOAL_CPU" '"level":"scalar"' new/out

# ---- evolutions
gives lineage.tree tree new/out
gives lineage.one tree new/out
gives runs.compare awk '/^old/ { print $1, $2, $3, $4 }' new/out
gives resume.done found 'best \([a-z0-9]+\)|[0-9]+\.[0-9] %' new/out
gives resume.fork found 'best \([a-z0-9]+\)|[0-9]+\.[0-9] %' new/out
gives replay.generation found '[0-9a-f]{12}' new/out
for r in fork shared zeros; do gives replay.$r found '[0-9a-f]{12}' new/out; done
gives eval.run evaluated_adapters
gives fork generations runs/forked
gives resume.paused generations runs/paused
if cmp -s runs/paused/train.jsonl "$old/runs/paused/train.jsonl"; then ok "founders of a paused run"; else bad "founders of a paused run" "they were trained again"; fi
gives resume.killed generations runs/killed

# ---- worlds
for l in gradient es; do
    run=runs/$(expected life.$l.id)
    touch new/before
    gives life.$l minds_of "$run"
    if [ "$(find "$run/state.json" "$run/trace-1.jsonl" -newer new/before)" = "$run/state.json" ]; then ok "state of life.$l"; else bad "state of life.$l" "it began anew"; fi
done
kv_f32
export SHOAL_WORLD_KV_CACHE_DTYPE=f32
go life.lean && same life.lean "$(minds_of "$(echo new/runs/world-*)")"
unset SHOAL_WORLD_KV_CACHE_DTYPE
if [ "$(echo runs/world-* | wc -w)" = 2 ]; then ok "resumed lives continue in their folders"; else bad "resumed lives continue in their folders" "$(echo runs/world-*)"; fi
gives world.replay last_hash new/out
gives world.fork last_hash new/fork.jsonl
{ sed 's/^{"state"/{"restore"/' world.json; echo '{"step": {"agent_0": "move_south", "agent_1": "I go up"}}'; echo '{"state": {}}'; } | "$shoal" world --pipe >new/out 2>new/err
same world.restore "$(last_hash new/out)"

# ---- output of synth and chat as training data
for d in synth talk; do
    "$shoal" train models/fry --data $d.jsonl --out new/of-$d --runs new/runs --r 1 --target q_proj --layers 5 --max-steps 1 --bsz 1 --grad-accum 16 --lr 2e-4 --exact --threads 1 >new/out 2>new/err
    same data.$d "$(hash_of new/of-$d)"
done

# ---- sessions, conversations, knowledge, models
gives run.session one_line new/out
printf '/facts\nsort: c a\n' | "$shoal" chat models/fry --conversation anna --n 8 --temp 0 --facts rules --store runs/calls.db --exact --quiet --threads 1 >new/out 2>new/err
same chat.anna "$(one_line new/out)"
holds "facts of a chat" Anna new/out
go ask.again && holds "conversation of ask" "Why is the sky blue?" new/out
gives ask.context calls runs/calls.db
gives ask.memory one_line new/out
go ask.forget && ok ask.forget
gives knowledge.list found '[a-z]+\.(md|txt)' new/out
gives knowledge.search found '[a-z]+\.(md|txt)|walk sideways' new/out
gives knowledge.meaning found '[a-z]+\.(md|txt)' new/out
gives knowledge.add found '[0-9]+ (added|documents|chunks)' new/out
gives quantized last_hash new/out
gives quantized.says one_line new/out
gives pulled found 'shoal/old' new/out
gives pulled.says one_line new/out

# ---- a backup
go kept.check && ok kept.check
if go kept.restore; then
    "$shoal" key list --store new/state/serve.db >new/out 2>new/err
    same kept.keys "$(found 'key-[0-9a-f]{16}|boss|anna|gone' new/out)"
    same kept.calls "$(calls new/kept/calls.db)"
    left=''
    for f in $(cd state && find . -type f ! -name '*.db' ! -name lock); do cmp -s "state/$f" "new/state/$f" || left="$left $f"; done
    if [ -z "$left" ]; then ok "files of a backup"; else bad "files of a backup" "$left"; fi
fi

# ---- a server with the old state and the old settings file
url=''
if command -v curl >/dev/null; then
    : >new/listening
    SHOAL_API_KEY=of-a-variable "$shoal" serve models/fry --config settings/serve.conf --json >new/listening 2>new/said &
    server=$!
    for _ in $(seq 300); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' new/listening)
        [ -n "$url" ] && break
        kill -0 $server 2>/dev/null || break
        sleep 0.05
    done
    if [ -n "$url" ]; then ok "server start"; else bad "server start" "$(head -c 300 new/said)"; fi
else
    echo "skip server start: curl is not installed"
fi
if [ -n "$url" ]; then
    get() { # KEY PATH MORE…: the reply is in new/out, its status is printed
        key=$(expected "key.$1") path=$2
        shift 2
        : >new/out
        curl -sS --max-time 20 -o new/out -D new/headers -w '%{http_code}' -H "Authorization: Bearer $key" "$url$path" "$@" 2>new/err
    }
    question='"messages": [{"role": "user", "content": "12 + 30 = ?"}], "max_tokens": 6, "temperature": 0'
    said() { sed -n 's/.*"content":"\([^"]*\)".*/\1/p' new/out; }
    same key.anna.status "$(get anna /v1/chat/completions -d "{\"model\": \"mind\", $question}")"
    same key.anna.says "$(said)"
    same key.anna.jobs "$(get anna /v1/jobs)"
    same key.gone.status "$(get gone /v1/models)"
    same key.boss.jobs "$(get boss /v1/jobs)"
    same jobs "$(found 'job-[0-9a-f]{8}|"(done|paused|running)"' new/out)"
    get boss "/v1/jobs/$(expected job.done)/results" >new/status
    if cmp -s new/out "state/jobs/$(expected job.done)/stdout.jsonl"; then ok "results of a done job"; else bad "results of a done job" "$(head -c 200 new/out)"; fi
    get boss /v1/jobs -H 'Idempotency-Key: first' -d '{"kind": "world", "args": [], "options": {"policy": "rule", "steps": 10, "maps": 2}}' >new/status
    holds "idempotency key of a job" "$(expected job.done)" new/out
    get boss "/v1/jobs/$(expected job.paused)/resume" -X POST >new/status
    get boss "/v1/jobs/$(expected job.paused)/events" >new/status
    same job.trained "$(hash_of state/out/jobbed 2>new/err)"
    continued "checkpoint of a job" "$(new_run train-jobbed)" 30
    get boss /v1/models >new/status
    same models "$(found '"id":"[a-z:]*"' new/out | sed 's, "id":"auto",,')" # version 0.1 had no "auto"
    get boss /v1/chat/completions -d "{\"model\": \"jobbed\", $question}" >new/status
    same job.says "$(said)"
    get anna /api/show -d '{"model": "gruff"}' >new/status
    holds "a made model" "Be gruff." new/out
    get anna /api/generate -d '{"model": "gruff", "prompt": "12 + 30 = ?", "stream": false}' >new/status
    same gruff "$(sed -n 's/.*"response":"\([^"]*\)".*/\1/p' new/out)"
    get anna /v1/ask -d '{"question": "And at night?", "agents": 1, "iterations": 1, "language": "en", "conversation": "anna", "max_tokens": 4}' >new/status
    holds "conversation of an API key" "Why is the sky blue?" new/out
    get boss /v1/feedback >new/status
    holds "a rating" "$(expected feedback)" new/out
    get boss '/v1/feedback/export?form=sft' >new/status
    same feedback.sft "$(one_line new/out)"
    get boss /v1/ab/trial >new/status
    holds "a running experiment" '"running"' new/out
    same trial "$(found '"(a|b|requests|outcomes|share|alpha|min_pairs|max_pairs)":[0-9.]+' new/out)"
    get anna /v1/chat/completions -d "{\"model\": \"a\", $question}" >new/status
    holds "requests of an experiment" "trial/" new/headers
    for m in mind uploaded b c; do
        get anna /v1/chat/completions -d "{\"model\": \"$m\", \"logprobs\": true, $question}" >new/status
        numbers new/out >new/$m
        same "served.$m" "$(cat new/$m)"
    done
    if cmp -s new/b new/c && ! cmp -s new/b new/mind; then ok "a promoted adapter"; else bad "a promoted adapter" "'c' is not served as 'b'"; fi
    get boss /v1/ab/ended >new/status
    same ended "$(found '"(state|serves)":"[a-z0-9]+"' new/out)"
    same key.variable.status "$(curl -sS -o new/out -w '%{http_code}' -H 'X-API-Key: of-a-variable' "$url/v1/jobs" 2>new/err)"
    same team.status "$(get anna /v1/debate -d '{"team": "pair", "question": "x", "choices": ["a", "b"], "rounds": 1}')"
    get anna /v1/runs >new/status
    left=''
    for r in $(cd "$old/runs" && ls -d */); do grep -qF "\"${r%/}\"" new/out || left="$left $r"; done
    if [ -z "$left" ]; then ok "runs of a server"; else bad "runs of a server" "there is no$left"; fi
    get anna /v1/runs/old-s1 >new/status
    same run.family "$(found '"name":"(g[0-9]c[0-9]|critic|explorer)"' new/out)"
    get anna "/v1/worlds/frames?run=$(expected life.gradient.id)&generation=1&from=0&n=4" >new/status
    same frames "$(grep -oE '\[[-0-9.e]+(,[-0-9.e]+){5}\]' new/out | head -4 | tr '\n' ' ' | sed 's/ $//')"
    get boss /v1/backups >new/status
    holds "backups of a server" "$(expected kept)" new/out
    get boss "/v1/backups/$(expected kept)/check" -X POST >new/status
    holds "check of a backup" '"problems":[]' new/out
    stop
fi
gives adapter.rollback hash_of adapters/lora
