// System: the state of the server, from its metrics.
import { json, metrics } from "./api.js";
import { Chart } from "./chart.js";
import { bytes, fill, h, number, percent, poll, seconds } from "./dom.js";
import { t } from "./words.js";

const INTERVAL = 2000 /* ms */, MAX_HISTORY = 300; // ten minutes

/* Each series is a column of the history. */
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

const memory_parts = ["weights", "tokenizer", "adapters", "kv", "activations", "rest"];

const history = { at: [] }; // {at: [Unix time, …], series id: [value, …]}
let previous = null; // the metrics before the current ones, {metrics, at}

/** The increase of a counter per second since the previous metrics; null after a restart of the server. */
function rate(now, name, value_of = (m) => m.value(name)) {
    if (!previous) return null;
    const increase = value_of(now.metrics) - value_of(previous.metrics), elapsed = now.at - previous.at;
    return increase >= 0 && elapsed > 0 ? increase / elapsed : null;
}

function add_to_history(f) {
    const now = { metrics: f, at: Date.now() / 1000 };
    const step_metric = (field) => (m) => m.series("shoal_step_seconds")[0]?.[field] ?? 0;
    const step_rate = rate(now, "", step_metric("count")), busy = rate(now, "", step_metric("sum"));
    const values = {
        at: now.at,
        running: f.value("vllm:num_requests_running"), waiting: f.value("vllm:num_requests_waiting"),
        prompt_speed: rate(now, "vllm:prompt_tokens_total"), generation_speed: rate(now, "vllm:generation_tokens_total"),
        kv_usage: f.value("vllm:kv_cache_usage_perc"), cpu_usage: rate(now, "process_cpu_seconds_total"),
        resident: f.value("process_resident_memory_bytes"), step_time: step_rate ? busy / step_rate : null,
    };
    for (const [id, v] of Object.entries(values)) {
        history[id] ??= [];
        history[id].push(v);
        if (history[id].length > MAX_HISTORY) history[id].shift();
    }
    previous = now;
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
        ["uptime", seconds(v.at - f.value("process_start_time_seconds"))],
    ];
    if (jobs.length) rows.push(["view_jobs", jobs.join(", ")]);
    return h("dl", { class: "facts" }, rows.map(([id, text]) => h("div", null, h("dt", null, t(id)), h("dd", null, text))));
}

/** The memory plan and the kernels of the server. */
function plan_node(v) {
    const p = v.memory.plan, k = v.kernels, total = Object.entries(p).filter(([id]) => memory_parts.includes(id)).reduce((sum, [, n]) => sum + n, 0);
    const rows = memory_parts.map((id) => [id, id === "adapters" ? v.memory.adapters : p[id]]).filter(([, n]) => n > 0);
    return h("div", { class: "grid" },
        h("section", { class: "panel" }, h("h2", null, t("memory_plan")), h("table", { class: "list" }, h("tbody", null, rows.map(([id, n]) => h("tr", null,
            h("th", { scope: "row" }, t("plan_" + id)), h("td", { class: "num" }, bytes(n)),
            h("td", null, h("meter", { min: 0, max: Math.max(total, n), value: n, "aria-label": t("plan_" + id) })))))),
        h("small", null, p.limit ? `${t("budget")}: ${bytes(p.limit)}` : t("no_budget"), ` · ${t("peak")}: ${bytes(v.memory.peak)}`)),
        h("section", { class: "panel" }, h("h2", null, t("kernels")), h("dl", { class: "facts" }, [
            ["level", k.level], ["class", k.class], ["weights", k.weights], ["kv", k.kv], ["lora", k.lora], ["threads", k.threads],
        ].map(([id, text]) => h("div", null, h("dt", null, t("kernel_" + id)), h("dd", null, text))))));
}

