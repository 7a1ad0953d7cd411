// The official SDKs as clients of the MCP server: version 1 (@modelcontextprotocol/sdk) and version 2
// (@modelcontextprotocol/client), over stdio and streamable HTTP. Structured results are checked by the SDK against the
// tools' schemas.
import assert from "node:assert/strict";
import {Client} from "@modelcontextprotocol/sdk/client/index.js";
import {StdioClientTransport} from "@modelcontextprotocol/sdk/client/stdio.js";
import {StreamableHTTPClientTransport} from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import {SUPPORTED_PROTOCOL_VERSIONS} from "@modelcontextprotocol/sdk/types.js";

const url = new URL(process.env.SHOAL_URL + "/mcp"), token = process.env.SHOAL_TOKEN;
const stdio = {command: process.env.SHOAL, args: JSON.parse(process.env.SHOAL_ARGS), stderr: "ignore"};
const headers = {Authorization: "Bearer " + token};
const identity = {name: "test", version: "1"};

async function check(name, run) {
    try {
        await run();
        console.log(`ok mcp sdk: ${name}`);
    } catch (e) {
        console.log(`not ok mcp sdk: ${name}: ${String(e?.stack ?? e).replace(/\s*\n\s*/g, " | ").slice(0, 600)}`);
    }
}

const transports = {
    stdio: () => new StdioClientTransport(stdio),
    http: () => new StreamableHTTPClientTransport(url, {requestInit: {headers}}),
};

// The SDK handles a notification later than a response that arrives with it, and then does not know its token.
async function connect(kind) {
    const client = new Client(identity);
    client.onerror = (e) => { client.lastError = /unknown token/.test(e.message) ? client.lastError : e; };
    await client.connect(transports[kind]());
    return client;
}

const content = async (client, name, args, ...more) => {
    const r = await client.callTool({name, arguments: args}, undefined, ...more);
    assert.ok(!r.isError, JSON.stringify(r.content));
    assert.deepEqual(JSON.parse(r.content[0].text), r.structuredContent);
    return r.structuredContent;
};

const NAMES = ["chat", "ask", "debate", "knowledge_search", "conversation_list", "conversation_search", "conversation_read",
    "adapter_list", "job_list", "job_status"];

// 3,241 tokens, with the options of test_mcp.sh.
const ENDLESS = {name: "chat", arguments: {prompt: "x", temperature: 100, max_tokens: 100000, seed: 13}};

