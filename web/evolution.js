// Evolution: a run's generations as curves, as a family tree, and what came of them.
import { json } from "./api.js";
import { Chart } from "./chart.js";
import { every, fill, h, moment, number, percent, scale, svg } from "./dom.js";
import { t } from "./words.js";

const COLUMN = 132, ROW = 40, WIDE = 104, TALL = 30, EDGE = 8; // of the tree, in pixels

/** 0.68 [0.61, 0.75] of {value, lo, hi}. */
const interval = (v) => (v ? [number(v.value), h("small", null, ` [${number(v.lo, 2)}, ${number(v.hi, 2)}]`)] : "–");
/** A percentage with its tenth: differences are small. */
const points = (v) => (Number.isFinite(v) ? `${(100 * v).toFixed(1)} %` : "–");

/* the family tree */

/** Where a candidate is in a generation: it stands in every one that it lives in. */
const place = (name, generation) => `${generation} ${name}`;

/** {place: [x, y]}: a column a generation, in the order of its record, which is the fittest first. */
function places_of(generations) {
    const places = {};
    generations.forEach((g, x) => g.candidates.forEach((c, y) => {
        places[place(c.name, x)] = [EDGE + x * COLUMN, 20 + EDGE + y * ROW];
    }));
    return places;
}

/** Records by generation; one that came again, as where a run was continued, takes the place of all later ones. */
function generations_of(records) {
    const all = [];
    for (const r of records) {
        all.length = Math.min(all.length, r.generation);
        all.push(r);
    }
    return all;
}

/** The names that one descends from, and its own. */
function ancestry(edges, name, of = new Set()) {
    of.add(name);
    for (const e of edges) if (e.child === name && !of.has(e.parent)) ancestry(edges, e.parent, of);
    return of;
}

