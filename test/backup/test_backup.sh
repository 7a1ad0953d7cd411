#!/bin/sh
# test_backup: keys, jobs, derived models and adapter versions of a server, backed up while it runs and restored after
# its state is deleted: with 'shoal restore', and over HTTP at the next start. Prints "ok NAME", "not ok NAME: why" and
# "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
server=
stop() {
    [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server"
    server=
}
trap 'stop; rm -rf "$tmp"' EXIT
command -v curl >/dev/null || { echo "skip backup: curl is not installed"; exit 0; }

ok() { echo "ok backup: $1"; }
bad() { echo "not ok backup: $1: $2"; }
same() { if [ "$2" = "$3" ] && [ -n "$2" ]; then ok "$1"; else bad "$1" "$(printf '%.200s / %.200s' "$2" "$3")"; fi; }
need() { "$@" >"$tmp/out" 2>"$tmp/err" || { bad "$*" "$(tail -n 2 "$tmp/err")"; exit 1; }; }
holds() { if grep -qF -- "$2" "$3"; then ok "$1"; else bad "$1" "no '$2' in: $(head -c 300 "$3")"; fi; }

runs=$tmp/runs state=$tmp/runs/serve place="--state $tmp/runs/serve --runs $tmp/runs"
key=
get() { curl -sS --max-time 60 -H "Authorization: Bearer $key" "$@"; }
start() {
    : >"$tmp/listening"
    # shellcheck disable=SC2086
    "$shoal" serve test/models/fry-1 --port 0 --json $place --no-jobs-idle --adapter-dir "$tmp/adapters" >"$tmp/listening" 2>"$tmp/log" &
    server=$!
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$tmp/listening")
        [ -n "$url" ] && return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 0.1
    done
    bad "the server starts" "$(head -c 300 "$tmp/log")"
    exit 1
}

# ---- a server with keys, a job, a derived model and an adapter
need "$shoal" adapter new --model test/models/fry-1 --rank 2 --seed 1 "$tmp/adapters/critic"
need "$shoal" key add admin --scope chat jobs admin --store "$state/serve.db"
key=$(cat "$tmp/out")
need "$shoal" key add leaked --scope chat --store "$state/serve.db"
leaked=$(cat "$tmp/out")
start
need get -X POST "$url/v1/jobs" -d '{"kind": "world", "args": [], "options": {"policy": "rule", "steps": 30}}'
job=$(sed 's/.*"id":"\([^"]*\)".*/\1/' "$tmp/out")
get "$url/v1/jobs/$job/events" >/dev/null
need get --fail-with-body "$url/api/create" -d '{"model": "gruff", "from": "fry-1", "system": "Be gruff.", "stream": false}'
jobs() { get "$url/v1/jobs/$1" | sed 's/,"progress":{[^}]*}//'; } # a finished job's progress is not stored
job_before=$(jobs "$job")
keys() { "$shoal" key list --json --store "$state/serve.db" | sed 's/,"last_used":[0-9.]*//; s/"\(all\|today\)":{[^}]*}//g'; }
keys_before=$(keys)
adapter=$(cat "$tmp/adapters/critic/"* | cksum)

# ---- backup of a running server
need "$shoal" backup "$tmp/kept" $place --also "$tmp/adapters"
id=$(cat "$tmp/out")
need "$shoal" backup "$tmp/kept" --check
need "$shoal" backup "$tmp/kept" --list --json
holds "the backup is listed" "\"id\":\"$id\"" "$tmp/out"
if "$shoal" restore "$tmp/kept" $place --replace >/dev/null 2>"$tmp/err"; then bad "a state in use is not replaced" "it was"
else holds "a state in use is not replaced" "a server uses" "$tmp/err"; fi
if grep -rqF -- "$key" "$tmp/kept"; then bad "no secret is in it" "the key is"; else ok "no secret is in it"; fi

# ---- deleted and restored
stop
rm -rf "$runs" "$tmp/adapters"
need "$shoal" restore "$tmp/kept" $place --also "$tmp/adapters"
same "the keys are restored" "$keys_before" "$(keys)"
same "the adapter is restored" "$adapter" "$(cat "$tmp/adapters/critic/"* | cksum)"
start
same "the job is restored" "$job_before" "$(jobs "$job")"
get "$url/v1/models" >"$tmp/models"
holds "the derived model is restored" '"gruff' "$tmp/models"
same "results are restored" "$(get "$url/v1/jobs/$job/results" | wc -l)" "$(grep -c . "$state/jobs/$job/stdout.jsonl")"

# ---- over HTTP
need get --fail-with-body -X POST "$url/v1/backups"
first=$(sed 's/.*"id":"\([^"]*\)".*/\1/' "$tmp/out")
need get --fail-with-body -X POST "$url/v1/backups/$first/check"
holds "a check finds no problem" '"problems":[]' "$tmp/out"
need "$shoal" key add later --store "$state/serve.db"
later=$(cat "$tmp/out")
need "$shoal" key revoke leaked --store "$state/serve.db"
need get --fail-with-body -X DELETE "$url/v1/jobs/$job"
need get --fail-with-body -X POST "$url/v1/backups/$first/restore"
need get "$url/v1/backups"
holds "a restore is noted" "\"restore\":{" "$tmp/out"
code=$(get -o /dev/null -w '%{http_code}' -X DELETE "$url/v1/backups/$first")
same "a backup scheduled for restore is not deleted" 409 "$code"
same "nothing is restored yet" 404 "$(get -o /dev/null -w '%{http_code}' "$url/v1/jobs/$job")"
stop
start
holds "the next start reports the restore" "is as in backup '$first'" "$tmp/log"
same "the job is restored by the next start" "$job_before" "$(jobs "$job")"
status() { curl -sS -o /dev/null -w '%{http_code}' -H "Authorization: Bearer $1" "$url/v1/models"; }
same "a key that was valid then and is now is valid" 200 "$(status "$key")"
same "a key that was revoked since stays revoked" 401 "$(status "$leaked")"
same "a key that was made since is revoked" 401 "$(status "$later")"
same "and both are recorded" 2 "$(keys | grep -o '"revoked":[1-9]' | grep -c .)"
if ls -d "$state".before-* >/dev/null 2>&1; then ok "the previous state is kept"; else bad "the previous state is kept" "it is not"; fi
need get "$url/v1/backups"
holds "it happens once" '"restore":null' "$tmp/out"
same "a missing backup" 404 "$(get -o /dev/null -w '%{http_code}' -X POST "$url/v1/backups/20260101-000000-000/check")"
same "others may not" 401 "$(curl -s -o /dev/null -w '%{http_code}' "$url/v1/backups")"
need get --fail-with-body -X DELETE "$url/v1/backups/$first"
need get "$url/v1/backups"
holds "a backup is deleted" '"backups":[]' "$tmp/out"

# ---- restore over HTTP, then a damaged backup
need get --fail-with-body -X POST "$url/v1/backups"
first=$(sed 's/.*"id":"\([^"]*\)".*/\1/' "$tmp/out")
need get --fail-with-body -X POST "$url/v1/backups/$first/restore"
stop
rm -r "$runs/backups/blobs"
start
holds "a broken one is not put in place" "is not restored" "$tmp/log"
need get "$url/v1/backups"
holds "and reports the reason" '"failed":"' "$tmp/out"
stop
