// Common parts of the clients: a check is a name and a function that throws.
import assert from "node:assert/strict";
import {webcrypto} from "node:crypto";
import {basename} from "node:path";

// LangChain needs the global, which Node 18 (Debian 12) does not define.
globalThis.crypto ??= webcrypto;

export {assert};

const client = basename(process.argv[1], ".mjs");

/**
 * The servers that test_clients.sh has started: the plain one, and one with a template for tools that generates one
 * reply at a time.
 */
export const url = process.env.SHOAL_URL;
export const narrowUrl = process.env.SHOAL_NARROW_URL;

/** Their start-up tokens, for what needs the scope admin. */
export const token = process.env.SHOAL_TOKEN;
const narrowToken = process.env.SHOAL_NARROW_TOKEN;

/** What a check throws that has nothing to check here. */
export class Skip extends Error {}

export async function check(name, run) {
    try {
        await run();
        console.log(`ok ${client}: ${name}`);
    } catch (e) {
        const why = String(e?.message ?? e).replace(/\s*\n\s*/g, " | ").slice(0, 600);
        console.log(`${e instanceof Skip ? "skip" : "not ok"} ${client}: ${name}: ${why}`);
    }
}

/** POST of JSON, or GET without a body: {status, type, text}, and json where it is. */
export async function http(path, body, root = url) {
    const r = await fetch(root + path, {
        method: body === undefined ? "GET" : "POST",
        headers: {"Content-Type": "application/json", Authorization: "Bearer " + (root === url ? token : narrowToken)},
        body: body === undefined ? undefined : JSON.stringify(body),
        signal: AbortSignal.timeout(20000),
    });
    const text = await r.text();
    const type = r.headers.get("content-type") ?? "";
    return {status: r.status, type, text, json: type.startsWith("application/json") ? JSON.parse(text) : undefined};
}

/** The same where anything but 200 is a failure. */
export async function json(path, body, root = url) {
    const r = await http(path, body, root);
    assert.equal(r.status, 200, `${path}: ${r.text}`);
    return r.json;
}

export const user = (content) => [{role: "user", content}];
