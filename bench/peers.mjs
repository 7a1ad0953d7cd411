/*
 * Shoal and llama.cpp on the same weights, alternately, one kind of work after the other; prints
 * the medians of the ratios of each round, for the fast and the exact class. `make bench-peers`
 * makes the weights and adapters, finds the peer and calls this script.
 *
 * The peer is a native llama.cpp in the folder LLAMA_BIN (llama-bench and llama-server) or the
 * prebuilt one of the npm package node-llama-cpp, found through PEERS. Both run in their fastest
 * fair setting: the same number of threads, a batch as large as the prompt, the default KV cache.
 * The work is that of `shoal bench`: prompts of 512 and 2,048 tokens; tokens generated after 64, by
 * one stream (the peer 64, Shoal 16), by 4 and 20 together (64), by 20 with different adapters
 * (64); and by one stream after 1,800 tokens (the peer 64, Shoal 16).
 * llama.cpp does not batch requests with different adapters: its server gets all requests at once
 * and computes one adapter after the other, and so does this script with the package.
 *
 * usage: node bench/peers.mjs SHOAL ROUNDS MODEL.gguf [ADAPTER.gguf ...]
 */
import {execFileSync, spawn} from "node:child_process";
import {once} from "node:events";
import {availableParallelism} from "node:os";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [shoal, rounds, modelPath, ...adapters] = process.argv.slice(2);
const threads = availableParallelism();
const PROMPT = 512, LONG_PROMPT = 2048, IN = 64, OUT = 64, DEPTH = 1800, STREAMS = 20, FEW_STREAMS = 4;
const HAS_MANY_ADAPTERS = adapters.length >= STREAMS;
const streams = n => Array.from({length: n}, (_, i) => i);

const run = (program, ...args) =>
    execFileSync(program, args, {stdio: ["ignore", "pipe", "ignore"], encoding: "utf8"});
const {vocab} = JSON.parse(run(shoal, "model", "info", modelPath, "--json"));
const tokens = (from, n) => Array.from({length: n}, (_, i) => ((from + i) * 7919 + 3) % vocab);
const median = v => v.slice().sort((a, b) => a - b)[v.length >> 1];
const seconds = async work => {
    const start = performance.now();
    await work();
    return (performance.now() - start) / 1000;
};

/*
 * A peer: {name, prompt(tokens, adapter), stream(depth, adapter), serve(streams), serveAdapters()}.
 * `adapter` is the index of an adapter or undefined; each function returns tokens per second.
 */

/* llama-bench for prompts and streams without an adapter; llama-server for all other work. */
async function nativePeer(folder) {
    const bench = (prompt, generated, depth) => JSON.parse(run(
        `${folder}/llama-bench`, "-m", modelPath, "-t", threads, "-p", prompt, "-n", generated, "-d", depth,
        "-r", 1, "-o", "json"))[0];
    const server = spawn(`${folder}/llama-server`, [
        "-m", modelPath, "-t", threads, "--host", "127.0.0.1", "--port", 0, "-lv", 4, "--cache-ram", 0,
        "-np", STREAMS, "-c", STREAMS * 2 * PROMPT, ...(adapters.length ? [
            "--lora", adapters.join(","), "--lora-init-without-apply"] : []),
    ], {stdio: ["ignore", "pipe", "pipe"]});
    process.on("exit", () => server.kill("SIGKILL"));
    for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => process.exit(1));
    let log = "";
    const url = await new Promise((resolve, reject) => {
        const read = text => {
            log += text;
            const found = log.match(/listening on (http:\S+)/);
            if (found) resolve(found[1]);
        };
        for (const pipe of [server.stdout, server.stderr]) pipe.setEncoding("utf8").on("data", read);
        once(server, "exit").then(() => reject(Error(`llama-server ended:\n${log}`)), reject);
    });
    /* A request without a `lora` list applies all adapters, so one for the base model sets a scale of 0. */
    const complete = async (from, n, out, adapter) => {
        const reply = await fetch(`${url}/completion`, {
            method: "POST", headers: {connection: "close"}, body: JSON.stringify({
                prompt: tokens(from, n), n_predict: out, ignore_eos: true, cache_prompt: false,
                samplers: ["top_k"], top_k: 1, lora: [{id: adapter ?? 0, scale: adapter === undefined ? 0 : 1}],
            }),
        });
        if (!reply.ok) throw Error(`llama-server: ${await reply.text()}`);
        return (await reply.json()).timings;
    };
    /* All requests at once, from the first prompt token to the last generated one. */
    const serve = async (n, adapterOf) => n * OUT / await seconds(() => Promise.all(
        streams(n).map(i => complete(1 + i * 131, IN, OUT, adapterOf(i)))));
    const {build_commit: commit, cpu_info: cpu} = bench(1, 0, 0);
    const features = log.match(/system_info: (.*)/)?.[1] ?? "no system_info";
    return {
        name: `native llama.cpp, commit ${commit}, ${cpu}\n  ${features}`,
        prompt: async (n, adapter) => adapter === undefined ? bench(n, 0, 0).avg_ts :
            (await complete(0, n, 1, adapter)).prompt_per_second,
        stream: async (depth, adapter) => adapter === undefined ? bench(0, OUT, depth).avg_ts :
            (await complete(0, depth, OUT, adapter)).predicted_per_second,
        serve: n => serve(n, () => undefined),
        serveAdapters: () => serve(STREAMS, i => i),
    };
}

