// Jobs: commands that the server runs as separate processes: start, progress, results, metrics.
import { call, events, has_ended, json, models, text as fetch_text } from "./api.js";
import { Chart } from "./chart.js";
import { date_time, fill, h, labelled, load, number, option, percent, poll, save, seconds, show_error, view_navigation } from "./dom.js";
import { t } from "./words.js";

const MAX_LINES = 200; // lines of results that are shown as text

/* the form of a new job */

/** The initial values of the form by kind of job; {model} is the served base model. */
const kinds = {
    world: { args: [], options: { policy: ["rule", "random"], maps: 8, steps: 200 } },
    train: { args: ["{model}"], options: { data: "data.jsonl", out: "my-adapter", r: 8, lr: 0.004 } },
    evolve: { args: ["examples/demo.yaml"], options: { seed: 1 } },
    grow: { args: ["{model}"], options: { prompts: "arithmetic,order", check: "question", out: "grown", rounds: 2, r: 8, lr: 0.004, "max-steps": 150 } },
    eval: { args: ["{model}"], options: { tasks: "starter" } },
    debate: { args: ["{model}"], options: { agents: ["base", "base"], tasks: "pick", n: 100 } },
    ask: { args: ["{model}", "3 + 4 = ?"], options: { agents: 3 } },
    quantize: { args: ["{model}", "small.gguf"], options: { type: "q8_0" } },
};

const value_of_text = (text) => {
    try {
        return JSON.parse(text);
    } catch {
        return text;
    }
};
const text_of_value = (v) => (typeof v === "string" && typeof value_of_text(v) === "string" ? v : JSON.stringify(v));

