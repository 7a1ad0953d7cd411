// Evolution: the generations of a run as curves and as a family tree, and its results.
import { json } from "./api.js";
import { Chart } from "./chart.js";
import { date_time, fill, h, interval_bar, number, percent, poll, svg } from "./dom.js";
import { t } from "./words.js";

/** Operators that records store by an earlier name (docs/COMPATIBILITY.md). */
const operators = { seed: "factor_blend" };

// Sizes of the family tree in pixels: pitch of columns and rows, size of a node, margin.
const COLUMN = 132, ROW = 40, NODE_WIDTH = 104, NODE_HEIGHT = 30, MARGIN = 8;

/** {value, lo, hi} as 0.68 [0.61, 0.75]. */
const interval_text = (v) => (v ? [number(v.value), h("small", null, ` [${number(v.lo, 2)}, ${number(v.hi, 2)}]`)] : "–");
/** A percentage with one decimal, because differences are small. */
const percent_1 = (v) => (Number.isFinite(v) ? `${(100 * v).toFixed(1)} %` : "–");

/* the family tree */

/** The key of a node: a candidate has one node in each generation that it is in. */
const node_key = (name, generation) => `${generation} ${name}`;

/** {node_key: [x, y]}: one column per generation, in the order of its record, which begins with the fittest. */
function node_positions(generations) {
    const positions = {};
    generations.forEach((g, x) => g.candidates.forEach((c, y) => {
        positions[node_key(c.name, x)] = [MARGIN + x * COLUMN, 20 + MARGIN + y * ROW];
    }));
    return positions;
}

/** The records by generation. A record with the generation of an earlier one replaces that one and all after it: the run was continued from there. */
function generations_of(records) {
    const all = [];
    for (const r of records) {
        all.length = Math.min(all.length, r.generation);
        all.push(r);
    }
    return all;
}

/** The names of a candidate and of its ancestors. */
function ancestry(edges, name, names = new Set()) {
    names.add(name);
    for (const e of edges) if (e.child === name && !names.has(e.parent)) ancestry(edges, e.parent, names);
    return names;
}

