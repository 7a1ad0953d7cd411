// Helpers of all views: DOM elements, localStorage, number formats, notices, polling, tooltips.
import { lang, t } from "./words.js";

/** Creates an element: h("p", {class: "x", onclick: f}, "text", child, [children], null). Text is never parsed as markup. */
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

/** Creates an SVG element; the arguments are those of h(). */
export function svg(tag, props, ...children) {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(props ?? {}))
        if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
        else if (v !== undefined && v !== null) e.setAttribute(k, v);
    e.append(...children.flat(9).filter(Boolean));
    return e;
}

/** Replaces the children of an element. */
export const fill = (e, ...children) => e.replaceChildren(...children.flat(9).filter((c) => c || c === 0));

/** A field with its label above and an optional hint below. */
export const labelled = (text, field, hint) =>
    h("label", { class: "field" }, h("span", null, text), field, hint && h("small", null, hint));

export const option = (value, text, selected) => h("option", { value, selected: value === selected }, text);

/** A stored value, or the default. A browser without localStorage only has defaults. */
export function load(name, default_value) {
    try {
        return JSON.parse(localStorage.getItem("shoal." + name)) ?? default_value;
    } catch {
        return default_value;
    }
}

/** Stores a value; null removes it. Returns false if the browser refuses, for instance because the quota is exceeded. */
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
    if (Math.abs(v) < 1e-4) return v.toExponential(1); // instead of a row of zeros
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
    const two_digits = (n) => String(Math.floor(n)).padStart(2, "0");
    const m = v / 60;
    return m < 60 ? `${Math.floor(m)}:${two_digits(v % 60)}` : `${Math.floor(m / 60)}:${two_digits(m % 60)}:${two_digits(v % 60)}`;
}
export const date_time = (text) => {
    const d = new Date(text);
    return Number.isNaN(d.getTime()) ? "–" : d.toLocaleString("sv"); // ISO order: 2026-01-31 13:05:09
};

/**
 * Shows an error until the user dismisses it or the caller removes the returned element. An error that is already shown is not
 * repeated. An AbortError is intended, so it is not shown.
 */
export function show_error(error) {
    if (error?.name === "AbortError") return null;
    const text = error?.message ?? String(error);
    const box = document.getElementById("notices");
    const shown = [...box.children].find((n) => n.dataset.text === text);
    if (shown) return shown;
    const close = () => notice.remove();
    const notice = h("div", { class: "notice", "data-text": text }, h("span", null, text),
        (error?.status === 401 || error?.status === 403) && h("a", { href: "#/settings", onclick: close }, t("enter_key")),
        h("button", { type: "button", onclick: close, "aria-label": t("close") }, "×"));
    box.append(notice);
    while (box.children.length > 4) box.firstChild.remove();
    return notice;
}

/** Opens a dialog with a question, or with a field and its label. Resolves to whether the user confirms. */
export function confirm_dialog(content, yes) {
    return new Promise((resolve) => {
        const dialog = h("dialog", { "aria-label": yes, onclose: () => {
            resolve(dialog.returnValue === "yes");
            dialog.remove();
        } }, h("form", { method: "dialog" }, typeof content === "string" ? h("p", null, content) : content, h("div", { class: "row" }, h("span", { class: "space" }),
            h("button", { value: "no", autofocus: true }, t("cancel")), h("button", { value: "yes", class: "main" }, yes))));
        document.body.append(dialog);
        dialog.showModal();
    });
}

/** Calls f now and then every ms milliseconds while the page is visible. Shows errors of f. Returns a function that stops it. */
export function poll(ms, f) {
    let stopped = false, timer, notice = null;
    const tick = async () => {
        if (!document.hidden) {
            try {
                await f();
                notice?.remove(); // the error is over
                notice = null;
            } catch (e) {
                if (!stopped) notice = show_error(e);
            }
        }
        if (!stopped) timer = setTimeout(tick, ms);
    };
    tick();
    return () => {
        stopped = true;
        notice?.remove();
        clearTimeout(timer);
    };
}

/**
 * Navigation for a view that has awaited something: navigate(hash) changes the address unless the user has left the view
 * meanwhile, and returns whether it did. `silent` replaces only the address, for content that is already shown.
 */
export function view_navigation() {
    let current = location.hash;
    return (hash, { silent = false } = {}) => {
        if (location.hash !== current) return false;
        if (!silent) location.hash = hash;
        else {
            history.replaceState(null, "", hash);
            current = location.hash;
        }
        return true;
    };
}

/** A table of probabilities or shares with bars. Rows are {text, p, selected}. */
export const bar_table = (rows) => h("table", { class: "bars" }, rows.map(({ text, p, selected }) => {
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * p + "%";
    return h("tr", { class: selected && "selected" }, h("td", null, h("code", null, text)),
        h("td", { class: "track" }, bar), h("td", { class: "num" }, percent(p)));
}));

/**
 * An interval {value, lo, hi} on an axis from `from` to `to`; a symmetric axis has a mark at 0. It is hidden from screen readers,
 * because the caller shows the numbers next to it.
 */
export function interval_bar(v, from, to) {
    const position = (x) => (100 * (Math.max(from, Math.min(to, x)) - from)) / (to - from);
    const span = h("i", { class: "range" }), dot = h("i", { class: "point" });
    span.style.left = position(v.lo) + "%";
    span.style.width = position(v.hi) - position(v.lo) + "%";
    dot.style.left = position(v.value) + "%";
    return h("div", { class: from === -to ? "interval zero" : "interval", "aria-hidden": "true" }, span, dot);
}

/** The one tooltip of the page, shown below or above an element. */
export const tooltip = {
    element: () => document.getElementById("tip"),
    show(anchor, ...content) {
        const e = this.element();
        fill(e, ...content);
        e.hidden = false;
        const r = anchor.getBoundingClientRect(), width = e.offsetWidth, height = e.offsetHeight;
        e.style.left = Math.max(4, Math.min(r.left, innerWidth - width - 4)) + "px";
        e.style.top = (r.bottom + height + 8 < innerHeight ? r.bottom + 4 : Math.max(4, r.top - height - 4)) + "px";
    },
    hide() {
        this.element().hidden = true;
    },
};