class Tree {
    constructor() {
        this.place = h("div", { class: "wide tree" });
        this.told = h("div", { class: "panel", "aria-live": "polite" });
        this.element = h("section", { hidden: true }, h("h2", null, t("family_tree")), this.place, this.told);
    }
    take(run) {
        this.run = { ...run, generations: generations_of(run.generations) };
        this.element.hidden = !run.lineage;
        if (!run.lineage) return;
        const { nodes, of } = run.lineage;
        if (!nodes.some((v) => v.name === this.chosen)) this.chosen = of;
        this.paint();
    }
    /** generation: where it was chosen; where it was born, if it was named elsewhere. */
    choose(name, generation) {
        const at = generation ?? this.run.lineage.nodes.find((v) => v.name === name).generation;
        this.chosen = name;
        this.paint();
        this.place.querySelector(`[data-place="${CSS.escape(place(name, at))}"]`)?.focus();
    }
    paint() {
        const { nodes, edges } = this.run.lineage, { generations } = this.run, places = places_of(generations), kin = ancestry(edges, this.chosen);
        const tall = Math.max(...Object.values(places).map(([, y]) => y)) + TALL + EDGE, left = this.place.scrollLeft;
        const born = Object.fromEntries(nodes.map((v) => [v.name, v]));
        const births = edges.map((e) => {
            const to = born[e.child].generation, from = Math.min(to - 1, born[e.parent].last);
            return { ...e, kin: kin.has(e.child), from: places[place(e.parent, from)], to: places[place(e.child, to)] };
        });
        const lives = nodes.flatMap((v) => Array.from({ length: v.last - v.generation }, (_, i) => ({
            kin: kin.has(v.name), same: true, from: places[place(v.name, v.generation + i)], to: places[place(v.name, v.generation + i + 1)] })));
        fill(this.place, svg("svg", {
            width: generations.length * COLUMN - (COLUMN - WIDE) + 2 * EDGE, height: tall, role: "group", "aria-label": t("family_tree"),
        }, generations.map((_, g) => svg("text", { x: EDGE + g * COLUMN, y: 14, class: "generation" }, t("generation_n", g))),
        // Those that are not of the family first: the others lie on them.
        [...lives, ...births].filter((e) => e.from && e.to).sort((a, b) => a.kin - b.kin).map((e) => this.edge(e)),
        generations.map((g, x) => g.candidates.filter((c) => born[c.name]).map((c) => this.node(c, x, places[place(c.name, x)], kin)))));
        this.place.scrollLeft = left;
        fill(this.told, this.tell(born[this.chosen]));
    }
    edge(e) {
        const [x0, y0] = e.from, [x1, y1] = e.to, from = x0 + WIDE, half = (x1 - from) / 2;
        return svg("path", {
            class: ["edge", e.kin && "kin", e.same && "same"].filter(Boolean).join(" "), "stroke-width": e.same ? 1 : 0.75 + 3 * e.share,
            d: `M${from},${y0 + TALL / 2} C${from + half},${y0 + TALL / 2} ${x1 - half},${y1 + TALL / 2} ${x1},${y1 + TALL / 2}`,
        }, !e.same && svg("title", null, `${e.parent} → ${e.child}: ${percent(e.share)}`));
    }
    node(c, generation, [x, y], kin) {
        const best = c.name === this.run.lineage.of && generation === this.run.generations.length - 1;
        const short = c.name.length > 13 ? c.name.slice(0, 12) + "…" : c.name;
        return svg("g", {
            class: ["node", kin.has(c.name) && "kin", best && "best"].filter(Boolean).join(" "), tabindex: 0, role: "button",
            "aria-pressed": String(c.name === this.chosen),
            "aria-label": `${c.name}, ${t("generation_n", generation)}, ${t("fitness")} ${number(c.fitness?.value)}`,
            transform: `translate(${x} ${y})`, onclick: () => this.choose(c.name, generation), onkeydown: (e) => {
                if (e.key !== "Enter" && e.key !== " ") return;
                e.preventDefault();
                this.choose(c.name, generation);
            },
            "data-place": place(c.name, generation),
        }, svg("rect", { width: WIDE, height: TALL, rx: 4 }), svg("text", { x: 8, y: 13 }, short),
        svg("text", { x: 8, y: 25, class: "small" }, number(c.fitness?.value)), svg("title", null, c.name));
    }
    /** All that is known of one: how it came about, and how it did in each of its generations. */
    tell(v) {
        const { lineage, generations } = this.run;
        const from = lineage.edges.filter((e) => e.child === v.name);
        const link = (name) => h("button", { type: "button", class: "link", onclick: () => this.choose(name) }, name);
        const rows = [
            ["born", `${v.generation}${v.last > v.generation ? ` – ${v.last}` : ""}`], ["fitness", interval(v.fitness)],
            ["operator", v.operator ?? (from.length ? "–" : t("founder"))],
            ["parents", from.length ? from.map((e, i) => [i > 0 && ", ", link(e.parent), ` ${percent(e.share)}`]) : "–"],
            v.step !== undefined && ["step", number(v.step)],
            v.hash && ["hash", h("code", null, v.hash)],
            v.name === lineage.of && ["founders", lineage.founders.map((f) => `${f.founder} ${points(f.share)}`).join(", ")],
        ].filter(Boolean);
        const measures = ["fitness", "performance", "cooperation", "novelty"];
        const done = generations.flatMap((g) => g.candidates.filter((c) => c.name === v.name).map((c) => [g.generation, c]));
        return [h("h3", null, v.name, v.name === lineage.of && h("span", { class: "tag" }, t("fittest"))),
            h("dl", { class: "pairs" }, rows.map(([id, text]) => [h("dt", null, t(id)), h("dd", null, text)])),
            h("div", { class: "wide" }, h("table", { class: "list" }, h("thead", null, h("tr", null, h("th", null, t("generation")),
                measures.map((id) => h("th", { class: "n" }, t(id))))),
            h("tbody", null, done.map(([g, c]) => h("tr", null, h("th", { scope: "row" }, g), measures.map((id) => h("td", { class: "n" }, interval(c[id]))))))))];
    }
}

