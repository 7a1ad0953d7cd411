// A/B tests: two adapters compared on live traffic by the ratings of their replies.
import { call, json, models } from "./api.js";
import { Chart } from "./chart.js";
import { date_time, fill, h, interval_bar, labelled, load, number, option, percent, poll, save, show_error, view_navigation } from "./dom.js";
import { t } from "./words.js";

const MAX_HISTORY = 1000;

/*
 * The course of the difference, {pairs, value, lo, hi} each, by name and start of the experiment. The
 * server has only the current value.
 */
const history = new Map();

function record_difference(e) {
    const key = `${e.name} ${e.created}`, list = history.get(key) ?? [];
    const last = list.at(-1);
    if (!last || e.pairs > last.pairs) list.push({ pairs: e.pairs, ...e.difference });
    if (list.length > MAX_HISTORY) list.shift();
    history.set(key, list);
    return list;
}

/* the form of a new experiment */

function new_form(on_start) {
    const name = h("input", { required: true, spellcheck: "false", "data-focus": true, placeholder: "trial", maxlength: 64 });
    const model = h("select", { required: true }), b = h("select", { required: true });
    const share = h("input", { type: "number", min: 0.01, max: 0.99, step: "any", value: 0.5, required: true });
    const alpha = h("input", { type: "number", min: 0.000001, max: 0.5, step: "any", value: 0.05, required: true });
    const hint = h("p", { class: "muted", hidden: true }, t("two_needed"));
    const form = h("form", { class: "panel", onsubmit: async (e) => {
        e.preventDefault();
        try {
            const body = { name: name.value.trim(), model: model.value, b: b.value, share: Number(share.value), alpha: Number(alpha.value) };
            on_start(await json("/v1/ab", { body }));
            name.value = "";
        } catch (error) {
            show_error(error);
        }
    } }, h("div", { class: "grid" }, labelled(t("name"), name), labelled(t("ab_model"), model), labelled(t("ab_b"), b),
        labelled(t("ab_share"), share), labelled(t("ab_alpha"), alpha)), hint,
    h("div", { class: "row" }, h("span", { class: "space" }), h("button", { type: "submit", class: "main" }, t("start"))));
    models().then(({ adapters }) => {
        fill(model, adapters.map((a) => option(a.id, a.id, "")));
        fill(b, adapters.map((a) => option(a.id, a.id, adapters[1]?.id)));
        hint.hidden = adapters.length > 1;
    }).catch(show_error);
    return h("details", { class: "new-form", open: load("ab_open", true), ontoggle: (e) => save("ab_open", e.target.open) },
        h("summary", null, t("new_experiment")), form);
}

/* one experiment */

const state_node = (e) => h("span", { class: "state " + e.state }, t("state_" + e.state));

const item = (e, chosen) => h("li", null, h("a", { href: "#/ab/" + encodeURIComponent(e.name), "aria-current": e.name === chosen && "true" },
    h("span", null, h("b", null, e.name), " ", h("small", null, `${e.a} / ${e.b}`)), state_node(e),
    h("small", null, `${t("pairs")}: ${number(e.pairs)} · ${t("ab_" + e.decision)}`)));

/** A row with an e-value and its decision threshold. E-values multiply, so the bar is logarithmic. */
function evidence_row(id, v, threshold) {
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * Math.max(0, Math.min(1, Math.log(Math.max(v, 1)) / Math.log(threshold))) + "%";
    return h("tr", { class: v >= threshold && "selected" }, h("td", null, t(id)), h("td", { class: "track" }, bar), h("td", { class: "num" }, `${number(v)} / ${number(threshold)}`));
}

