// Jobs: long work that the server does for us — started, watched, paused, ended, and drawn.
import { call, events, json, models, text } from "./api.js";
import { Chart } from "./chart.js";
import { complain, every, fill, h, labelled, load, moment, mover, number, option, percent, save, seconds } from "./dom.js";
import { t } from "./words.js";

const LINES = 200; // of results that are shown as they are
const over = (state) => ["done", "failed", "cancelled"].includes(state);

/* starting */

/** What a form begins with; {model} is the base that is served. */
const kinds = {
    world: { args: [], options: { policy: ["rule", "random"], maps: 8, steps: 200 } },
    train: { args: ["{model}"], options: { data: "data.jsonl", out: "pupil", r: 8, lr: 0.004 } },
    evolve: { args: ["examples/demo.yaml"], options: { seed: 1 } },
    eval: { args: ["{model}"], options: { tasks: "fry" } },
    debate: { args: ["{model}"], options: { agents: ["base", "base"], tasks: "pick", n: 100 } },
    ask: { args: ["{model}", "3 + 4 = ?"], options: { agents: 3 } },
    quantize: { args: ["{model}", "small.gguf"], options: { type: "q8_0" } },
};

const value_of = (words) => {
    try {
        return JSON.parse(words);
    } catch {
        return words;
    }
};
const words_of = (v) => (typeof v === "string" && typeof value_of(v) === "string" ? v : JSON.stringify(v));