/* The npm package, which has one set of adapters per context. */
async function packagePeer(folder) {
    const {resolve} = createRequire(`${folder}/package.json`);
    const {getLlama, LlamaLogLevel} = await import(pathToFileURL(resolve("node-llama-cpp")));
    const llama = await getLlama({
        gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error,
    });
    const model = await llama.loadModel({modelPath});
    const context = (sequences, adapter, size = LONG_PROMPT) => model.createContext({
        contextSize: size, sequences, threads, batchSize: PROMPT,
        ...(adapter && {lora: {adapters: [{filePath: adapter, scale: 1}]}}),
    });
    const generate = async sequence => {
        let n = 0;
        for await (const _ of sequence.evaluate(tokens(7, 1), {temperature: 0})) if (++n === OUT) return;
    };
    const serve = async sequences => {
        for (const s of sequences) await s.clearHistory();
        return sequences.length * OUT / await seconds(() => Promise.all(sequences.map(async (s, i) => {
            await s.evaluateWithoutGeneratingNewTokens(tokens(1 + i * 131, IN));
            await generate(s);
        })));
    };
    const base = (await context(1)).getSequence();
    const adapted = adapters.length ? (await context(1, adapters[0])).getSequence() : null;
    const batch = await context(STREAMS, null, 256), batched = streams(STREAMS).map(() => batch.getSequence());
    const perAdapter = [];
    for (const a of adapters.slice(0, STREAMS)) perAdapter.push((await context(1, a, 256)).getSequence());
    const sequenceOf = async adapter => {
        const sequence = adapter === undefined ? base : adapted;
        await sequence.clearHistory();
        return sequence;
    };
    return {
        name: `prebuilt llama.cpp ${llama.llamaCppRelease.release} of node-llama-cpp, ` +
            "which may be slower than a native build (set LLAMA_BIN)\n  " + llama.systemInfo,
        prompt: async (n, adapter) => {
            const sequence = await sequenceOf(adapter);
            return n / await seconds(() => sequence.controlledEvaluate(tokens(0, n).map(
                (t, i) => i === n - 1 ? [t, {generateNext: {token: true}}] : t)));
        },
        stream: async (depth, adapter) => {
            const sequence = await sequenceOf(adapter);
            await sequence.evaluateWithoutGeneratingNewTokens(tokens(0, depth));
            return OUT / await seconds(() => generate(sequence));
        },
        serve: n => serve(batched.slice(0, n)),
        serveAdapters: async () => {
            let total = 0;
            for (const s of perAdapter) total += OUT / await serve([s]);
            return STREAMS * OUT / total;
        },
    };
}

const peer = await (process.env.LLAMA_BIN ? nativePeer(process.env.LLAMA_BIN) : packagePeer(process.env.PEERS));
const wanted = process.env.WHAT?.split(" ");
/* Runs of `shoal bench`: what it measures, its options, and the peer's function for each of its lines, which are
 * named by streams, tokens and adapters. */
