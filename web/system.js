// System: what the server does now, from the figures that it gives to anybody who asks.
import { figures, json } from "./api.js";
import { Chart } from "./chart.js";
import { bytes, every, fill, h, number, percent, seconds } from "./dom.js";
import { t } from "./words.js";

const EVERY = 2000, KEPT = 300; // ten minutes

/* What is drawn: columns of the history, which is {id: [value, …]} beside `at`. */
const charts = [
    { id: "requests", series: ["running", "waiting"], format: number },
    { id: "speed", series: ["prompt_speed", "generation_speed"], format: number },
    { id: "kv", series: ["kv_usage"], format: percent },
    { id: "cpu", series: ["cpu_usage"], format: number },
    { id: "memory", series: ["resident"], format: bytes },
    { id: "step", series: ["step_time"], format: seconds },
];
const latencies = [
    ["first_token", "vllm:time_to_first_token_seconds"],
    ["between_tokens", "vllm:inter_token_latency_seconds"],
    ["whole_request", "vllm:e2e_request_latency_seconds"],
    ["queue", "vllm:request_queue_time_seconds"],
    ["one_step", "shoal_step_seconds"],
];

const parts = ["weights", "tokenizer", "adapters", "kv", "activations", "rest"];

const history = { at: [] };
let before = null; // the last figures, for differences

/** What grew a second between two looks; not across a restart of the server. */
function growth(now, name, of = (f) => f.value(name)) {
    if (!before) return null;
    const grown = of(now.f) - of(before.f), passed = now.at - before.at;
    return grown >= 0 && passed > 0 ? grown / passed : null;
}

function look(f) {
    const now = { f, at: Date.now() / 1000 };
    const step = (what) => (x) => x.series("shoal_step_seconds")[0]?.[what] ?? 0;
    const steps = growth(now, "", step("count")), busy = growth(now, "", step("sum"));
    const values = {
        at: now.at,
        running: f.value("vllm:num_requests_running"), waiting: f.value("vllm:num_requests_waiting"),
        prompt_speed: growth(now, "vllm:prompt_tokens_total"), generation_speed: growth(now, "vllm:generation_tokens_total"),
        kv_usage: f.value("vllm:kv_cache_usage_perc"), cpu_usage: growth(now, "process_cpu_seconds_total"),
        resident: f.value("process_resident_memory_bytes"), step_time: steps ? busy / steps : null,
    };
    for (const [id, v] of Object.entries(values)) {
        history[id] ??= [];
        history[id].push(v);
        if (history[id].length > KEPT) history[id].shift();
    }
    before = now;
    return values;
}

function facts_node(f, v) {
    const build = f.labels("shoal_build_info"), cache = f.labels("vllm:cache_config_info");
    const jobs = f.series("shoal_jobs").filter((s) => s.value > 0).map((s) => `${s.labels.kind} ${t("state_" + s.labels.state)}: ${s.value}`);
    const rows = [
        ["running", number(v.running)], ["waiting", number(v.waiting)],
        ["received", number(f.value("shoal_requests_received_total"))],
        ["rejected", number(f.value("shoal_requests_rejected_total") ?? 0)],
        ["prompt_tokens", number(f.value("vllm:prompt_tokens_total") ?? 0)],
        ["generated_tokens", number(f.value("vllm:generation_tokens_total") ?? 0)],
        ["kv_usage", `${percent(v.kv_usage)} (${cache.num_gpu_blocks ?? "–"} × ${cache.block_size ?? "–"})`],
        ["adapters", `${number(f.value("shoal_adapters_resident"))} (${bytes(f.value("shoal_adapters_resident_bytes"))})`],
        ["memory", bytes(v.resident)],
        ["free_memory", bytes(f.value("shoal_host_memory_available_bytes"))],
        ["processors", `${number(f.value("shoal_cpus"))} · ${build.level ?? ""}`],
        ["up", seconds(v.at - f.value("process_start_time_seconds"))],
    ];
    if (jobs.length) rows.push(["view_jobs", jobs.join(", ")]);
    return h("dl", { class: "facts" }, rows.map(([id, text]) => h("div", null, h("dt", null, t(id)), h("dd", null, text))));
}

