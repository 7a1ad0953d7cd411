// Experiments: adapters compared on live traffic by what people say of their replies.
import { call, json, models } from "./api.js";
import { Chart } from "./chart.js";
import { complain, every, fill, h, labelled, load, moment, mover, number, option, percent, save, scale } from "./dom.js";
import { t } from "./words.js";

const KEPT = 1000;

/* The difference as it came, by experiment and start: {pairs, value, lo, hi}. The server has the present only. */
const history = new Map();

function remember(e) {
    const key = `${e.name} ${e.created}`, list = history.get(key) ?? [];
    const last = list.at(-1);
    if (!last || e.pairs > last.pairs) list.push({ pairs: e.pairs, ...e.difference });
    if (list.length > KEPT) list.shift();
    history.set(key, list);
    return list;
}

/* starting */

function starter(begun) {
    const name = h("input", { required: true, spellcheck: "false", "data-focus": true, placeholder: "trial", maxlength: 64 });
    const model = h("select", { required: true }), b = h("select", { required: true });
    const part = h("input", { type: "number", min: 0.01, max: 0.99, step: "any", value: 0.5, required: true });
    const alpha = h("input", { type: "number", min: 0.000001, max: 0.5, step: "any", value: 0.05, required: true });
    const few = h("p", { class: "quiet", hidden: true }, t("two_needed"));
    const form = h("form", { class: "panel", onsubmit: async (e) => {
        e.preventDefault();
        try {
            const body = { name: name.value.trim(), model: model.value, b: b.value, share: Number(part.value), alpha: Number(alpha.value) };
            begun(await json("/v1/ab", { body }));
            name.value = "";
        } catch (problem) {
            complain(problem);
        }
    } }, h("div", { class: "grid" }, labelled(t("name"), name), labelled(t("ab_model"), model), labelled(t("ab_b"), b),
        labelled(t("ab_share"), part), labelled(t("ab_alpha"), alpha)), few,
    h("div", { class: "row" }, h("span", { class: "space" }), h("button", { type: "submit", class: "main" }, t("start"))));
    models().then(({ adapters }) => {
        fill(model, adapters.map((a) => option(a.id, a.id, "")));
        fill(b, adapters.map((a) => option(a.id, a.id, adapters[1]?.id)));
        few.hidden = adapters.length > 1;
    }).catch(complain);
    return h("details", { class: "starter", open: load("ab_open", true), ontoggle: (e) => save("ab_open", e.target.open) },
        h("summary", null, t("new_experiment")), form);
}

/* one experiment */

const state_node = (e) => h("span", { class: "state " + e.state }, t("state_" + e.state));

const item = (e, chosen) => h("li", null, h("a", { href: "#/ab/" + encodeURIComponent(e.name), "aria-current": e.name === chosen && "true" },
    h("span", null, h("b", null, e.name), " ", h("small", null, `${e.a} / ${e.b}`)), state_node(e),
    h("small", null, `${t("pairs")}: ${number(e.pairs)} · ${t("ab_" + e.decision)}`)));

/** Evidence on the way to a decision; it multiplies, so its logarithm is what is drawn. */
function evidence(id, v, most) {
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * Math.max(0, Math.min(1, Math.log(Math.max(v, 1)) / Math.log(most))) + "%";
    return h("tr", { class: v >= most && "own" }, h("td", null, t(id)), h("td", { class: "track" }, bar), h("td", { class: "n" }, `${number(v)} / ${number(most)}`));
}