/* curves */

/** Charts that are made when there is something to draw: rows(run) gives [columns, labels] or null. */
const curves = [
    {
        id: "fitness", x: "generation", bands: [[3, 4]], of: ({ generations }) => generations.length && {
            labels: ["mean", "best", "best_hi", "best_lo"],
            data: [generations.map((g) => g.generation), ...columns_of(generations, fitness_of, 4)],
        },
    },
    {
        id: "diversity", x: "generation", of: ({ generations }) => generations.length && {
            labels: ["behaviour", "weights"],
            data: [generations.map((g) => g.generation), ...columns_of(generations, (g) => [g.diversity?.behaviour_mean, g.diversity?.weights_mean], 2)],
        },
    },
    {
        id: "loss", x: "update", of: ({ training }) => {
            const pupils = [...new Set(training.flatMap((r) => Object.keys(r.losses ?? {})))].slice(0, 4);
            return training.length && {
                labels: ["loss", ...pupils], // names of adapters are said as they are
                data: [training.map((r) => r.step), ...columns_of(training, (r) => [r.loss, ...pupils.map((p) => r.losses?.[p])], 1 + pupils.length)],
            };
        },
    },
    ...["fitness", "delivered"].map((id) => ({
        id: "life_" + id, x: "generation", bands: [[2, 3]], of: ({ curve }) => {
            const rows = curve.filter((r) => r.generation !== undefined && r.held_out?.[id]), beside = curve.filter((r) => r.policy && r.held_out?.[id]).slice(0, 2);
            return rows.length && {
                labels: ["held_out", "upper", "lower", ...beside.map((r) => r.policy)],
                data: [rows.map((r) => r.generation), ...columns_of(rows, ({ held_out: { [id]: v } }) => [v.value, v.hi, v.lo, ...beside.map((b) => b.held_out[id].value)], 3 + beside.length)],
            };
        },
    })),
];

const columns_of = (rows, f, n) => {
    const all = rows.map(f);
    return Array.from({ length: n }, (_, i) => all.map((r) => r[i] ?? null));
};

function fitness_of({ candidates }) {
    const known = candidates.filter((c) => c.fitness), best = known.reduce((a, c) => (a && a.fitness.value >= c.fitness.value ? a : c), null);
    if (!best) return [];
    return [known.reduce((sum, c) => sum + c.fitness.value, 0) / known.length, best.fitness.value, best.fitness.hi, best.fitness.lo];
}

class Curves {
    constructor() {
        this.element = h("div", { class: "charts" });
        this.drawn = {};
    }
    take(run) {
        const whole = { ...run, generations: generations_of(run.generations) };
        for (const c of curves) {
            const got = c.of(whole), key = got && got.labels.join();
            if (!got) continue;
            if (this.drawn[c.id]?.key !== key) {
                this.drawn[c.id]?.chart.close();
                this.drawn[c.id]?.chart.element.remove();
                const said = (l) => (c.id === "loss" && l !== "loss") || ["rule", "random"].includes(l) ? l : t(l);
                const chart = new Chart({ title: t("chart_" + c.id), x: t(c.x), height: 170, bands: c.bands, format: (v) => number(v), series: got.labels.map((l) => ({ label: said(l) })) });
                this.drawn[c.id] = { key, chart };
                this.element.append(chart.element);
            }
            this.drawn[c.id].chart.draw(got.data);
        }
    }
    close() {
        Object.values(this.drawn).forEach((d) => d.chart.close());
    }
}

/* what came of it */

