/*
 * Shoal and llama.cpp on the same weights, alternately, one kind of work after the other; prints
 * the medians of the ratios of each round. `make bench-peers` makes the weights and adapters, finds
 * the peer and calls this script.
 *
 * The peer is a native llama.cpp in the folder LLAMA_BIN (llama-bench and llama-server) or the
 * prebuilt one of the npm package node-llama-cpp, found through PEERS. Both run in their fastest
 * fair setting: the same number of threads, a batch as large as the prompt, the default KV cache.
 * The work is that of `shoal bench`: a prompt of 512 tokens; tokens generated after 64, by one
 * stream (the peer 64, Shoal 16), by 20 together (64), by 20 with different adapters (64).
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
const PROMPT = 512, IN = 64, OUT = 64, STREAMS = 20;
const HAS_MANY_ADAPTERS = adapters.length >= STREAMS;
const streams = Array.from({length: STREAMS}, (_, i) => i);

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
 * A peer: {name, prompt(adapter), stream(adapter), serve(), serveAdapters()}. `adapter` is the
 * index of an adapter or undefined; each function returns tokens per second.
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
    const serve = async adapterOf => STREAMS * OUT / await seconds(() => Promise.all(
        streams.map(i => complete(1 + i * 131, IN, OUT, adapterOf(i)))));
    const {build_commit: commit, cpu_info: cpu} = bench(1, 0, 0);
    const features = log.match(/system_info: (.*)/)?.[1] ?? "no system_info";
    return {
        name: `native llama.cpp, commit ${commit}, ${cpu}\n  ${features}`,
        prompt: async adapter => adapter === undefined ? bench(PROMPT, 0, 0).avg_ts :
            (await complete(0, PROMPT, 1, adapter)).prompt_per_second,
        stream: async adapter => adapter === undefined ? bench(0, OUT, IN).avg_ts :
            (await complete(0, IN, OUT, adapter)).predicted_per_second,
        serve: () => serve(() => undefined),
        serveAdapters: () => serve(i => i),
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
    const context = (sequences, adapter, size = 1024) => model.createContext({
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
    const batch = await context(STREAMS, null, 256), batched = streams.map(() => batch.getSequence());
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
        prompt: async adapter => {
            const sequence = await sequenceOf(adapter);
            return PROMPT / await seconds(() => sequence.controlledEvaluate(tokens(0, PROMPT).map(
                (t, i) => i === PROMPT - 1 ? [t, {generateNext: {token: true}}] : t)));
        },
        stream: async adapter => {
            const sequence = await sequenceOf(adapter);
            await sequence.evaluateWithoutGeneratingNewTokens(tokens(0, IN));
            return OUT / await seconds(() => generate(sequence));
        },
        serve: () => serve(batched),
        serveAdapters: async () => {
            let total = 0;
            for (const s of perAdapter) total += OUT / await serve([s]);
            return STREAMS * OUT / total;
        },
    };
}

const peer = await (process.env.LLAMA_BIN ? nativePeer(process.env.LLAMA_BIN) : packagePeer(process.env.PEERS));
/* What of `shoal bench` → its lines, and the peer's function for each; a line is batch and adapters. */
const groups = {
    prefill: {"1 0": () => peer.prompt(), ...(adapters.length && {"1 1": () => peer.prompt(0)})},
    decode: {"1 0": () => peer.stream(), ...(adapters.length && {"1 1": () => peer.stream(0)})},
    serve: {[`${STREAMS} 0`]: peer.serve, ...(HAS_MANY_ADAPTERS && {[`${STREAMS} ${STREAMS}`]: peer.serveAdapters})},
};

async function peerRun(what) {
    const found = {};
    for (const [name, measure] of Object.entries(groups[what])) found[`${what} ${name}`] = await measure();
    return found;
}

function shoalRun(what, ...flags) {
    const out = run(shoal, "bench", "--model", modelPath, "--what", what, "--reps", 1, "--json", "--quiet",
                    "--threads", threads, ...flags);
    const found = {};
    for (const line of out.trim().split("\n")) {
        const v = JSON.parse(line);
        found.class = v.class;
        found[`${v.what} ${v.batch} ${v.adapters}`] = v.tps;
    }
    return found;
}

const names = Object.entries(groups).flatMap(([what, lines]) => Object.keys(lines).map(name => `${what} ${name}`));
const runs = [];
for (const what in groups) await peerRun(what);
/* The second run of a pair starts on a busy machine, so the order alternates. If the fast class
 * equals the exact one, it is measured once. */
for (let r = 0; r < Number(rounds); r++) {
    const round = {peer: {}, fast: {}, exact: {}};
    for (const what in groups) {
        const first = r % 2 ? await peerRun(what) : null, fast = shoalRun(what);
        const exact = fast.class === "exact" ? fast : shoalRun(what, "--exact");
        Object.assign(round.peer, first ?? await peerRun(what));
        Object.assign(round.fast, fast);
        Object.assign(round.exact, exact);
    }
    runs.push(round);
}

const column = (text, width) => String(text).padStart(width);
console.log(`${modelPath}: ${threads} threads, ${rounds} rounds; ${peer.name}`);
console.log("what streams adapters" + column("llama.cpp", 12) + column("shoal", 10) + column("ratio", 8) +
            column("exact", 10) + column("ratio", 8));
for (const name of names) {
    const of = side => runs.map(r => r[side][name]);
    const ratio = side => median(runs.map(r => r[side][name] / r.peer[name]));
    console.log(name.padEnd(21) + column(median(of("peer")).toFixed(1), 12) +
                column(median(of("fast")).toFixed(1), 10) + column(ratio("fast").toFixed(2), 8) +
                column(median(of("exact")).toFixed(1), 10) + column(ratio("exact").toFixed(2), 8));
}
const med = (side, name) => median(runs.map(r => r[side][name]));
if (HAS_MANY_ADAPTERS)
    console.log(`20 different adapters: ${(med("fast", "serve 20 20") / med("peer", "serve 20 20")).toFixed(2)} ` +
                `of llama.cpp's, ${(med("fast", "serve 20 20") / med("peer", "serve 20 0")).toFixed(2)} of its batch ` +
                `without, ${(med("fast", "serve 20 20") / med("fast", "serve 20 0")).toFixed(2)} of Shoal's without`);
process.exit(0);
