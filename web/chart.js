// Curves, with uPlot: in the page's colours, as wide as their place.
import { h } from "./dom.js";
import { lang } from "./words.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const live = new Set();

/** Series have colours and, for who does not tell those apart, dashes. */
const dashes = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4]];

/**
 * A figure with a curve: draw(data) takes uPlot's columns, [x, y, y, …]. series: [{label, format}].
 * x is seconds of the clock where `time`. bands: [[upper, lower], …], columns to fill between.
 */
export class Chart {
    constructor({ title, series, time = false, height = 130, format = (v) => v?.toLocaleString(lang()), x = "", bands = [] }) {
        this.o = { title, series, time, height, format, x, bands };
        this.place = h("div", { class: "plot" });
        this.element = h("figure", { class: "chart" }, title && h("figcaption", null, title), this.place);
        this.watch = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: this.o.height }));
        this.watch.observe(this.place);
        live.add(this);
    }
    width() {
        return Math.max(120, this.place.clientWidth);
    }
    build() {
        const { series, time, height, format, x, bands } = this.o;
        const axis = {
            stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
            font: "11px system-ui, sans-serif",
        };
        const hour = (s) => new Date(s * 1000).toLocaleTimeString(lang(), { hour12: false });
        const few = () => this.data[0].length < 3; // a line of one point is nothing
        // Where nobody points, the newest is told.
        const told = (f) => (u, v, i, at) => {
            const shown = at === null || at === undefined ? u.data?.[i]?.at(-1) : v;
            return shown === null || shown === undefined ? "–" : f(shown);
        };
        const value = told(format);
        return new globalThis.uPlot({
            width: this.width(), height, cursor: { drag: { x: true, y: false }, points: { size: 6 } },
            legend: { live: true },
            bands: bands.map((of) => ({ series: of, fill: colour("--accent") + "22" })),
            scales: { x: { time: false }, y: { range: (u, lo, hi) => range(lo, hi) } },
            axes: [
                { ...axis, size: 24, space: 70, values: time ? (u, v) => v.map(hour) : undefined },
                { ...axis, size: 56, space: 28, values: (u, v) => v.map((n) => format(n)) },
            ],
            series: [
                { label: x, value: told(time ? hour : (v) => v) },
                ...series.map((s, i) => ({
                    label: s.label, stroke: colour(`--series-${i % 5}`), width: 1.5,
                    dash: dashes[i % dashes.length], points: { show: few }, value,
                })),
            ],
        }, this.data, this.place);
    }
    draw(data) {
        this.data = data;
        if (!this.place.isConnected || !globalThis.uPlot) return;
        if (!this.plot) this.plot = this.build();
        else this.plot.setData(data);
    }
    redraw() {
        this.plot?.destroy();
        this.plot = null;
        if (this.data) this.draw(this.data);
    }
    close() {
        live.delete(this);
        this.watch.disconnect();
        this.plot?.destroy();
        this.plot = null;
    }
}

/** From 0 where that is near; never of no height. */
function range(lo, hi) {
    if (lo === null || hi === null || lo === undefined) return [0, 1];
    if (lo >= 0 && lo < hi / 2) lo = 0;
    if (lo === hi) return lo === 0 ? [0, 1] : [lo - Math.abs(lo) / 10, hi + Math.abs(hi) / 10];
    const room = (hi - lo) / 20;
    return [lo === 0 ? 0 : lo - room, hi + room];
}

const recolour = () => live.forEach((c) => c.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("shoal:theme", recolour);
