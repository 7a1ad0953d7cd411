// What every view needs of the browser: elements, what is kept, numbers in words, notices.
import { lang, t } from "./words.js";

/** An element: h("p", {class: "x", onclick: f}, "text", child, [children], null). Text is never read as markup. */
export function h(tag, props, ...children) {
    const e = document.createElement(tag);
    for (const [k, v] of Object.entries(props ?? {})) {
        if (v === undefined || v === null || v === false) continue;
        if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
        else if (k === "value" || k === "checked" || k === "selected") e[k] = v;
        else e.setAttribute(k, v === true ? "" : v);
    }
    e.append(...children.flat(9).filter((c) => c !== null && c !== undefined && c !== false));
    return e;
}

/** The same of a picture. */
export function svg(tag, props, ...children) {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(props ?? {}))
        if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
        else if (v !== undefined && v !== null) e.setAttribute(k, v);
    e.append(...children.flat(9).filter(Boolean));
    return e;
}

export const fill = (e, ...children) => e.replaceChildren(...children.flat(9).filter((c) => c || c === 0));

/** A label over its field. */
export const labelled = (text, field, hint) =>
    h("label", { class: "field" }, h("span", null, text), field, hint && h("small", null, hint));

export const option = (value, text, chosen) => h("option", { value, selected: value === chosen }, text);

// What a browser does not want to keep is only not kept.
export function load(name, otherwise) {
    try {
        return JSON.parse(localStorage.getItem("shoal." + name)) ?? otherwise;
    } catch {
        return otherwise;
    }
}

/** Whether there was room. */
export function save(name, value) {
    try {
        if (value === null) localStorage.removeItem("shoal." + name);
        else localStorage.setItem("shoal." + name, JSON.stringify(value));
        return true;
    } catch {
        return false;
    }
}

export function number(v, digits = 3) {
    if (v === null || v === undefined || !Number.isFinite(v)) return "–";
    if (Number.isInteger(v)) return v.toLocaleString(lang());
    if (Math.abs(v) < 1e-4) return v.toExponential(1); // not a row of zeros
    return v.toLocaleString(lang(), { maximumSignificantDigits: digits });
}
export function percent(v) {
    if (!Number.isFinite(v)) return "–";
    if (v > 0 && v < 0.001) return "< 0.1 %";
    return (100 * v).toFixed(v > 0 && v < 0.1 ? 1 : 0) + " %";
}
export const bytes = (v) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    for (; v >= 1000 && i < units.length - 1; i++) v /= 1000;
    return Number.isFinite(v) ? `${number(v)} ${units[i]}` : "–";
};
/** Seconds as 1.2 ms, 3.4 s, 5:06, 1:02:03. */
export function seconds(v) {
    if (v === null || v === undefined || !Number.isFinite(v)) return "–";
    if (v < 1) return number(v * 1000) + " ms";
    if (v < 60) return number(v) + " s";
    const two = (n) => String(Math.floor(n)).padStart(2, "0");
    const m = v / 60;
    return m < 60 ? `${Math.floor(m)}:${two(v % 60)}` : `${Math.floor(m / 60)}:${two(m % 60)}:${two(v % 60)}`;
}
export const moment = (text) => {
    const d = new Date(text);
    return Number.isNaN(d.getTime()) ? "–" : d.toLocaleString("sv"); // 2026-01-31 13:05:09, as everybody reads it
};

/** Says what went wrong until it is dismissed, or the returned line removed; the same thing once. An abort is what somebody wanted. */
export function complain(error) {
    if (error?.name === "AbortError") return null;
    const text = error?.message ?? String(error);
    const box = document.getElementById("notices");
    const same = [...box.children].find((n) => n.dataset.text === text);
    if (same) return same;
    const close = () => line.remove();
    const line = h("div", { class: "notice", "data-text": text }, h("span", null, text),
        (error?.status === 401 || error?.status === 403) && h("a", { href: "#/settings", onclick: close }, t("to_key")),
        h("button", { type: "button", onclick: close, "aria-label": t("close") }, "×"));
    box.append(line);
    while (box.children.length > 4) box.firstChild.remove();
    return line;
}

/** Calls f now and then every ms while the page is looked at; returns what ends it. f's errors are told. */
export function every(ms, f) {
    let over = false, timer, told = null;
    const turn = async () => {
        if (!document.hidden) {
            try {
                await f();
                told?.remove(); // it is well again
                told = null;
            } catch (e) {
                if (!over) told = complain(e);
            }
        }
        if (!over) timer = setTimeout(turn, ms);
    };
    turn();
    return () => {
        over = true;
        told?.remove();
        clearTimeout(timer);
    };
}

/**
 * For a view that has waited for something: move(hash) goes to an address, unless somebody has left meanwhile, and says
 * whether. `silent`: the address only; what is shown is that already.
 */
export function mover() {
    let here = location.hash;
    return (hash, { silent = false } = {}) => {
        if (location.hash !== here) return false;
        if (!silent) location.hash = hash;
        else {
            history.replaceState(null, "", hash);
            here = location.hash;
        }
        return true;
    };
}

/** Shares as bars, {text, p, own} each; `own` is the one that it is about. */
export const bars = (rows) => h("table", { class: "bars" }, rows.map(({ text, p, own }) => {
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * p + "%";
    return h("tr", { class: own && "own" }, h("td", null, h("code", null, text)),
        h("td", { class: "track" }, bar), h("td", { class: "n" }, percent(p)));
}));

/** {value, lo, hi} on a line between two ends; its middle is marked where that is 0. The numbers are said beside it. */
export function scale(v, from, to) {
    const at = (x) => (100 * (Math.max(from, Math.min(to, x)) - from)) / (to - from);
    const span = h("i", { class: "span" }), dot = h("i", { class: "dot" });
    span.style.left = at(v.lo) + "%";
    span.style.width = at(v.hi) - at(v.lo) + "%";
    dot.style.left = at(v.value) + "%";
    return h("div", { class: from === -to ? "scale zero" : "scale", "aria-hidden": "true" }, span, dot);
}

/** Tooltips: one for all, beside an element. */
export const tip = {
    element: () => document.getElementById("tip"),
    show(at, ...content) {
        const e = this.element();
        fill(e, ...content);
        e.hidden = false;
        const r = at.getBoundingClientRect(), w = e.offsetWidth, tall = e.offsetHeight;
        e.style.left = Math.max(4, Math.min(r.left, innerWidth - w - 4)) + "px";
        e.style.top = (r.bottom + tall + 8 < innerHeight ? r.bottom + 4 : Math.max(4, r.top - tall - 4)) + "px";
    },
    hide() {
        this.element().hidden = true;
    },
};