/** A new Idempotency-Key: a form that is sent twice creates one job. crypto.randomUUID requires HTTPS, getRandomValues does not. */
const new_idempotency_key = () => [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");

/** The request as a form and as JSON; an edit of one updates the other. */
function new_form(on_start) {
    let request = { kind: "world", ...structuredClone(kinds.world) }, idempotency_key = new_idempotency_key(), model = "MODEL";
    const kind = h("select", { "data-focus": true, onchange: () => {
        request = JSON.parse(JSON.stringify({ kind: kind.value, ...kinds[kind.value] }).replaceAll("{model}", model));
        draw_all();
    } }, Object.keys(kinds).map((id) => option(id, id, request.kind)));
    const args = h("textarea", { rows: 2, spellcheck: "false", class: "code", oninput: () => {
        request.args = args.value.split("\n").filter(Boolean);
        draw_json();
    } });
    const rows = h("div", { class: "options" });
    const json_field = h("textarea", { rows: 6, spellcheck: "false", class: "code", oninput: () => {
        try {
            const v = JSON.parse(json_field.value);
            json_field.setCustomValidity("");
            if (typeof v !== "object" || !v) return;
            request = v;
            draw_form();
        } catch (e) {
            json_field.setCustomValidity(e.message);
        }
    } });
    const details = h("details", null, h("summary", null, t("as_json")), labelled(t("request"), json_field));
    const add = h("button", { type: "button", onclick: () => rows.append(option_row("", "")) }, t("add_option"));
    function option_row(name, v) {
        const name_field = h("input", { value: name, placeholder: t("option"), "aria-label": t("option"), spellcheck: "false", oninput: () => read_rows() });
        const value_field = h("input", { value: v, placeholder: t("value"), "aria-label": t("value"), spellcheck: "false", oninput: () => read_rows() });
        const node = h("div", { class: "row" }, name_field, value_field, h("button", {
            type: "button", "aria-label": t("remove"), onclick: () => (node.remove(), read_rows()) }, "×"));
        return node;
    }
    function read_rows() {
        request.options = {};
        for (const r of rows.children) {
            const [name_field, value_field] = r.querySelectorAll("input");
            if (name_field.value.trim()) request.options[name_field.value.trim()] = value_of_text(value_field.value);
        }
        draw_json();
    }
    const draw_json = () => {
        json_field.value = JSON.stringify(request, null, 1);
        json_field.setCustomValidity("");
        idempotency_key = new_idempotency_key();
    };
    const draw_form = () => {
        kind.value = request.kind;
        args.value = (request.args ?? []).join("\n");
        fill(rows, Object.entries(request.options ?? {}).map(([name, v]) => option_row(name, text_of_value(v))));
        idempotency_key = new_idempotency_key();
    };
    const draw_all = () => (draw_form(), draw_json());
    const form = h("form", {
        class: "panel", onsubmit: async (e) => {
            e.preventDefault();
            try {
                const job = await json("/v1/jobs", { body: request, headers: { "Idempotency-Key": idempotency_key } });
                idempotency_key = new_idempotency_key();
                on_start(job);
            } catch (error) {
                show_error(error);
            }
        },
    }, h("div", { class: "grid" }, labelled(t("kind"), kind), labelled(t("args"), args)), rows, details,
    h("div", { class: "row" }, add, h("span", { class: "space" }), h("button", { type: "submit", class: "main" }, t("start"))));
    models().then((m) => (model = m.base[0]?.root ?? model)).catch(show_error);
    draw_all();
    return h("details", { class: "new-form", open: load("jobs_open", true), ontoggle: (e) => e.target.classList.contains("new-form") && save("jobs_open", e.target.open) },
        h("summary", null, t("new_job")), form);
}

/* one job */

const share_done = (p) => (p?.total > 0 ? Math.min(1, p.done / p.total) : null);

function progress_node(job) {
    const p = job.progress, share = job.state === "done" ? 1 : share_done(p);
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * (share ?? 0) + "%";
    const texts = job.state === "done" ? [] : [p?.title, share !== null && percent(share),
        p?.total > 0 && `${number(p.done)} / ${number(p.total)}`, !has_ended(job.state) && p?.seconds_left > 0 && t("time_left", seconds(p.seconds_left))];
    return [h("div", { class: "track", role: "progressbar", "aria-label": job.id, "aria-valuemin": 0, "aria-valuemax": 100,
        "aria-valuenow": share === null ? undefined : Math.round(100 * share) }, bar),
    h("small", null, texts.filter(Boolean).join(" · "))];
}

function action_buttons(job, on_change) {
    const send = (method, path) => async () => {
        try {
            await call(`/v1/jobs/${job.id}${path}`, { method });
            on_change(method === "DELETE");
        } catch (e) {
            show_error(e);
        }
    };
    const button = (id, method, path) => h("button", { type: "button", onclick: send(method, path) }, t(id));
    return h("div", { class: "row" },
        ["queued", "running"].includes(job.state) && button("pause", "POST", "/pause"),
        ["paused", "failed", "cancelled"].includes(job.state) && button("resume", "POST", "/resume"),
        !has_ended(job.state) && button("cancel", "POST", "/cancel"),
        has_ended(job.state) && button("delete", "DELETE", ""));
}

const state_node = (job) => h("span", { class: "state " + job.state }, t("state_" + job.state));

const item = (job, chosen) => h("li", null, h("a", { href: "#/jobs/" + job.id, "aria-current": job.id === chosen && "true" },
    h("span", null, h("b", null, job.kind), " ", h("small", null, job.id)), state_node(job), ...progress_node(job)));

/* results: lines of JSON; their numbers are drawn as curves */

/** The numbers of a line as {"a.b.c": number}, at most three levels deep. */
function numbers_of(line, path = "", out = {}) {
    for (const [k, v] of Object.entries(line ?? {}))
        if (typeof v === "number") out[path + k] = v;
        else if (v && typeof v === "object" && !Array.isArray(v) && path.split(".").length < 3) numbers_of(v, `${path}${k}.`, out);
    return out;
}

const parse_lines = (text) => text.split("\n").filter(Boolean).map((l) => {
    const v = value_of_text(l);
    return v && typeof v === "object" ? numbers_of(v) : {};
});

/* Names of the fields that are shown by default, the most important first; bounds of intervals are not. */
const important = [/loss/, /fitness/, /delivered/, /acc/, /reward/, /score/];
const rank = (name) => {
    const i = /\.(lo|hi|low|high)$/.test(name) ? -1 : important.findIndex((r) => r.test(name));
    return i < 0 ? important.length : i;
};
const x_names = ["step", "generation", "tick", "epoch", "round", "n"];

/** The fields of all lines, the most important first. */
function fields_of(rows) {
    const names = [...new Set(rows.flatMap((r) => Object.keys(r)))];
    return names.sort((a, b) => rank(a) - rank(b));
}

class ResultsView {
    constructor() {
        this.rows = [];
        this.chosen = null; // Set of field names; null before the first lines
        this.plot = h("div");
        this.pick = h("div", { class: "fields", role: "group", "aria-label": t("fields") });
        this.axis = h("select", { onchange: () => this.draw(true) });
        this.raw = h("pre", { class: "code" });
        this.count = h("summary");
        this.element = h("section", { hidden: true }, h("h3", null, t("results")), this.plot, this.pick,
            labelled(t("x_axis"), this.axis), h("details", null, this.count, this.raw));
    }
    update(text) {
        const lines = text.split("\n").filter(Boolean);
        this.rows = parse_lines(text);
        this.element.hidden = !lines.length;
        this.count.textContent = lines.length > MAX_LINES ? t("last_lines", MAX_LINES, number(lines.length)) : t("n_lines", number(lines.length));
        this.raw.textContent = lines.slice(-MAX_LINES).join("\n");
        const names = fields_of(this.rows);
        if (names.join() !== this.names?.join()) this.draw_choices(names);
        this.draw(false);
    }
    draw_choices(names) {
        const x = this.axis.value || names.find((n) => x_names.includes(n)) || "";
        this.names = names;
        const best = names.filter((n) => n !== x);
        if (best.length) this.chosen ??= new Set(best.filter((n) => rank(n) === rank(best[0])).slice(0, rank(best[0]) < important.length ? 3 : 1));
        fill(this.axis, option("", t("line"), x), names.map((n) => option(n, n, x)));
        fill(this.pick, names.map((n) => h("label", { class: "check" }, h("input", {
            type: "checkbox", checked: this.chosen.has(n), onchange: (e) => {
                if (e.target.checked) this.chosen.add(n);
                else this.chosen.delete(n);
                this.draw(true);
            },
        }), n)));
    }
    /** `force`: builds the chart again although its series are the same. */
    draw(force) {
        const shown = this.names.filter((n) => this.chosen?.has(n)), x = this.axis.value;
        const id = shown.join("\n") + "\n" + x;
        if (force || id !== this.id) {
            this.chart?.close();
            this.chart = shown.length ? new Chart({ series: shown.map((label) => ({ label })), height: 220, format: (v) => number(v, 4), x: x || t("line") }) : null;
            fill(this.plot, this.chart?.element);
        }
        this.id = id;
        if (!this.chart) return;
        // uPlot requires sorted x values.
        const rows = this.rows.map((r, i) => [x ? r[x] : i + 1, r]).filter(([v]) => v !== undefined).sort((a, b) => a[0] - b[0]);
        this.chart.draw([rows.map(([v]) => v), ...shown.map((n) => rows.map(([, r]) => r[n] ?? null))]);
    }
    close() {
        this.chart?.close();
    }
}

/** The metrics of a job, one chart over time each. */
class MetricsView {
    constructor() {
        this.charts = h("div", { class: "charts" });
        this.by_name = new Map();
        this.element = h("section", { hidden: true }, h("h3", null, t("metrics")), this.charts);
    }
    update({ began, series }) {
        for (const s of series.filter(({ at }) => at.length)) {
            if (!this.by_name.has(s.name)) {
                const chart = new Chart({ title: s.name.replaceAll("_", " "), time: true, x: t("time"), height: 170, format: (v) => number(v, 4), series: [{ label: s.name }] });
                chart.element.title = s.help;
                this.by_name.set(s.name, chart);
                this.charts.append(chart.element);
            }
            this.element.hidden = false;
            this.by_name.get(s.name).draw([s.at.map((at) => began + at), s.value]);
        }
    }
    close() {
        this.by_name.forEach((chart) => chart.close());
    }
}

/** Shows a job and updates it by its events. */
function open_job(root, id, on_change) {
    const stop = new AbortController(), signal = stop.signal;
    const head = h("div", { class: "job" }), log = h("ol", { class: "events" }), results = new ResultsView(), job_metrics = new MetricsView();
    const log_text = h("pre", { class: "code" });
    const log_details = h("details", { ontoggle: async (e) => {
        if (!e.target.open) return;
        log_text.textContent = await fetch_text(`/v1/jobs/${id}/log`, { signal }).catch((error) => error.message);
    } }, h("summary", null, t("log")), log_text);
    let job = null, fetching = false, stale = false;
    const draw = () => job && fill(head, h("h2", null, job.kind, " ", h("small", null, job.id)), state_node(job), progress_node(job),
        job.note && h("p", { class: "error" }, job.note),
        h("p", { class: "muted" }, [job.started && t("started_at", date_time(job.started)), job.ended && t("ended_at", date_time(job.ended)),
            job.attempts > 1 && t("attempts", job.attempts)].filter(Boolean).join(" · ")),
        h("details", null, h("summary", null, t("request")), h("pre", { class: "code" }, JSON.stringify({ kind: job.kind, args: job.args, options: job.options }, null, 1))),
        action_buttons(job, on_change));
    const refresh = async () => {
        job = await json(`/v1/jobs/${id}`, { signal });
        draw();
    };
    // All results are loaded each time, because the server keeps only the newest events.
    const load_results = async () => {
        job_metrics.update(await json(`/v1/jobs/${id}/series`, { signal }));
        results.update(await fetch_text(`/v1/jobs/${id}/results`, { signal }).catch((e) => (e.status === 404 ? "" : Promise.reject(e))));
    };
    // The longer a load takes, the longer the pause after it.
    const fetch_results = async () => {
        stale = true;
        if (fetching) return;
        fetching = true;
        while (stale && !signal.aborted) {
            stale = false;
            const start = performance.now();
            await load_results();
            await new Promise((r) => setTimeout(r, Math.max(1000, 10 * (performance.now() - start))));
        }
        fetching = false;
    };
    let after = 0;
    /** Reads events until the connection closes. Returns whether the job has ended. */
    const read_events = async () => {
        for await (const e of events(`/v1/jobs/${id}/events?after=${after}`, { signal })) {
            if (e.event === "end") return true;
            const v = JSON.parse(e.data);
            after = v.seq ?? after;
            if (v.type === "progress") job.progress = v.progress;
            if (v.type !== "state") fetch_results().catch(show_error);
            if (v.type === "state") {
                log.append(h("li", null, h("time", null, date_time(v.at)), " ", t("state_" + v.state), v.note && `: ${v.note}`));
                await refresh();
                on_change(false);
            }
            draw();
        }
        return false;
    };
    const follow = async () => {
        await refresh();
        for (;;) {
            try {
                if (await read_events()) break;
            } catch (e) {
                if (e.name === "AbortError" || e.status) throw e;
                show_error(e); // the server may be restarting
            }
            await new Promise((r) => setTimeout(r, 2000));
            if (signal.aborted) return;
        }
        await refresh();
        await load_results();
    };
    fill(root, head, job_metrics.element, results.element, h("details", { open: true }, h("summary", null, t("events")), log), log_details);
    follow().catch(show_error);
    return () => {
        stop.abort();
        results.close();
        job_metrics.close();
    };
}

export function open(root, id) {
    const list = h("ul", { class: "item-list" }), detail = h("div", { class: "detail" });
    const navigate = view_navigation();
    let closed = false;
    const refresh = async () => {
        const { jobs } = await json("/v1/jobs");
        if (closed) return;
        const focused = list.contains(document.activeElement) && document.activeElement.getAttribute("href");
        fill(list, jobs.map((j) => item(j, id)), !jobs.length && h("li", { class: "muted" }, t("no_jobs")));
        if (focused) list.querySelector(`[href="${focused}"]`)?.focus();
    };
    const on_change = (deleted) => {
        if (deleted) navigate("#/jobs");
        else refresh().catch(show_error);
    };
    fill(root, h("h1", null, t("view_jobs")), new_form((job) => navigate("#/jobs/" + job.id)),
        h("div", { class: "split" }, list, detail));
    const close_job = id ? open_job(detail, id, on_change) : null;
    const stop = poll(2000, refresh);
    return () => {
        closed = true;
        stop();
        close_job?.();
    };
}