/** What the server said of itself, the plan of its memory, and alerts that are near or raised. */
function plan_node(v) {
    const p = v.memory.plan, k = v.kernels, total = Object.entries(p).filter(([id]) => parts.includes(id)).reduce((sum, [, n]) => sum + n, 0);
    const rows = parts.map((id) => [id, id === "adapters" ? v.memory.adapters : p[id]]).filter(([, n]) => n > 0);
    return h("div", { class: "grid" },
        h("section", { class: "panel" }, h("h2", null, t("memory_plan")), h("table", { class: "list" }, h("tbody", null, rows.map(([id, n]) => h("tr", null,
            h("th", { scope: "row" }, t("plan_" + id)), h("td", { class: "n" }, bytes(n)),
            h("td", null, h("meter", { min: 0, max: Math.max(total, n), value: n, "aria-label": t("plan_" + id) })))))),
        h("small", null, p.limit ? `${t("budget")}: ${bytes(p.limit)}` : t("no_budget"), ` · ${t("peak")}: ${bytes(v.memory.peak)}`)),
        h("section", { class: "panel" }, h("h2", null, t("kernels")), h("dl", { class: "facts" }, [
            ["level", k.level], ["class", k.class], ["weights", k.weights], ["kv", k.kv], ["lora", k.lora], ["threads", k.threads],
        ].map(([id, text]) => h("div", null, h("dt", null, t("kernel_" + id)), h("dd", null, text))))));
}

function alerts_node(v) {
    const near = v.alerts.filter((a) => a.state !== "inactive");
    if (!near.length) return h("p", { class: "quiet" }, t("no_alerts"));
    return h("ul", { class: "alerts" }, near.map((a) => h("li", { class: a.state }, h("b", null, a.alert), " ", t("alert_" + a.state), ": ", a.summary,
        a.value === null ? null : ` (${number(a.value)})`)));
}

const latency_node = (f) => h("div", { class: "wide" }, h("table", { class: "list" },
    h("thead", null, h("tr", null, h("th", null, t("latency")),
        ["n", "mean", "p50", "p90", "p99"].map((id) => h("th", { class: "n" }, t("q_" + id))))),
    h("tbody", null, latencies.map(([id, name]) => {
        const s = f.series(name)[0] ?? {};
        return h("tr", null, h("th", { scope: "row" }, t(id)), h("td", { class: "n" }, number(s.count ?? 0)),
            [s.count ? s.sum / s.count : null, s.p50, s.p90, s.p99].map((v) => h("td", { class: "n" }, seconds(v))));
    }))), h("small", null, t("q_note")));

export function open(root) {
    let over = false;
    const facts = h("div"), latency = h("div"), plan = h("div"), alerts = h("div", { role: "status" });
    const drawn = charts.map((c) => [c, new Chart({
        title: t("chart_" + c.id), time: true, x: t("time"), format: c.format, series: c.series.map((id) => ({ label: t(id) })),
    })]);
    const links = ["/metrics", "/v1/metrics", "/v1/system", "/v1/alerts", "/v1/metrics/rules", "/v1/metrics/dashboard"];
    fill(root, h("h1", null, t("view_system")), alerts, facts, h("div", { class: "charts" }, drawn.map(([, c]) => c.element)),
        latency, plan, h("p", { class: "quiet" }, t("figures_from"), " ", links.map((l) => [h("a", { href: l, target: "_blank", rel: "noopener" }, l), " "])));
    const draw = () => drawn.forEach(([c, chart]) => chart.draw([history.at, ...c.series.map((id) => history[id])]));
    if (history.at.length) draw();
    const stop = every(EVERY, async () => {
        const f = await figures();
        if (over) return;
        const v = look(f), [system, warnings] = await Promise.all([json("/v1/system"), json("/v1/alerts")]);
        if (over) return;
        fill(plan, plan_node(system));
        fill(alerts, alerts_node(warnings));
        fill(facts, facts_node(f, v));
        fill(latency, latency_node(f));
        draw();
    });
    return () => {
        over = true;
        stop();
        drawn.forEach(([, chart]) => chart.close());
    };
}
