// Requests to the server's API with the user's API key. Errors have the server's message.
import { t } from "./words.js";

export class ApiError extends Error {
    constructor(status, message) {
        super(message);
        this.status = status;
    }
}

/** The API key: in sessionStorage, or in localStorage if the user wants the browser to remember it. */
export const api_key = {
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

/** Moves the start-up token from the address (#token=…) to sessionStorage. Returns whether the address had one. */
export function take_token() {
    const [, token] = /^#token=([\w-]+)$/.exec(location.hash) ?? [];
    if (!token) return false;
    try {
        sessionStorage.setItem("shoal.key", token);
    } catch {
        // Without sessionStorage requests have no key, and the server's error names the missing key.
    }
    history.replaceState(null, "", location.pathname + location.search); // keeps the token out of the browser's history
    return true;
}

async function error_of(r) {
    const text = await r.text();
    try {
        const e = JSON.parse(text).error;
        return new ApiError(r.status, e.message ?? e);
    } catch {
        return new ApiError(r.status, text || `${r.status} ${r.statusText}`);
    }
}

/** Sends a request and returns a successful response, or throws an ApiError. `body` is sent as JSON. */
export async function call(path, { method, body, signal, headers } = {}) {
    const all_headers = { ...headers };
    if (api_key.get()) all_headers.Authorization = "Bearer " + api_key.get();
    if (body !== undefined) all_headers["Content-Type"] = "application/json";
    let r;
    try {
        r = await fetch(path, {
            method: method ?? (body === undefined ? "GET" : "POST"),
            headers: all_headers,
            body: body === undefined ? undefined : JSON.stringify(body),
            signal,
        });
    } catch (e) {
        throw e.name === "AbortError" ? e : new ApiError(0, t("unreachable"));
    }
    if (!r.ok) throw await error_of(r);
    return r;
}

export const json = async (path, o) => (await call(path, o)).json();
export const text = async (path, o) => (await call(path, o)).text();

/** Yields the server-sent events of a response as {event, data}; EventSource cannot send a key. o.on_open(response) is called when its headers have arrived. */
export async function* events(path, o) {
    const r = await call(path, o);
    o?.on_open?.(r);
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
        reader.cancel().catch(() => {}); // the connection may be closed already
    }
}

/** Sends a request with `stream: true` and calls on_event(event, data) for each event. Throws the error of an error event. */
export async function stream(path, o, on_event) {
    for await (const { event, data } of events(path, { ...o, body: { ...o.body, stream: true } })) {
        if (data === "[DONE]") return;
        const v = JSON.parse(data);
        if (event === "error") throw new ApiError(0, v.error.message);
        on_event(event, v);
    }
}

/** {base, adapters, teams, agents}: arrays of {id, root, max_model_len, …}. */
export async function models(signal) {
    const { data } = await json("/v1/models", { signal });
    return {
        base: data.filter((m) => !m.parent),
        adapters: data.filter((m) => m.parent && !/^(team|agent):/.test(m.id)),
        teams: data.filter((m) => m.id.startsWith("team:")),
        agents: data.filter((m) => m.id.startsWith("agent:")),
    };
}

/** The metrics of GET /v1/metrics. value() sums over all series of a metric, or over those whose label has the given value. */
export class Metrics {
    constructor(all) {
        this.all = all;
    }
    series(name) {
        return this.all[name]?.series ?? [];
    }
    value(name, label, wanted) {
        let sum = null;
        for (const s of this.series(name))
            if (label === undefined || s.labels[label] === wanted) sum = (sum ?? 0) + (s.value ?? 0);
        return sum;
    }
    labels(name) {
        return this.series(name)[0]?.labels ?? {};
    }
}
export const metrics = async (signal) => new Metrics(await json("/v1/metrics", { signal }));

/** Whether a job of this state has ended. */
export const has_ended = (state) => ["done", "failed", "cancelled"].includes(state);