/** Random letters: the same form sent twice is one job. crypto.randomUUID wants HTTPS, this does not. */
const once = () => [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");

/** The request as a form, and the same as JSON; either may be edited. */
function starter(begun) {
    let request = { kind: "world", ...structuredClone(kinds.world) }, repeat = once(), model = "MODEL";
    const kind = h("select", { "data-focus": true, onchange: () => {
        request = JSON.parse(JSON.stringify({ kind: kind.value, ...kinds[kind.value] }).replaceAll("{model}", model));
        paint();
    } }, Object.keys(kinds).map((id) => option(id, id, request.kind)));
    const args = h("textarea", { rows: 2, spellcheck: "false", class: "code", oninput: () => {
        request.args = args.value.split("\n").filter(Boolean);
        raw_paint();
    } });
    const rows = h("div", { class: "options" });
    const raw = h("textarea", { rows: 6, spellcheck: "false", class: "code", oninput: () => {
        try {
            const v = JSON.parse(raw.value);
            raw.setCustomValidity("");
            if (typeof v !== "object" || !v) return;
            request = v;
            form_paint();
        } catch (e) {
            raw.setCustomValidity(e.message);
        }
    } });
    const details = h("details", null, h("summary", null, t("as_json")), labelled(t("request"), raw));
    const add = h("button", { type: "button", onclick: () => rows.append(row("", "")) }, t("add_option"));
    function row(name, v) {
        const from = h("input", { value: name, placeholder: t("option"), "aria-label": t("option"), spellcheck: "false", oninput: () => rows_read() });
        const to = h("input", { value: v, placeholder: t("value"), "aria-label": t("value"), spellcheck: "false", oninput: () => rows_read() });
        const node = h("div", { class: "row" }, from, to, h("button", {
            type: "button", "aria-label": t("remove"), onclick: () => (node.remove(), rows_read()) }, "×"));
        return node;
    }
    function rows_read() {
        request.options = {};
        for (const r of rows.children) {
            const [from, to] = r.querySelectorAll("input");
            if (from.value.trim()) request.options[from.value.trim()] = value_of(to.value);
        }
        raw_paint();
    }
    const raw_paint = () => {
        raw.value = JSON.stringify(request, null, 1);
        raw.setCustomValidity("");
        repeat = once();
    };
    const form_paint = () => {
        kind.value = request.kind;
        args.value = (request.args ?? []).join("\n");
        fill(rows, Object.entries(request.options ?? {}).map(([name, v]) => row(name, words_of(v))));
        repeat = once();
    };
    const paint = () => (form_paint(), raw_paint());
    const form = h("form", {
        class: "panel", onsubmit: async (e) => {
            e.preventDefault();
            try {
                const job = await json("/v1/jobs", { body: request, headers: { "Idempotency-Key": repeat } });
                repeat = once();
                begun(job);
            } catch (problem) {
                complain(problem);
            }
        },
    }, h("div", { class: "grid" }, labelled(t("kind"), kind), labelled(t("args"), args)), rows, details,
    h("div", { class: "row" }, add, h("span", { class: "space" }), h("button", { type: "submit", class: "main" }, t("start"))));
    models().then((m) => (model = m.base[0]?.root ?? model)).catch(complain);
    paint();
    return h("details", { class: "starter", open: load("jobs_open", true), ontoggle: (e) => e.target.classList.contains("starter") && save("jobs_open", e.target.open) },
        h("summary", null, t("new_job")), form);
}

/* one job */

const done_of = (p) => (p?.total > 0 ? Math.min(1, p.done / p.total) : null);

function progress_node(job) {
    const p = job.progress, share = job.state === "done" ? 1 : done_of(p);
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * (share ?? 0) + "%";
    const words = job.state === "done" ? [] : [p?.title, share !== null && percent(share),
        p?.total > 0 && `${number(p.done)} / ${number(p.total)}`, !over(job.state) && p?.seconds_left > 0 && t("left", seconds(p.seconds_left))];
    return [h("div", { class: "track", role: "progressbar", "aria-label": job.id, "aria-valuemin": 0, "aria-valuemax": 100,
        "aria-valuenow": share === null ? undefined : Math.round(100 * share) }, bar),
    h("small", null, words.filter(Boolean).join(" · "))];
}

function actions(job, changed) {
    const act = (method, path) => async () => {
        try {
            await call(`/v1/jobs/${job.id}${path}`, { method });
            changed(method === "DELETE");
        } catch (e) {
            complain(e);
        }
    };
    const button = (id, method, path) => h("button", { type: "button", onclick: act(method, path) }, t(id));
    return h("div", { class: "row" },
        ["queued", "running"].includes(job.state) && button("pause", "POST", "/pause"),
        ["paused", "failed", "cancelled"].includes(job.state) && button("resume", "POST", "/resume"),
        !over(job.state) && button("cancel", "POST", "/cancel"),
        over(job.state) && button("delete", "DELETE", ""));
}

const state_node = (job) => h("span", { class: "state " + job.state }, t("state_" + job.state));

const item = (job, chosen) => h("li", null, h("a", { href: "#/jobs/" + job.id, "aria-current": job.id === chosen && "true" },
    h("span", null, h("b", null, job.kind), " ", h("small", null, job.id)), state_node(job), ...progress_node(job)));

/* results: lines of JSON, whose numbers are curves */

/** {"a.b": number} of a line; what is nested deeper than two is no curve. */
function numbers_of(line, path = "", out = {}) {
    for (const [k, v] of Object.entries(line ?? {}))
        if (typeof v === "number") out[path + k] = v;
        else if (v && typeof v === "object" && !Array.isArray(v) && path.split(".").length < 3) numbers_of(v, `${path}${k}.`, out);
    return out;
}

const parse = (words) => words.split("\n").filter(Boolean).map((l) => {
    const v = value_of(l);
    return v && typeof v === "object" ? numbers_of(v) : {};
});

/* What is mostly wanted, the first most; not the ends of its interval. */
const telling = [/loss/, /fitness/, /delivered/, /acc/, /reward/, /score/];
const rank = (name) => {
    const i = /\.(lo|hi|low|high)$/.test(name) ? -1 : telling.findIndex((r) => r.test(name));
    return i < 0 ? telling.length : i;
};
const along = ["step", "generation", "tick", "epoch", "round", "n"];

/** Fields that vary along the lines, those first that are mostly wanted. */
function fields_of(rows) {
    const names = [...new Set(rows.flatMap((r) => Object.keys(r)))];
    return names.sort((a, b) => rank(a) - rank(b));
}

class Results {
    constructor() {
        this.rows = [];
        this.chosen = null; // nobody has chosen: what is told mostly
        this.plot = h("div");
        this.pick = h("div", { class: "fields", role: "group", "aria-label": t("fields") });
        this.axis = h("select", { onchange: () => this.draw(true) });
        this.raw = h("pre", { class: "code" });
        this.count = h("summary");
        this.element = h("section", { hidden: true }, h("h3", null, t("results")), this.plot, this.pick,
            labelled(t("along"), this.axis), h("details", null, this.count, this.raw));
    }
    take(words) {
        const lines = words.split("\n").filter(Boolean);
        this.rows = parse(words);
        this.element.hidden = !lines.length;
        this.count.textContent = lines.length > LINES ? t("last_lines", LINES, number(lines.length)) : t("n_lines", number(lines.length));
        this.raw.textContent = lines.slice(-LINES).join("\n");
        const names = fields_of(this.rows);
        if (names.join() !== this.names?.join()) this.offer(names);
        this.draw(false);
    }
    offer(names) {
        const x = this.axis.value || names.find((n) => along.includes(n)) || "";
        this.names = names;
        const best = names.filter((n) => n !== x);
        if (best.length) this.chosen ??= new Set(best.filter((n) => rank(n) === rank(best[0])).slice(0, rank(best[0]) < telling.length ? 3 : 1));
        fill(this.axis, option("", t("line"), x), names.map((n) => option(n, n, x)));
        fill(this.pick, names.map((n) => h("label", { class: "check" }, h("input", {
            type: "checkbox", checked: this.chosen.has(n), onchange: (e) => {
                if (e.target.checked) this.chosen.add(n);
                else this.chosen.delete(n);
                this.draw(true);
            },
        }), n)));
    }
    draw(anew) {
        const shown = this.names.filter((n) => this.chosen?.has(n)), x = this.axis.value;
        const id = shown.join("\n") + "\n" + x;
        if (anew || id !== this.id) {
            this.chart?.close();
            this.chart = shown.length ? new Chart({ series: shown.map((label) => ({ label })), height: 220, format: (v) => number(v, 4), x: x || t("line") }) : null;
            fill(this.plot, this.chart?.element);
        }
        this.id = id;
        if (!this.chart) return;
        // uPlot wants x in order.
        const rows = this.rows.map((r, i) => [x ? r[x] : i + 1, r]).filter(([v]) => v !== undefined).sort((a, b) => a[0] - b[0]);
        this.chart.draw([rows.map(([v]) => v), ...shown.map((n) => rows.map(([, r]) => r[n] ?? null))]);
    }
    close() {
        this.chart?.close();
    }
}

/** What a job measures of itself, each figure along the time. */
class Figures {
    constructor() {
        this.charts = h("div", { class: "charts" });
        this.drawn = new Map();
        this.element = h("section", { hidden: true }, h("h3", null, t("figures")), this.charts);
    }
    take({ began, series }) {
        for (const s of series.filter((one) => one.at.length)) {
            if (!this.drawn.has(s.name)) {
                const chart = new Chart({ title: s.name.replaceAll("_", " "), time: true, x: t("time"), height: 170, format: (v) => number(v, 4), series: [{ label: s.name }] });
                chart.element.title = s.help;
                this.drawn.set(s.name, chart);
                this.charts.append(chart.element);
            }
            this.element.hidden = false;
            this.drawn.get(s.name).draw([s.at.map((at) => began + at), s.value]);
        }
    }
    close() {
        this.drawn.forEach((chart) => chart.close());
    }
}

/** Everything about a job, kept up to date by its events. */
function watch(root, id, changed) {
    const stop = new AbortController(), signal = stop.signal;
    const head = h("div", { class: "job" }), log = h("ol", { class: "events" }), results = new Results(), figures = new Figures();
    const told = h("pre", { class: "code" });
    const words = h("details", { ontoggle: async (e) => {
        if (!e.target.open) return;
        told.textContent = await text(`/v1/jobs/${id}/log`, { signal }).catch((problem) => problem.message);
    } }, h("summary", null, t("log")), told);
    let job = null, fetching = false, stale = false;
    const paint = () => job && fill(head, h("h2", null, job.kind, " ", h("small", null, job.id)), state_node(job), progress_node(job),
        job.note && h("p", { class: "error" }, job.note),
        h("p", { class: "quiet" }, [job.started && t("since", moment(job.started)), job.ended && t("until", moment(job.ended)),
            job.attempts > 1 && t("attempts", job.attempts)].filter(Boolean).join(" · ")),
        h("details", null, h("summary", null, t("request")), h("pre", { class: "code" }, JSON.stringify({ kind: job.kind, args: job.args, options: job.options }, null, 1))),
        actions(job, changed));
    const again = async () => {
        job = await json(`/v1/jobs/${id}`, { signal });
        paint();
    };
    // Results are read whole: of events only the newest are kept. The longer that takes, the rarer.
    const load_results = async () => {
        figures.take(await json(`/v1/jobs/${id}/series`, { signal }));
        results.take(await text(`/v1/jobs/${id}/results`, { signal }).catch((e) => (e.status === 404 ? "" : Promise.reject(e))));
    };
    const fetch_results = async () => {
        stale = true;
        if (fetching) return;
        fetching = true;
        while (stale && !signal.aborted) {
            stale = false;
            const began = performance.now();
            await load_results();
            await new Promise((r) => setTimeout(r, Math.max(1000, 10 * (performance.now() - began))));
        }
        fetching = false;
    };
    let after = 0;
    /** Whether that was all; else the connection ended and there may be more. */
    const follow_on = async () => {
        for await (const e of events(`/v1/jobs/${id}/events?after=${after}`, { signal })) {
            if (e.event === "end") return true;
            const v = JSON.parse(e.data);
            after = v.seq ?? after;
            if (v.type === "progress") job.progress = v.progress;
            if (v.type !== "state") fetch_results().catch(complain);
            if (v.type === "state") {
                log.append(h("li", null, h("time", null, moment(v.at)), " ", t("state_" + v.state), v.note && `: ${v.note}`));
                await again();
                changed(false);
            }
            paint();
        }
        return false;
    };
    const follow = async () => {
        await again();
        for (;;) {
            try {
                if (await follow_on()) break;
            } catch (e) {
                if (e.name === "AbortError" || e.status) throw e;
                complain(e); // a server that is gone may come back
            }
            await new Promise((r) => setTimeout(r, 2000));
            if (signal.aborted) return;
        }
        await again();
        await load_results();
    };
    fill(root, head, figures.element, results.element, h("details", { open: true }, h("summary", null, t("events")), log), words);
    follow().catch(complain);
    return () => {
        stop.abort();
        results.close();
        figures.close();
    };
}

export function open(root, id) {
    const list = h("ul", { class: "queue" }), detail = h("div", { class: "detail" });
    const move = mover();
    let gone = false;
    const refresh = async () => {
        const { jobs } = await json("/v1/jobs");
        if (gone) return;
        const held = list.contains(document.activeElement) && document.activeElement.getAttribute("href");
        fill(list, jobs.map((j) => item(j, id)), !jobs.length && h("li", { class: "quiet" }, t("no_jobs")));
        if (held) list.querySelector(`[href="${held}"]`)?.focus();
    };
    const changed = (deleted) => {
        if (deleted) move("#/jobs");
        else refresh().catch(complain);
    };
    fill(root, h("h1", null, t("view_jobs")), starter((job) => move("#/jobs/" + job.id)),
        h("div", { class: "split" }, list, detail));
    const leave = id ? watch(detail, id, changed) : null;
    const stop = every(2000, refresh);
    return () => {
        gone = true;
        stop();
        leave?.();
    };
}