for (const kind of ["stdio", "http"]) {
    const client = await connect(kind);
    await check(`${kind}: initialize and ping`, async () => {
        assert.equal(client.getServerVersion().name, "shoal");
        assert.deepEqual(client.getServerCapabilities(), {tools: {listChanged: false}});
        await client.ping();
    });
    await check(`${kind}: tools and their hints`, async () => {
        const {tools} = await client.listTools();
        assert.deepEqual(tools.map((t) => t.name), NAMES);
        for (const t of tools) {
            assert.equal(t.annotations.readOnlyHint, t.name !== "ask", t.name);
            assert.equal(t.annotations.destructiveHint, false);
        }
        assert.deepEqual(tools.find((t) => t.name === "debate").inputSchema.properties.team.enum, ["pair"]);
    });
    await check(`${kind}: chat, also with an adapter`, async () => {
        const args = {prompt: "sort: k b x", temperature: 0, max_tokens: 30};
        const base = await content(client, "chat", args), same = await content(client, "chat", {...args, model: "fry-1"}),
            adapter = await content(client, "chat", {...args, model: "a"});
        assert.equal(base.text, "answer: b k x");
        assert.equal(same.text, base.text);
        assert.equal(adapter.model, "a");
        assert.ok(base.completion_tokens > 0 && base.prompt_tokens > 0);
    });
    await check(`${kind}: chat streams its progress`, async () => {
        const reports = [];
        const r = await content(client, "chat", {prompt: "sort: k b x", temperature: 0, max_tokens: 30}, {onprogress: (p) => reports.push(p)});
        assert.equal(r.text, "answer: b k x");
        assert.ok(r.text.startsWith(reports.map((p) => p.message).join("")));
        assert.deepEqual(reports.map((p) => p.progress), reports.map((_, i) => i + 1));
        assert.ok(reports.length > 0 || kind === "stdio");
    });
    await check(`${kind}: ask remembers a conversation, which is listed, read and searched`, async () => {
        const reports = [];
        const r = await content(client, "ask", {question: "sort: k b x", conversation: `blue ${kind}/1`, agents: 2, iterations: 1},
            {onprogress: (p) => reports.push(p)});
        assert.equal(typeof r.answer, "string");
        assert.ok(reports.length > 0 || kind === "stdio");
        const id = `blue ${kind}/1`, {conversations} = await content(client, "conversation_list", {});
        assert.ok(conversations.some((c) => c.id === id && c.exchanges === 1), JSON.stringify(conversations));
        const {exchanges} = await content(client, "conversation_read", {conversation: id, limit: 5});
        assert.equal(exchanges[0].user, "sort: k b x");
        const found = await content(client, "conversation_search", {search: "k b x"});
        assert.ok(found.exchanges.some((e) => e.id === id));
    });
    await check(`${kind}: debate`, async () => {
        const reports = [], args = {team: "pair", question: "sort: k b x", rounds: 2};
        const r = await content(client, "debate", args, {onprogress: (p) => reports.push(p)});
        assert.deepEqual(reports.map((p) => p.message), r.turns.slice(0, reports.length).map((t) => `${t.name}: ${t.text}`));
        assert.ok(reports.length > 0 || kind === "stdio");
        assert.deepEqual(await content(client, "debate", args), r);
    });
    await check(`${kind}: knowledge`, async () => {
        const {hits} = await content(client, "knowledge_search", {query: "tide"});
        assert.ok(hits.length > 0 && hits[0].content.includes("tide") && hits[0].source);
        assert.deepEqual((await content(client, "knowledge_search", {query: "zebra"})).hits, []);
    });
    await check(`${kind}: adapters and jobs`, async () => {
        assert.deepEqual(await content(client, "adapter_list", {}), {models: ["fry-1"], adapters: [{name: "a", model: "fry-1"}], agents: []});
        assert.deepEqual(await content(client, "job_list", {}), {jobs: []});
        const r = await client.callTool({name: "job_status", arguments: {job: "job-1"}});
        assert.ok(r.isError && r.content[0].text.includes("job-1"), JSON.stringify(r));
    });
    await check(`${kind}: errors of tools are results, errors of the protocol are errors`, async () => {
        const wrong = [["chat", {}], ["chat", {prompt: 5}], ["chat", {prompt: "x", max_tokens: -1}], ["chat", {prompt: "x", model: "none"}],
            ["chat", {prompt: "x", messages: []}], ["ask", {question: "x", agents: 99}], ["debate", {team: "none", question: "x"}],
            ["debate", {team: "pair", question: "x", choices: "a"}], ["conversation_read", {conversation: "none"}],
            ["job_status", {job: "../x"}], ["job_status", {job: ""}], ["knowledge_search", {query: ""}]];
        for (const [name, args] of wrong) {
            const r = await client.callTool({name, arguments: args});
            assert.ok(r.isError && r.content[0].text.length > 5, `${name} ${JSON.stringify(args)}: ${JSON.stringify(r)}`);
        }
        await assert.rejects(client.callTool({name: "none"}), {code: -32602});
        await assert.rejects(client.listResources(), /capability|-32601|method/i);
    });
    await check(`${kind}: a cancelled call ends, and the next one is answered`, async () => {
        const stop = new AbortController(), began = Date.now();
        setTimeout(() => stop.abort(), 300);
        const calls = await Promise.allSettled([...Array(40)].map(() => client.callTool(ENDLESS, undefined, {signal: stop.signal})));
        assert.ok(calls.every((c) => c.status === "rejected"));
        assert.equal((await content(client, "chat", {prompt: "sort: k b x", temperature: 0})).text, "answer: b k x");
        assert.ok(Date.now() - began < 20000);
        const progress = new AbortController();
        await assert.rejects(client.callTool(ENDLESS, undefined, {signal: progress.signal, onprogress: () => progress.abort()}));
        await client.ping();
    });
    await check(`${kind}: 20 calls at once`, async () => {
        const all = await Promise.all([...Array(20).keys()].map((i) =>
            content(client, "chat", {prompt: "sort: k b x", temperature: 0, max_tokens: 30}, i % 2 ? {onprogress: () => {}} : {})));
        assert.ok(all.every((r) => r.text === "answer: b k x"));
    });
    await check(`${kind}: no message was wrong`, () => assert.equal(client.lastError, undefined));
    if (kind === "http") {
        await check("http: a session ends, and cannot be used afterwards", async () => {
            await client.transport.terminateSession();
            const used = new Client(identity);
            await used.connect(transports.http());
            const session = used.transport.sessionId;
            await used.transport.terminateSession();
            const r = await fetch(url, {method: "POST", headers: {...headers, "Mcp-Session-Id": session},
                body: JSON.stringify({jsonrpc: "2.0", id: 1, method: "ping"})});
            assert.equal(r.status, 404);
        });
    }
    await client.close();
}

