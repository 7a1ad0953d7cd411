#!/bin/sh
# forager: trains worlds/forager, the agents that 'shoal world models/fry --watch' shows, from rewards alone.
#
# The options are the defaults, but for three that save time or only change which samples are drawn. The policy at the
# end of the run is reduced to rank 4 and stored as f16, 220 kB. In the exact class the result has the same bits
# everywhere. GENERATIONS, WORK (build/forager), THREADS and SHOAL may be set.
set -eu
cd "$(dirname "$0")/.."
export SHOAL_WORLD_KV_CACHE_DTYPE=f32 # as when worlds/forager was trained
shoal="${SHOAL:-$PWD/build/shoal}" work="${WORK:-build/forager}"
mkdir -p "$work"
"$shoal" quantize --quiet models/fry "$work/fry-q8_0.gguf" --type q8_0 >/dev/null # half of the time of models/fry
"$shoal" world "$work/fry-q8_0.gguf" --exact --threads "${THREADS:-0}" --generations "${GENERATIONS:-14}" --no-breed \
    --shared-experience-fraction 0 --eval-maps 1 --runs "$work" --out "$work/run"
"$shoal" world export "$work/run" --best --out "$work/best"
"$shoal" adapter resize "$work/best" --rank 4 --out "$work/rank-4"
mkdir -p worlds/forager
cp "$work/rank-4/adapter_config.json" worlds/forager/
python3 - "$work/rank-4/adapter_model.safetensors" worlds/forager/adapter_model.safetensors <<'END'
import json, struct, sys

data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
header, body, out = json.loads(data[8 : 8 + n]), data[8 + n :], b""
for name, tensor in sorted((k, v) for k, v in header.items() if k != "__metadata__"):
    begin, end = tensor["data_offsets"]
    values = struct.unpack("<%df" % ((end - begin) // 4), body[begin:end])
    packed = struct.pack("<%de" % len(values), *values)
    header[name] = {"dtype": "F16", "shape": tensor["shape"], "data_offsets": [len(out), len(out) + len(packed)]}
    out += packed
text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
text += b" " * (-len(text) % 8)
open(sys.argv[2], "wb").write(struct.pack("<Q", len(text)) + text + out)
END
