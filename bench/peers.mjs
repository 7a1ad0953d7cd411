/*
 * Shoal and llama.cpp on the same weights, alternately, round by round; prints the medians of the
 * ratios of each round. `make bench-peers` makes the weights and adapters, finds the peer and calls
 * this script.
 *
 * The peer is the prebuilt llama.cpp of the npm package node-llama-cpp, in its fastest fair
 * setting: the same number of threads, a batch as large as the prompt, its default KV cache. Both
 * run the same work: a prompt of 512 tokens; 64 tokens generated after 64, by one stream, by 20
 * together, by 20 with different adapters. llama.cpp has one set of adapters per context, so those
 * run one after the other, as in its server.
 *
 * usage: node bench/peers.mjs SHOAL ROUNDS MODEL.gguf [ADAPTER.gguf ...]
 */
import {execFileSync} from "node:child_process";
import {availableParallelism} from "node:os";
import {pathToFileURL} from "node:url";
import {createRequire} from "node:module";

const [shoal, rounds, modelPath, ...adapters] = process.argv.slice(2);
const peers = createRequire(process.env.PEERS + "/package.json");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(peers.resolve("node-llama-cpp")));

const threads = availableParallelism();
const PROMPT = 512, IN = 64, OUT = 64, STREAMS = 20;
const median = v => v.slice().sort((a, b) => a - b)[v.length >> 1];
const seconds = async work => {
    const start = performance.now();
    await work();
    return (performance.now() - start) / 1000;
};

const llama = await getLlama({
    gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error,
});
const model = await llama.loadModel({modelPath});
const vocab = model.fileInsights.modelSize ? model.fileInfo.metadata.tokenizer.ggml.tokens.length : 0;
const token = i => Number((BigInt(i) * 7919n + 3n) % BigInt(vocab));
const tokens = (from, n) => Array.from({length: n}, (_, i) => token(from + i));

const context = (sequences, adapter, size = 1024) => model.createContext({
    contextSize: size, sequences, threads, batchSize: PROMPT,
    ...(adapter && {lora: {adapters: [{filePath: adapter, scale: 1}]}}),
});

async function prompt(sequence) {
    await sequence.clearHistory();
    const ids = tokens(0, PROMPT);
    return PROMPT / await seconds(() => sequence.controlledEvaluate(
        ids.map((t, i) => i === PROMPT - 1 ? [t, {generateNext: {token: true}}] : t)));
}

async function generate(sequence) {
    let n = 0;
    for await (const _ of sequence.evaluate([token(7)], {temperature: 0})) if (++n === OUT) return;
}

async function stream(sequence) {
    await sequence.clearHistory();
    await sequence.evaluateWithoutGeneratingNewTokens(tokens(0, IN));
    return OUT / await seconds(() => generate(sequence));
}

/* All sequences at once, from the first prompt token to the last generated one. */
async function serve(sequences) {
    for (const s of sequences) await s.clearHistory();
    return sequences.length * OUT / await seconds(() => Promise.all(sequences.map(async (s, i) => {
        await s.evaluateWithoutGeneratingNewTokens(tokens(1 + i * 131, IN));
        await generate(s);
    })));
}

async function serveInTurn(sequences) {
    let total = 0;
    for (const s of sequences) total += OUT / await serve([s]);
    return sequences.length * OUT / total;
}

const base = await context(1), batch = await context(STREAMS, null, 256);
const one = adapters.length ? await context(1, adapters[0]) : null;
const many = [];
for (const a of adapters.slice(0, STREAMS)) many.push(await context(1, a, 256));
const sequence = base.getSequence(), adapted = one?.getSequence();
const together = Array.from({length: STREAMS}, () => batch.getSequence());
const apart = many.map(c => c.getSequence());

const peerRound = async () => ({
    "prefill 1 0": await prompt(sequence),
    "decode 1 0": await stream(sequence),
    ...(adapted && {"prefill 1 1": await prompt(adapted), "decode 1 1": await stream(adapted)}),
    "serve 20 0": await serve(together),
    ...(apart.length === STREAMS && {"serve 20 20": await serveInTurn(apart)}),
});

function shoalRound(...flags) {
    const out = execFileSync(shoal, ["bench", "--model", modelPath, "--what",
        "prefill,decode,serve", "--reps", "1", "--json", "--quiet", "--threads", threads, ...flags]);
    const found = {};
    for (const line of out.toString().trim().split("\n")) {
        const v = JSON.parse(line);
        found.class = v.class;
        found[`${v.what} ${v.batch} ${v.adapters}`] = v.tps;
    }
    return found;
}

const names = ["prefill 1 0", "prefill 1 1", "decode 1 0", "decode 1 1", "serve 20 0", "serve 20 20"];
const runs = [];
await peerRound();
/* The second run starts on a busy machine, so the order alternates. If the fast class equals the
 * exact one, it is measured once. */
for (let r = 0; r < Number(rounds); r++) {
    const first = r % 2 ? await peerRound() : null, fast = shoalRound();
    const exact = fast.class === "exact" ? fast : shoalRound("--exact");
    runs.push({peer: first ?? await peerRound(), fast, exact});
}

const column = (text, width) => String(text).padStart(width);
console.log(modelPath);
console.log("what streams adapters" + column("llama.cpp", 12) + column("shoal", 10) + column("ratio", 8) +
            column("exact", 10) + column("ratio", 8));
for (const name of names) {
    const of = (who) => runs.map(r => r[who][name]).filter(x => x !== undefined);
    if (!of("peer").length) continue;
    const ratio = who => median(runs.map(r => r[who][name] / r.peer[name]));
    console.log(name.padEnd(21) + column(median(of("peer")).toFixed(1), 12) +
                column(median(of("fast")).toFixed(1), 10) + column(ratio("fast").toFixed(2), 8) +
                column(median(of("exact")).toFixed(1), 10) + column(ratio("exact").toFixed(2), 8));
}
const med = (who, name) => median(runs.map(r => r[who][name]));
if (apart.length === STREAMS)
    console.log(`20 different adapters: ${(med("fast", "serve 20 20") / med("peer", "serve 20 20")).toFixed(2)} ` +
                `of llama.cpp's, ${(med("fast", "serve 20 20") / med("peer", "serve 20 0")).toFixed(2)} of its batch ` +
                `without, ${(med("fast", "serve 20 20") / med("fast", "serve 20 0")).toFixed(2)} of Shoal's without`);
process.exit(0);