await check("every version of the SDK is negotiated", async () => {
    for (const version of SUPPORTED_PROTOCOL_VERSIONS.filter((v) => v >= "2024-11-05")) {
        const r = await fetch(url, {method: "POST", headers, body: JSON.stringify({jsonrpc: "2.0", id: 1, method: "initialize",
            params: {protocolVersion: version, capabilities: {}, clientInfo: identity}})});
        assert.equal((await r.json()).result.protocolVersion, version);
    }
});

if (Number(process.versions.node.split(".")[0]) >= 20) {
    const {Client: Client2, StreamableHTTPClientTransport: Http2} = await import("@modelcontextprotocol/client");
    const {StdioClientTransport: Stdio2} = await import("@modelcontextprotocol/client/stdio");
    for (const [kind, make] of [["stdio", () => new Stdio2(stdio)], ["http", () => new Http2(url, {requestInit: {headers}})]]) {
        for (const [mode, version] of [["legacy", "2025-11-25"], ["auto", "2026-07-28"], [{pin: "2026-07-28"}, "2026-07-28"]]) {
            await check(`version 2, ${JSON.stringify(mode)}, ${kind}: list, call, progress and cancellation`, async () => {
                const client = new Client2(identity, {versionNegotiation: {mode}}), reports = [], stop = new AbortController();
                await client.connect(make());
                assert.equal(client.getNegotiatedProtocolVersion(), version);
                assert.deepEqual((await client.listTools()).tools.map((t) => t.name), NAMES);
                const args = {prompt: "sort: k b x", temperature: 0, max_tokens: 30};
                const r = await client.callTool({name: "chat", arguments: args}, {onprogress: (p) => reports.push(p)});
                assert.equal(r.structuredContent.text, "answer: b k x");
                assert.ok(reports.length > 0 || kind === "stdio");
                assert.ok((await client.callTool({name: "chat", arguments: {...args, model: "none"}})).isError);
                await assert.rejects(client.callTool({name: "none"}), {code: -32602});
                await assert.rejects(client.callTool(ENDLESS, {signal: stop.signal, onprogress: () => stop.abort()}));
                assert.equal((await client.callTool({name: "chat", arguments: args})).structuredContent.text, "answer: b k x");
                await client.close();
            });
        }
    }
} else {
    console.log("skip mcp sdk: version 2: it needs Node 20");
}