class FamilyTree {
    constructor() {
        this.drawing = h("div", { class: "scroll-x tree" });
        this.details = h("div", { class: "panel", "aria-live": "polite" });
        this.element = h("section", { hidden: true }, h("h2", null, t("family_tree")), this.drawing, this.details);
    }
    update(run) {
        this.run = { ...run, generations: generations_of(run.generations) };
        this.element.hidden = !run.lineage;
        if (!run.lineage) return;
        const { nodes, of } = run.lineage;
        if (!nodes.some((v) => v.name === this.chosen)) this.chosen = of;
        this.paint();
    }
    /** Selects a candidate and focuses its node in the generation; the default is its first generation. */
    choose(name, generation) {
        const node_generation = generation ?? this.run.lineage.nodes.find((v) => v.name === name).generation;
        this.chosen = name;
        this.paint();
        this.drawing.querySelector(`[data-node="${CSS.escape(node_key(name, node_generation))}"]`)?.focus();
    }
    paint() {
        const { nodes, edges } = this.run.lineage, { generations } = this.run, positions = node_positions(generations), ancestors = ancestry(edges, this.chosen);
        const height = Math.max(...Object.values(positions).map(([, y]) => y)) + NODE_HEIGHT + MARGIN, scroll_left = this.drawing.scrollLeft;
        const by_name = Object.fromEntries(nodes.map((v) => [v.name, v]));
        const parent_edges = edges.map((e) => {
            const to = by_name[e.child].generation, from = Math.min(to - 1, by_name[e.parent].last);
            return { ...e, ancestor: ancestors.has(e.child), from: positions[node_key(e.parent, from)], to: positions[node_key(e.child, to)] };
        });
        const survivor_edges = nodes.flatMap((v) => Array.from({ length: v.last - v.generation }, (_, i) => ({
            ancestor: ancestors.has(v.name), survivor: true, from: positions[node_key(v.name, v.generation + i)], to: positions[node_key(v.name, v.generation + i + 1)] })));
        fill(this.drawing, svg("svg", {
            width: generations.length * COLUMN - (COLUMN - NODE_WIDTH) + 2 * MARGIN, height, role: "group", "aria-label": t("family_tree"),
        }, generations.map((_, g) => svg("text", { x: MARGIN + g * COLUMN, y: 14, class: "generation" }, t("generation_n", g))),
        // Edges of ancestors are drawn last, above the others.
        [...survivor_edges, ...parent_edges].filter((e) => e.from && e.to).sort((a, b) => a.ancestor - b.ancestor).map((e) => this.edge(e)),
        generations.map((g, x) => g.candidates.filter((c) => by_name[c.name]).map((c) => this.node(c, x, positions[node_key(c.name, x)], ancestors)))));
        this.drawing.scrollLeft = scroll_left;
        fill(this.details, this.details_of(by_name[this.chosen]));
    }
    edge(e) {
        const [x0, y0] = e.from, [x1, y1] = e.to, from = x0 + NODE_WIDTH, half = (x1 - from) / 2;
        return svg("path", {
            class: ["edge", e.ancestor && "ancestor", e.survivor && "survivor"].filter(Boolean).join(" "), "stroke-width": e.survivor ? 1 : 0.75 + 3 * e.share,
            d: `M${from},${y0 + NODE_HEIGHT / 2} C${from + half},${y0 + NODE_HEIGHT / 2} ${x1 - half},${y1 + NODE_HEIGHT / 2} ${x1},${y1 + NODE_HEIGHT / 2}`,
        }, !e.survivor && svg("title", null, `${e.parent} → ${e.child}: ${percent(e.share)}`));
    }
    node(c, generation, [x, y], ancestors) {
        const best = c.name === this.run.lineage.of && generation === this.run.generations.length - 1;
        const short = c.name.length > 13 ? c.name.slice(0, 12) + "…" : c.name;
        return svg("g", {
            class: ["node", ancestors.has(c.name) && "ancestor", best && "best"].filter(Boolean).join(" "), tabindex: 0, role: "button",
            "aria-pressed": String(c.name === this.chosen),
            "aria-label": `${c.name}, ${t("generation_n", generation)}, ${t("fitness")} ${number(c.fitness?.value)}`,
            transform: `translate(${x} ${y})`, onclick: () => this.choose(c.name, generation), onkeydown: (e) => {
                if (e.key !== "Enter" && e.key !== " ") return;
                e.preventDefault();
                this.choose(c.name, generation);
            },
            "data-node": node_key(c.name, generation),
        }, svg("rect", { width: NODE_WIDTH, height: NODE_HEIGHT, rx: 4 }), svg("text", { x: 8, y: 13 }, short),
        svg("text", { x: 8, y: 25, class: "small" }, number(c.fitness?.value)), svg("title", null, c.name));
    }
    /** A candidate: its parents and operator, and its fitness in each of its generations. */
    details_of(v) {
        const { lineage, generations } = this.run;
        const from = lineage.edges.filter((e) => e.child === v.name);
        const link = (name) => h("button", { type: "button", class: "link", onclick: () => this.choose(name) }, name);
        const rows = [
            ["lifespan", `${v.generation}${v.last > v.generation ? ` – ${v.last}` : ""}`], ["fitness", interval_text(v.fitness)],
            ["operator", operators[v.operator] ?? v.operator ?? (from.length ? "–" : t("founder"))],
            ["parents", from.length ? from.map((e, i) => [i > 0 && ", ", link(e.parent), ` ${percent(e.share)}`]) : "–"],
            v.step !== undefined && ["step", number(v.step)],
            v.hash && ["hash", h("code", null, v.hash)],
            v.name === lineage.of && ["founder_shares", lineage.founders.map((f) => `${f.founder} ${percent_1(f.share)}`).join(", ")],
        ].filter(Boolean);
        const measures = ["fitness", "performance", "cooperation", "novelty"];
        const rows_by_generation = generations.flatMap((g) => g.candidates.filter((c) => c.name === v.name).map((c) => [g.generation, c]));
        return [h("h3", null, v.name, v.name === lineage.of && h("span", { class: "tag" }, t("fittest"))),
            h("dl", { class: "key-values" }, rows.map(([id, text]) => [h("dt", null, t(id)), h("dd", null, text)])),
            h("div", { class: "scroll-x" }, h("table", { class: "list" }, h("thead", null, h("tr", null, h("th", null, t("generation")),
                measures.map((id) => h("th", { class: "num" }, t(id))))),
            h("tbody", null, rows_by_generation.map(([g, c]) => h("tr", null, h("th", { scope: "row" }, g), measures.map((id) => h("td", { class: "num" }, interval_text(c[id]))))))))];
    }
}