function result_nodes(result) {
    const table = result?.table ?? [], comparisons = result?.comparisons ?? [];
    const head = (ids) => h("thead", null, h("tr", null, ids.map(([id, n]) => h("th", { class: n && "n" }, id && t(id)))));
    return [
        table.length > 0 && [h("h2", null, t("results")), h("div", { class: "wide" }, h("table", { class: "list" },
            head([["name"], ["accuracy", true], ["interval", true], [""], ["items", true]]),
            h("tbody", null, table.map((r) => h("tr", null, h("th", { scope: "row" }, r.name), h("td", { class: "n" }, points(r.acc)),
                h("td", { class: "n" }, `[${points(r.lo)}, ${points(r.hi)}]`), h("td", { class: "scales" }, scale({ value: r.acc, lo: r.lo, hi: r.hi }, 0, 1)),
                h("td", { class: "n" }, number(r.n)))))))],
        comparisons.length > 0 && [h("h2", null, t("comparisons")), h("div", { class: "wide" }, h("table", { class: "list" },
            head([["a_minus_b"], ["difference", true], ["interval", true], [""], ["p_holm", true]]),
            h("tbody", null, comparisons.map((c) => h("tr", null, h("th", { scope: "row" }, `${c.a} − ${c.b}`), h("td", { class: "n" }, points(c.diff)),
                h("td", { class: "n" }, `[${points(c.lo)}, ${points(c.hi)}]`),
                h("td", { class: "scales" }, scale({ value: c.diff, lo: c.lo, hi: c.hi }, -0.5, 0.5)),
                h("td", { class: "n" }, number(c.p_holm, 2), c.significant && " *"))))), h("small", null, t("stars")))],
    ];
}

/* the view */

function watch(root, id) {
    const stop = new AbortController(), curves_shown = new Curves(), tree = new Tree(), result = h("div"), said = h("p", { class: "quiet" });
    let before = "", failed = false;
    fill(root, h("h2", null, id), said, curves_shown.element, tree.element, result);
    return {
        close() {
            stop.abort();
            curves_shown.close();
        },
        /** Asks again; what is the same is left alone, under somebody's fingers too. */
        async refresh(run) {
            if (failed || (before && run && run.status !== "running")) return;
            let v;
            try {
                v = await json("/v1/runs/" + encodeURIComponent(id), { signal: stop.signal });
            } catch (e) {
                if (e.status !== 404) throw e;
                failed = true;
                fill(root, h("h2", null, id), h("p", { class: "error", role: "alert" }, e.message), h("p", { class: "quiet" }, t("elsewhere")));
                return;
            }
            const now = JSON.stringify(v);
            if (now === before) return;
            before = now;
            said.textContent = v.lineage || v.training.length || v.curve.length ? "" : t("nothing_yet");
            curves_shown.take(v);
            tree.take(v);
            fill(result, result_nodes(v.result).flat(9));
        },
    };
}

const item = (run, chosen) => h("li", null, h("a", { href: "#/evolution/" + encodeURIComponent(run.id), "aria-current": run.id === chosen && "true" },
    h("span", null, h("b", null, run.kind), " ", h("small", null, run.id)), h("span", { class: "state " + run.status }, t("state_" + run.status)),
    h("small", null, moment(run.created))));

export function open(root, id) {
    const list = h("ul", { class: "queue" }), detail = h("div", { class: "detail" });
    let over = false;
    fill(root, h("h1", null, t("view_evolution")), h("div", { class: "split" }, list, detail));
    const shown = id ? watch(detail, id) : null;
    if (!id) fill(detail, h("p", { class: "quiet" }, t("choose_run")));
    const stop = every(3000, async () => {
        const { runs } = await json("/v1/runs");
        if (over) return;
        const held = list.contains(document.activeElement) && document.activeElement.getAttribute("href");
        fill(list, runs.map((r) => item(r, id)), !runs.length && h("li", { class: "quiet" }, t("no_runs")));
        if (held) list.querySelector(`[href="${held}"]`)?.focus();
        await shown?.refresh(runs.find((r) => r.id === id));
    });
    return () => {
        over = true;
        stop();
        shown?.close();
    };
}