const groups = [
    {what: "prefill", options: ["--tokens", PROMPT], lines: {
        [`1 ${PROMPT} 0`]: () => peer.prompt(PROMPT),
        ...(adapters.length && {[`1 ${PROMPT} 1`]: () => peer.prompt(PROMPT, 0)})}},
    {what: "prefill", options: ["--tokens", LONG_PROMPT], lines: {
        [`1 ${LONG_PROMPT} 0`]: () => peer.prompt(LONG_PROMPT)}},
    {what: "decode", options: [], lines: {
        [`1 ${IN} 0`]: () => peer.stream(IN), ...(adapters.length && {[`1 ${IN} 1`]: () => peer.stream(IN, 0)})}},
    {what: "depth", options: ["--depth", DEPTH], lines: {[`1 ${DEPTH} 0`]: () => peer.stream(DEPTH)}},
    {what: "serve", options: [], lines: {
        [`${FEW_STREAMS} ${IN} 0`]: () => peer.serve(FEW_STREAMS), [`${STREAMS} ${IN} 0`]: () => peer.serve(STREAMS),
        ...(HAS_MANY_ADAPTERS && {[`${STREAMS} ${IN} ${STREAMS}`]: peer.serveAdapters})}},
].filter(({what, options}) => !wanted || wanted.includes(what) || wanted.includes(`${what}-${options[1]}`));

async function peerRun({what, lines}) {
    const found = {};
    for (const [name, measure] of Object.entries(lines)) found[`${what} ${name}`] = await measure();
    return found;
}

function shoalRun({what, options}, ...flags) {
    const out = run(shoal, "bench", "--model", modelPath, "--what", what, "--reps", 1, "--json", "--quiet",
                    "--threads", threads, ...options, ...flags);
    const found = {};
    for (const line of out.trim().split("\n")) {
        const v = JSON.parse(line);
        found.class = v.class;
        found.level = v.level;
        found[`${v.what} ${v.batch} ${v.tokens} ${v.adapters}`] = v.tps;
    }
    return found;
}

const names = groups.flatMap(({what, lines}) => Object.keys(lines).map(name => `${what} ${name}`));
const runs = [];
for (const group of groups) await peerRun(group);
/* The second run of a pair starts on a busy machine, so the order alternates. */
for (let r = 0; r < Number(rounds); r++) {
    const round = {peer: {}, fast: {}, exact: {}};
    for (const group of groups) {
        const first = r % 2 ? await peerRun(group) : null;
        Object.assign(round.fast, shoalRun(group, "--fast"));
        Object.assign(round.exact, shoalRun(group, "--exact"));
        Object.assign(round.peer, first ?? await peerRun(group));
    }
    runs.push(round);
}

const column = (text, width) => String(text).padStart(width);
console.log(`${modelPath}: ${threads} threads, ${rounds} rounds; level ${runs[0].exact.level}, ` +
            `class ${runs[0].fast.class}; ${peer.name}`);
console.log("what streams tokens adapters" + column("llama.cpp", 12) + column("fast", 10) + column("ratio", 8) +
            column("exact", 10) + column("ratio", 8));
for (const name of names) {
    const of = side => runs.map(r => r[side][name]);
    const ratio = side => median(runs.map(r => r[side][name] / r.peer[name]));
    console.log(name.padEnd(28) + column(median(of("peer")).toFixed(1), 12) +
                column(median(of("fast")).toFixed(1), 10) + column(ratio("fast").toFixed(2), 8) +
                column(median(of("exact")).toFixed(1), 10) + column(ratio("exact").toFixed(2), 8));
}
const med = (side, name) => median(runs.map(r => r[side][name]));
if (names.includes(`serve ${STREAMS} ${IN} ${STREAMS}`)) {
    const many = med("fast", `serve ${STREAMS} ${IN} ${STREAMS}`), base = `serve ${STREAMS} ${IN} 0`;
    console.log(`20 different adapters: ${(many / med("peer", `serve ${STREAMS} ${IN} ${STREAMS}`)).toFixed(2)} of ` +
                `llama.cpp's, ${(many / med("peer", base)).toFixed(2)} of its batch without, ` +
                `${(many / med("fast", base)).toFixed(2)} of Shoal's without`);
}
process.exit(0);
