// The frame of the page: list of views, navigation, keyboard shortcuts.
import { take_token } from "./api.js";
import { fill, h, load, show_error, tooltip } from "./dom.js";
import { set_language, t } from "./words.js";
import * as ab from "./ab.js";
import * as agents from "./agents.js";
import * as ask from "./ask.js";
import * as chat from "./chat.js";
import * as debate from "./debate.js";
import * as evolution from "./evolution.js";
import * as jobs from "./jobs.js";
import * as settings from "./settings.js";
import * as system from "./system.js";
import * as world from "./world.js";

/*
 * A view is a module with open(root, path), which fills root and may return a function that closes
 * the view. `path` is the rest of the address: "job-1" for #/jobs/job-1. To add a view, add its
 * module, a row here, and its name in words.js as view_ID.
 */
const views = [
    { id: "chat", key: "c", module: chat },
    { id: "debate", key: "d", module: debate },
    { id: "ask", key: "b", module: ask },
    { id: "agents", key: "a", module: agents },
    { id: "jobs", key: "j", module: jobs },
    { id: "world", key: "w", module: world },
    { id: "evolution", key: "v", module: evolution },
    { id: "ab", key: "x", module: ab },
    { id: "system", key: "s", module: system },
    { id: "settings", key: "e", module: settings },
];

const main = document.getElementById("main");
const help = document.getElementById("help");
let close = null;

function draw_frame(current) {
    document.getElementById("skip").textContent = t("skip");
    const nav = document.getElementById("nav");
    nav.setAttribute("aria-label", t("views"));
    fill(nav, views.map((v) => h("a", {
        href: "#/" + v.id, "aria-current": v === current && "page", title: `g ${v.key}`,
    }, t("view_" + v.id))));
    nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    const button = document.getElementById("help-open");
    button.setAttribute("aria-label", t("help"));
    button.title = t("help");
}

/** Closes the current view and opens the view that the address names. */
export function show(focus) {
    const [, id, path] = /^#\/([^/?]*)\/?(.*)$/.exec(location.hash) ?? [];
    const view = views.find((v) => v.id === id) ?? views[0];
    let rest = path ?? "";
    try {
        rest = decodeURIComponent(rest);
    } catch {
        // The address has an invalid percent escape: the text is used unchanged.
    }
    close?.();
    close = null;
    tooltip.hide();
    draw_frame(view);
    document.title = `${t("view_" + view.id)} – Shoal`;
    main.className = view.id;
    main.setAttribute("aria-label", t("view_" + view.id));
    main.replaceChildren();
    close = view.module.open(main, rest) ?? null;
    if (focus) main.focus({ preventScroll: true });
}

/* keyboard shortcuts */

const shortcuts = [
    ...views.map((v) => [["g", v.key], () => t("view_" + v.id)]),
    [["/"], () => t("key_focus")],
    [["?"], () => t("key_help")],
    [["Esc"], () => t("key_escape")],
    [["Enter"], () => t("key_send")],
    [["Shift", "Enter"], () => t("key_newline")],
    [["←", "→"], () => t("key_tokens")],
    [["Space"], () => t("key_play")],
];

function show_help() {
    fill(help,
        h("h2", { id: "help-title" }, t("help")),
        h("dl", null, shortcuts.map(([keys, text]) => [
            h("dt", null, keys.map((k) => h("kbd", null, k))), h("dd", null, text()),
        ])),
        h("form", { method: "dialog" }, h("button", { autofocus: true }, t("close"))));
    help.setAttribute("aria-labelledby", "help-title");
    if (!help.open) help.showModal();
}

let after_g = false; // the previous key was "g"

const is_text_field = (e) => e.matches?.("input:not([type=checkbox]):not([type=radio]), textarea, select, [contenteditable]");

addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.altKey || e.metaKey || e.isComposing || document.querySelector("dialog[open]")) return;
    if (e.key === "Escape") {
        tooltip.hide();
        if (is_text_field(e.target)) e.target.blur();
        return;
    }
    const target = after_g && views.find((v) => v.key === e.key);
    after_g = e.key === "g";
    if (is_text_field(e.target)) return void (after_g = false);
    if (target) location.hash = "#/" + target.id;
    else if (e.key === "/") main.querySelector("[data-focus]")?.focus();
    else if (e.key === "?") show_help();
    else return;
    e.preventDefault();
});

document.getElementById("help-open").addEventListener("click", show_help);
document.getElementById("skip").addEventListener("click", (e) => {
    e.preventDefault(); // the hash is the address of the view
    main.focus();
});
addEventListener("hashchange", () => {
    take_token(); // an address with a token may be pasted into an open tab
    show(true);
});
addEventListener("shoal:language", () => show(false));
addEventListener("unhandledrejection", (e) => show_error(e.reason));
addEventListener("error", (e) => show_error(e.error ?? e.message));

take_token();
set_language(load("language", ""));
show(false);