function metrics_node(e) {
    const row = (variant) => h("tr", null, h("th", { scope: "row" }, variant, " ", h("small", null, e[variant])),
        ["requests", "outcomes"].map((id) => h("td", { class: "num" }, number(e[id][variant]))), h("td", { class: "num" }, e.pairs ? number(e.mean[variant]) : "–"));
    const d = e.difference;
    return [
        h("div", { class: "scroll-x" }, h("table", { class: "list" }, h("thead", null, h("tr", null, h("th", null, t("variant")),
            ["requests", "outcomes", "mean"].map((id) => h("th", { class: "num" }, t(id))))), h("tbody", null, row("a"), row("b")))),
        h("h3", null, t("difference"), " b − a: ", h("b", null, e.pairs ? number(d.value) : "–"), ` [${number(d.lo)}, ${number(d.hi)}]`),
        interval_bar(d, -1, 1),
        h("h3", null, t("evidence")),
        h("table", { class: "bars" }, evidence_row("b_better", e.e_value.b_better, e.e_value.decides_at), evidence_row("b_worse", e.e_value.b_worse, e.e_value.decides_at)),
        h("dl", { class: "facts" }, [
            ["pairs", `${number(e.pairs)} (${number(e.min_pairs)} – ${number(e.max_pairs)})`], ["ab_share", percent(e.share)], ["ab_alpha", number(e.alpha)],
            ["once_per_user", t(e.once_per_user ? "yes" : "no")], ["started", date_time(1000 * e.created)], ["ended", e.ended ? date_time(1000 * e.ended) : "–"],
        ].map(([id, text]) => h("div", null, h("dt", null, t(id)), h("dd", null, text)))),
        e.serves && h("p", { class: "muted" }, t("now_serves"), " ", h("code", { class: "path" }, e.serves)),
    ];
}

class ExperimentView {
    constructor(root, on_change) {
        this.on_change = on_change;
        this.head = h("div", { class: "job" });
        this.chart = new Chart({
            title: t("chart_ab"), x: t("pairs"), height: 170, bands: [[2, 3]], format: (v) => number(v),
            series: [{ label: t("difference") }, { label: t("upper") }, { label: t("lower") }],
        });
        this.metrics = h("div");
        fill(root, this.head, this.metrics, this.chart.element);
    }
    update(e) {
        this.chart.element.hidden = !e;
        if (!e) return fill(this.head, h("p", { class: "muted" }, t("no_experiment")));
        const list = record_difference(e), now = JSON.stringify(e);
        if (now === this.drawn) return undefined;
        this.drawn = now;
        const action_button = (id, method, path) => h("button", { type: "button", onclick: async () => {
            try {
                await call(`/v1/ab/${encodeURIComponent(e.name)}${path}`, { method });
                this.on_change(method === "DELETE");
            } catch (error) {
                show_error(error);
            }
        } }, t(id));
        fill(this.head, h("h2", null, e.name, " ", h("small", null, e.model)), state_node(e), " ", h("b", { class: "decision " + e.decision }, t("ab_" + e.decision)),
            e.problem && h("p", { class: "error" }, e.problem),
            h("div", { class: "row" }, e.state === "running" && action_button("stop", "POST", "/stop"), action_button("delete", "DELETE", "")));
        fill(this.metrics, metrics_node(e).flat(9));
        this.chart.draw([list.map((p) => p.pairs), ...["value", "hi", "lo"].map((k) => list.map((p) => p[k]))]);
        return undefined;
    }
    close() {
        this.chart.close();
    }
}

export function open(root, name) {
    const list = h("ul", { class: "item-list" }), detail = h("div", { class: "detail" });
    const navigate = view_navigation();
    let closed = false;
    const refresh = async () => {
        const { data } = await json("/v1/ab");
        if (closed) return;
        data.forEach(record_difference);
        const focused = list.contains(document.activeElement) && document.activeElement.getAttribute("href");
        fill(list, data.map((e) => item(e, name)), !data.length && h("li", { class: "muted" }, t("no_experiments")));
        if (focused) list.querySelector(`[href="${focused}"]`)?.focus();
        shown?.update(data.find((e) => e.name === name));
    };
    const on_change = (deleted) => {
        if (deleted) navigate("#/ab");
        else refresh().catch(show_error);
    };
    fill(root, h("h1", null, t("view_ab")), h("p", { class: "muted" }, t("ab_about")), new_form((e) => navigate("#/ab/" + encodeURIComponent(e.name))),
        h("div", { class: "split" }, list, detail));
    const shown = name ? new ExperimentView(detail, on_change) : null;
    const stop = poll(2000, refresh);
    return () => {
        closed = true;
        stop();
        shown?.close();
    };
}