/** The nodes of a server with a cluster. */
const cluster_node = (v) => h("section", null, h("h2", null, t("nodes")),
    h("div", { class: "scroll-x" }, h("table", { class: "list" },
        h("thead", null, h("tr", null, h("th", null, t("node")), h("th", null, t("node_state")), h("th", null, t("kernel_level")),
            ["kernel_threads", "node_load", "node_units", "node_done", "node_seconds", "adapters"].map((id) => h("th", { class: "num" }, t(id))))),
        h("tbody", null, v.nodes.map((n) => h("tr", null, h("th", { scope: "row" }, n.name),
            h("td", { class: n.state === "up" ? null : "error" }, t("node_" + n.state), n.usable ? null : `, ${t("node_other_model")}`), h("td", null, n.level),
            [number(n.threads), percent(n.load), number(n.units), number(n.done), seconds(n.seconds_per_unit), number(n.adapters.length)]
                .map((text) => h("td", { class: "num" }, text))))))),
    h("small", null, `${v.address} · ${v.balancer} · ${t("computed_here")}: ${number(v.computed_here)} · ${t("assigned_again")}: ${number(v.assigned_again)}`));

/** The alerts that are pending or firing. */
function alerts_node(v) {
    const active = v.alerts.filter((a) => a.state !== "inactive");
    if (!active.length) return h("p", { class: "muted" }, t("no_alerts"));
    return h("ul", { class: "alerts" }, active.map((a) => h("li", { class: a.state }, h("b", null, a.alert), " ", t("alert_" + a.state), ": ", a.summary,
        a.value === null ? null : ` (${number(a.value)})`)));
}

const latency_node = (f) => h("div", { class: "scroll-x" }, h("table", { class: "list" },
    h("thead", null, h("tr", null, h("th", null, t("latency")),
        ["n", "mean", "p50", "p90", "p99"].map((id) => h("th", { class: "num" }, t("q_" + id))))),
    h("tbody", null, latencies.map(([id, name]) => {
        const s = f.series(name)[0] ?? {};
        return h("tr", null, h("th", { scope: "row" }, t(id)), h("td", { class: "num" }, number(s.count ?? 0)),
            [s.count ? s.sum / s.count : null, s.p50, s.p90, s.p99].map((v) => h("td", { class: "num" }, seconds(v))));
    }))), h("small", null, t("q_note")));

export function open(root) {
    let closed = false;
    const facts = h("div"), nodes = h("div"), latency = h("div"), plan = h("div"), alerts = h("div", { role: "status" });
    const chart_views = charts.map((c) => [c, new Chart({
        title: t("chart_" + c.id), time: true, x: t("time"), format: c.format, series: c.series.map((id) => ({ label: t(id) })),
    })]);
    const links = ["/metrics", "/v1/metrics", "/v1/system", "/v1/alerts", "/v1/metrics/rules", "/v1/metrics/dashboard"];
    fill(root, h("h1", null, t("view_system")), alerts, facts, h("div", { class: "charts" }, chart_views.map(([, c]) => c.element)),
        nodes, latency, plan, h("p", { class: "muted" }, t("endpoints"), " ", links.map((l) => [h("a", { href: l, target: "_blank", rel: "noopener" }, l), " "])));
    const draw = () => chart_views.forEach(([c, chart]) => chart.draw([history.at, ...c.series.map((id) => history[id])]));
    if (history.at.length) draw();
    const stop = poll(INTERVAL, async () => {
        const f = await metrics();
        if (closed) return;
        const has_cluster = f.series("shoal_cluster_nodes").length > 0;
        const v = add_to_history(f), [system, alert_list, cluster] = await Promise.all(
            [json("/v1/system"), json("/v1/alerts"), has_cluster ? json("/v1/cluster") : null]);
        if (closed) return;
        fill(plan, plan_node(system));
        fill(alerts, alerts_node(alert_list));
        fill(facts, facts_node(f, v));
        if (cluster) fill(nodes, cluster_node(cluster));
        fill(latency, latency_node(f));
        draw();
    });
    return () => {
        closed = true;
        stop();
        chart_views.forEach(([, chart]) => chart.close());
    };
}
