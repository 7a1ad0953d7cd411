// Charts with uPlot, in the colours of the page and the width of their container.
import { h } from "./dom.js";
import { lang } from "./words.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const open_charts = new Set();

/** Series differ in colour and, for readers with colour blindness, in dashes. */
const dashes = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4]];

/**
 * A chart. draw(data) takes uPlot's columns, [x, y, y, …]. series: [{label, format}]. With `time`, x
 * has Unix seconds. bands: [[upper, lower], …], pairs of columns between which the chart is filled.
 */
export class Chart {
    constructor({ title, series, time = false, height = 130, format = (v) => v?.toLocaleString(lang()), x = "", bands = [] }) {
        this.o = { title, series, time, height, format, x, bands };
        this.container = h("div", { class: "plot" });
        this.element = h("figure", { class: "chart" }, title && h("figcaption", null, title), this.container);
        this.resize_observer = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: this.o.height }));
        this.resize_observer.observe(this.container);
        open_charts.add(this);
    }
    width() {
        return Math.max(120, this.container.clientWidth);
    }
    build() {
        const { series, time, height, format, x, bands } = this.o;
        const axis = {
            stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
            font: "11px system-ui, sans-serif",
        };
        const clock_time = (s) => new Date(s * 1000).toLocaleTimeString(lang(), { hour12: false });
        const few_points = () => this.data[0].length < 3; // a line of one point is invisible
        // Without a cursor the legend has the newest value.
        const legend_value = (f) => (u, v, i, data_index) => {
            const shown = data_index === null || data_index === undefined ? u.data?.[i]?.at(-1) : v;
            return shown === null || shown === undefined ? "–" : f(shown);
        };
        const value = legend_value(format);
        return new globalThis.uPlot({
            width: this.width(), height, cursor: { drag: { x: true, y: false }, points: { size: 6 } },
            legend: { live: true },
            bands: bands.map((of) => ({ series: of, fill: colour("--accent") + "22" })),
            scales: { x: { time: false }, y: { range: (u, lo, hi) => y_range(lo, hi) } },
            axes: [
                { ...axis, size: 24, space: 70, values: time ? (u, v) => v.map(clock_time) : undefined },
                { ...axis, size: 56, space: 28, values: (u, v) => v.map((n) => format(n)) },
            ],
            series: [
                { label: x, value: legend_value(time ? clock_time : (v) => v) },
                ...series.map((s, i) => ({
                    label: s.label, stroke: colour(`--series-${i % 5}`), width: 1.5,
                    dash: dashes[i % dashes.length], points: { show: few_points }, value,
                })),
            ],
        }, this.data, this.container);
    }
    draw(data) {
        this.data = data;
        if (!this.container.isConnected || !globalThis.uPlot) return;
        if (!this.plot) this.plot = this.build();
        else this.plot.setData(data);
    }
    redraw() {
        this.plot?.destroy();
        this.plot = null;
        if (this.data) this.draw(this.data);
    }
    close() {
        open_charts.delete(this);
        this.resize_observer.disconnect();
        this.plot?.destroy();
        this.plot = null;
    }
}

/** The range of the y axis: it starts at 0 if lo is below half of hi, and is never empty. */
function y_range(lo, hi) {
    if (lo === null || hi === null || lo === undefined) return [0, 1];
    if (lo >= 0 && lo < hi / 2) lo = 0;
    if (lo === hi) return lo === 0 ? [0, 1] : [lo - Math.abs(lo) / 10, hi + Math.abs(hi) / 10];
    const margin = (hi - lo) / 20;
    return [lo === 0 ? 0 : lo - margin, hi + margin];
}

const recolour = () => open_charts.forEach((c) => c.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("shoal:theme", recolour);
