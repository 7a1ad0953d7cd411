// Calls of the server's API, with the key that the user gave; errors in the server's own words.
import { t } from "./words.js";

export class ApiError extends Error {
    constructor(status, message) {
        super(message);
        this.status = status;
    }
}

/** The key: of this tab, unless it is to be remembered. */
export const key = {
    get: () => {
        try {
            return sessionStorage.getItem("shoal.key") ?? localStorage.getItem("shoal.key") ?? "";
        } catch {
            return "";
        }
    },
    remembered: () => {
        try {
            return localStorage.getItem("shoal.key") !== null;
        } catch {
            return false;
        }
    },
    set(value, remember) {
        sessionStorage.removeItem("shoal.key");
        localStorage.removeItem("shoal.key");
        if (value) (remember ? localStorage : sessionStorage).setItem("shoal.key", value);
    },
};

/** Takes the start-up token out of the address, #token=…, into this tab; whether there was one. */
export function token_take() {
    const [, token] = /^#token=([\w-]+)$/.exec(location.hash) ?? [];
    if (!token) return false;
    try {
        sessionStorage.setItem("shoal.key", token);
    } catch {
        // A browser that keeps nothing: requests go without it, and the server says what is missing.
    }
    history.replaceState(null, "", location.pathname + location.search); // not into its history
    return true;
}

async function failure(r) {
    const text = await r.text();
    try {
        const e = JSON.parse(text).error;
        return new ApiError(r.status, e.message ?? e);
    } catch {
        return new ApiError(r.status, text || `${r.status} ${r.statusText}`);
    }
}

/** A response that is fine, or an ApiError. `body`: sent as JSON. */
export async function call(path, { method, body, signal, headers } = {}) {
    const all = { ...headers };
    if (key.get()) all.Authorization = "Bearer " + key.get();
    if (body !== undefined) all["Content-Type"] = "application/json";
    let r;
    try {
        r = await fetch(path, {
            method: method ?? (body === undefined ? "GET" : "POST"),
            headers: all,
            body: body === undefined ? undefined : JSON.stringify(body),
            signal,
        });
    } catch (e) {
        throw e.name === "AbortError" ? e : new ApiError(0, t("unreachable"));
    }
    if (!r.ok) throw await failure(r);
    return r;
}

export const json = async (path, o) => (await call(path, o)).json();
export const text = async (path, o) => (await call(path, o)).text();

/** Server-sent events of a reply: {event, data}. EventSource could not send a key. o.opened(response): its head is there. */
export async function* events(path, o) {
    const r = await call(path, o);
    o?.opened?.(r);
    const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
        for (;;) {
            const { done, value } = await reader.read();
            if (done) return;
            const parts = (rest + value).split(/\r?\n\r?\n/);
            rest = parts.pop();
            for (const part of parts) {
                const e = { event: "message", data: "" };
                for (const line of part.split(/\r?\n/)) {
                    const [, name, text] = /^(\w*):? ?(.*)$/.exec(line) ?? [];
                    if (name === "data") e.data += text;
                    else if (name === "event") e.event = text;
                }
                if (e.data) yield e;
            }
        }
    } finally {
        reader.cancel().catch(() => {}); // gone already
    }
}

/** Work that is told while it goes on: tell(event, data) until its end; an error as it would be without a stream. */
export async function follow(path, o, tell) {
    for await (const { event, data } of events(path, { ...o, body: { ...o.body, stream: true } })) {
        if (data === "[DONE]") return;
        const v = JSON.parse(data);
        if (event === "error") throw new ApiError(0, v.error.message);
        tell(event, v);
    }
}

/** The base, adapters and teams: {base, adapters, teams}, each {id, root, max_model_len, …}. */
export async function models(signal) {
    const { data } = await json("/v1/models", { signal });
    return {
        base: data.filter((m) => !m.parent),
        adapters: data.filter((m) => m.parent && !m.id.startsWith("team:")),
        teams: data.filter((m) => m.id.startsWith("team:")),
    };
}

/** Figures of GET /v1/metrics: their sum over series, or of the series with a label. */
export class Figures {
    constructor(all) {
        this.all = all;
    }
    series(name) {
        return this.all[name]?.series ?? [];
    }
    value(name, label, is) {
        let sum = null;
        for (const s of this.series(name))
            if (label === undefined || s.labels[label] === is) sum = (sum ?? 0) + (s.value ?? 0);
        return sum;
    }
    labels(name) {
        return this.series(name)[0]?.labels ?? {};
    }
}
export const figures = async (signal) => new Figures(await json("/v1/metrics", { signal }));