/* curves */

/** The charts of a run. data_of(run) returns {labels, data}, or a falsy value if the run has no such data. */
const curves = [
    {
        id: "fitness", x: "generation", bands: [[3, 4]], data_of: ({ generations }) => generations.length && {
            labels: ["mean", "best", "best_hi", "best_lo"],
            data: [generations.map((g) => g.generation), ...columns_of(generations, fitness_of, 4)],
        },
    },
    {
        id: "diversity", x: "generation", data_of: ({ generations }) => generations.length && {
            labels: ["behaviour", "weights"],
            data: [generations.map((g) => g.generation), ...columns_of(generations, (g) => [g.diversity?.behaviour_mean, g.diversity?.weights_mean], 2)],
        },
    },
    {
        id: "loss", x: "update", data_of: ({ training }) => {
            const adapters = [...new Set(training.flatMap((r) => Object.keys(r.losses ?? {})))].slice(0, 4);
            return training.length && {
                labels: ["loss", ...adapters], // names of adapters are not translated
                data: [training.map((r) => r.step), ...columns_of(training, (r) => [r.loss, ...adapters.map((p) => r.losses?.[p])], 1 + adapters.length)],
            };
        },
    },
    ...["fitness", "delivered"].map((id) => ({
        id: "world_" + id, x: "generation", bands: [[2, 3]], data_of: ({ curve }) => {
            const rows = curve.filter((r) => r.generation !== undefined && r.held_out?.[id]), policies = curve.filter((r) => r.policy && r.held_out?.[id]).slice(0, 2);
            return rows.length && {
                labels: ["held_out", "upper", "lower", ...policies.map((r) => r.policy)],
                data: [rows.map((r) => r.generation), ...columns_of(rows, ({ held_out: { [id]: v } }) => [v.value, v.hi, v.lo, ...policies.map((b) => b.held_out[id].value)], 3 + policies.length)],
            };
        },
    })),
];

const columns_of = (rows, f, n) => {
    const all = rows.map(f);
    return Array.from({ length: n }, (_, i) => all.map((r) => r[i] ?? null));
};

function fitness_of({ candidates }) {
    const measured = candidates.filter((c) => c.fitness), best = measured.reduce((a, c) => (a && a.fitness.value >= c.fitness.value ? a : c), null);
    if (!best) return [];
    return [measured.reduce((sum, c) => sum + c.fitness.value, 0) / measured.length, best.fitness.value, best.fitness.hi, best.fitness.lo];
}

class Curves {
    constructor() {
        this.element = h("div", { class: "charts" });
        this.drawn = {};
    }
    update(run) {
        const merged = { ...run, generations: generations_of(run.generations) };
        for (const c of curves) {
            const content = c.data_of(merged), key = content && content.labels.join();
            if (!content) continue;
            if (this.drawn[c.id]?.key !== key) {
                this.drawn[c.id]?.chart.close();
                this.drawn[c.id]?.chart.element.remove();
                const label_text = (l) => (c.id === "loss" && l !== "loss") || ["rule", "random"].includes(l) ? l : t(l);
                const chart = new Chart({ title: t("chart_" + c.id), x: t(c.x), height: 170, bands: c.bands, format: (v) => number(v), series: content.labels.map((l) => ({ label: label_text(l) })) });
                this.drawn[c.id] = { key, chart };
                this.element.append(chart.element);
            }
            this.drawn[c.id].chart.draw(content.data);
        }
    }
    close() {
        Object.values(this.drawn).forEach((d) => d.chart.close());
    }
}

/* results */