function figures_node(e) {
    const row = (side) => h("tr", null, h("th", { scope: "row" }, side, " ", h("small", null, e[side])),
        ["requests", "outcomes"].map((id) => h("td", { class: "n" }, number(e[id][side]))), h("td", { class: "n" }, e.pairs ? number(e.mean[side]) : "–"));
    const d = e.difference;
    return [
        h("div", { class: "wide" }, h("table", { class: "list" }, h("thead", null, h("tr", null, h("th", null, t("side")),
            ["requests", "outcomes", "mean"].map((id) => h("th", { class: "n" }, t(id))))), h("tbody", null, row("a"), row("b")))),
        h("h3", null, t("difference"), " b − a: ", h("b", null, e.pairs ? number(d.value) : "–"), ` [${number(d.lo)}, ${number(d.hi)}]`),
        scale(d, -1, 1),
        h("h3", null, t("evidence")),
        h("table", { class: "bars" }, evidence("b_better", e.e_value.b_better, e.e_value.decides_at), evidence("b_worse", e.e_value.b_worse, e.e_value.decides_at)),
        h("dl", { class: "facts" }, [
            ["pairs", `${number(e.pairs)} (${number(e.min_pairs)} – ${number(e.max_pairs)})`], ["ab_share", percent(e.share)], ["ab_alpha", number(e.alpha)],
            ["once_per_user", t(e.once_per_user ? "yes" : "no")], ["begun", moment(1000 * e.created)], ["ended", e.ended ? moment(1000 * e.ended) : "–"],
        ].map(([id, text]) => h("div", null, h("dt", null, t(id)), h("dd", null, text)))),
        e.serves && h("p", { class: "quiet" }, t("serves"), " ", h("code", { class: "path" }, e.serves)),
    ];
}

class Experiment {
    constructor(root, changed) {
        this.changed = changed;
        this.head = h("div", { class: "job" });
        this.chart = new Chart({
            title: t("chart_ab"), x: t("pairs"), height: 170, bands: [[2, 3]], format: (v) => number(v),
            series: [{ label: t("difference") }, { label: t("upper") }, { label: t("lower") }],
        });
        this.figures = h("div");
        fill(root, this.head, this.figures, this.chart.element);
    }
    take(e) {
        this.chart.element.hidden = !e;
        if (!e) return fill(this.head, h("p", { class: "quiet" }, t("no_experiment")));
        const list = remember(e), now = JSON.stringify(e);
        if (now === this.before) return undefined;
        this.before = now;
        const act = (id, method, path) => h("button", { type: "button", onclick: async () => {
            try {
                await call(`/v1/ab/${encodeURIComponent(e.name)}${path}`, { method });
                this.changed(method === "DELETE");
            } catch (problem) {
                complain(problem);
            }
        } }, t(id));
        fill(this.head, h("h2", null, e.name, " ", h("small", null, e.model)), state_node(e), " ", h("b", { class: "decision " + e.decision }, t("ab_" + e.decision)),
            e.problem && h("p", { class: "error" }, e.problem),
            h("div", { class: "row" }, e.state === "running" && act("stop", "POST", "/stop"), act("delete", "DELETE", "")));
        fill(this.figures, figures_node(e).flat(9));
        this.chart.draw([list.map((p) => p.pairs), ...["value", "hi", "lo"].map((k) => list.map((p) => p[k]))]);
        return undefined;
    }
    close() {
        this.chart.close();
    }
}

export function open(root, name) {
    const list = h("ul", { class: "queue" }), detail = h("div", { class: "detail" });
    const move = mover();
    let over = false;
    const refresh = async () => {
        const { data } = await json("/v1/ab");
        if (over) return;
        data.forEach(remember);
        const held = list.contains(document.activeElement) && document.activeElement.getAttribute("href");
        fill(list, data.map((e) => item(e, name)), !data.length && h("li", { class: "quiet" }, t("no_experiments")));
        if (held) list.querySelector(`[href="${held}"]`)?.focus();
        shown?.take(data.find((e) => e.name === name));
    };
    const changed = (deleted) => {
        if (deleted) move("#/ab");
        else refresh().catch(complain);
    };
    fill(root, h("h1", null, t("view_ab")), h("p", { class: "quiet" }, t("ab_about")), starter((e) => move("#/ab/" + encodeURIComponent(e.name))),
        h("div", { class: "split" }, list, detail));
    const shown = name ? new Experiment(detail, changed) : null;
    const stop = every(2000, refresh);
    return () => {
        over = true;
        stop();
        shown?.close();
    };
}