function result_nodes(result) {
    const table = result?.table ?? [], comparisons = result?.comparisons ?? [];
    const head = (ids) => h("thead", null, h("tr", null, ids.map(([id, is_number]) => h("th", { class: is_number && "num" }, id && t(id)))));
    return [
        table.length > 0 && [h("h2", null, t("results")), h("div", { class: "scroll-x" }, h("table", { class: "list" },
            head([["name"], ["accuracy", true], ["interval", true], [""], ["items", true]]),
            h("tbody", null, table.map((r) => h("tr", null, h("th", { scope: "row" }, r.name), h("td", { class: "num" }, percent_1(r.acc)),
                h("td", { class: "num" }, `[${percent_1(r.lo)}, ${percent_1(r.hi)}]`), h("td", { class: "interval-cell" }, interval_bar({ value: r.acc, lo: r.lo, hi: r.hi }, 0, 1)),
                h("td", { class: "num" }, number(r.n)))))))],
        comparisons.length > 0 && [h("h2", null, t("comparisons")), h("div", { class: "scroll-x" }, h("table", { class: "list" },
            head([["a_minus_b"], ["difference", true], ["interval", true], [""], ["p_holm", true]]),
            h("tbody", null, comparisons.map((c) => h("tr", null, h("th", { scope: "row" }, `${c.a} − ${c.b}`), h("td", { class: "num" }, percent_1(c.diff)),
                h("td", { class: "num" }, `[${percent_1(c.lo)}, ${percent_1(c.hi)}]`),
                h("td", { class: "interval-cell" }, interval_bar({ value: c.diff, lo: c.lo, hi: c.hi }, -0.5, 0.5)),
                h("td", { class: "num" }, number(c.p_holm, 2), c.significant && " *"))))), h("small", null, t("comparisons_note")))],
    ];
}

/* the view */

function open_run(root, id) {
    const stop = new AbortController(), curves_view = new Curves(), tree = new FamilyTree(), result = h("div"), status = h("p", { class: "muted" });
    let drawn = "", failed = false;
    fill(root, h("h2", null, id), status, curves_view.element, tree.element, result);
    return {
        close() {
            stop.abort();
            curves_view.close();
        },
        /** Loads the run; draws it only if it has changed, so that the focus stays. */
        async refresh(run) {
            if (failed || (drawn && run && run.status !== "running")) return;
            let v;
            try {
                v = await json("/v1/runs/" + encodeURIComponent(id), { signal: stop.signal });
            } catch (e) {
                if (e.status !== 404) throw e;
                failed = true;
                fill(root, h("h2", null, id), h("p", { class: "error", role: "alert" }, e.message), h("p", { class: "muted" }, t("other_folder")));
                return;
            }
            const now = JSON.stringify(v);
            if (now === drawn) return;
            drawn = now;
            status.textContent = v.lineage || v.training.length || v.curve.length ? "" : t("no_data_yet");
            curves_view.update(v);
            tree.update(v);
            fill(result, result_nodes(v.result).flat(9));
        },
    };
}

const item = (run, chosen) => h("li", null, h("a", { href: "#/evolution/" + encodeURIComponent(run.id), "aria-current": run.id === chosen && "true" },
    h("span", null, h("b", null, run.kind), " ", h("small", null, run.id)), h("span", { class: "state " + run.status }, t("state_" + run.status)),
    h("small", null, date_time(run.created))));

export function open(root, id) {
    const list = h("ul", { class: "item-list" }), detail = h("div", { class: "detail" });
    let closed = false;
    fill(root, h("h1", null, t("view_evolution")), h("div", { class: "split" }, list, detail));
    const shown = id ? open_run(detail, id) : null;
    if (!id) fill(detail, h("p", { class: "muted" }, t("choose_run")));
    const stop = poll(3000, async () => {
        const { runs } = await json("/v1/runs");
        if (closed) return;
        const focused = list.contains(document.activeElement) && document.activeElement.getAttribute("href");
        fill(list, runs.map((r) => item(r, id)), !runs.length && h("li", { class: "muted" }, t("no_runs")));
        if (focused) list.querySelector(`[href="${focused}"]`)?.focus();
        await shown?.refresh(runs.find((r) => r.id === id));
    });
    return () => {
        closed = true;
        stop();
        shown?.close();
    };
}
