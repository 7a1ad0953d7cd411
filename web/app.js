// The page: which views there are, how one moves between them, what keys do.
import { token_take } from "./api.js";
import { complain, fill, h, load, tip } from "./dom.js";
import { choose, t } from "./words.js";
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
 * A view is a module with open(root, path): it fills root and returns what ends it, or nothing.
 * `path` is what follows its name in the address: #/jobs/job-1 is "job-1" of jobs. To add one: its
 * module, a row here, and its name in words.js as view_ID.
 */
const views = [
    { id: "chat", key: "c", view: chat },
    { id: "debate", key: "d", view: debate },
    { id: "ask", key: "b", view: ask },
    { id: "agents", key: "a", view: agents },
    { id: "jobs", key: "j", view: jobs },
    { id: "world", key: "w", view: world },
    { id: "evolution", key: "v", view: evolution },
    { id: "ab", key: "x", view: ab },
    { id: "system", key: "s", view: system },
    { id: "settings", key: "e", view: settings },
];

const main = document.getElementById("main");
const help = document.getElementById("help");
let close = null;

function frame(current) {
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

/** Leaves what is shown and shows what the address names. */
export function show(focus) {
    const [, id, path] = /^#\/([^/?]*)\/?(.*)$/.exec(location.hash) ?? [];
    const now = views.find((v) => v.id === id) ?? views[0];
    let rest = path ?? "";
    try {
        rest = decodeURIComponent(rest);
    } catch {
        // A stray % in an address that somebody typed: as it is.
    }
    close?.();
    close = null;
    tip.hide();
    frame(now);
    document.title = `${t("view_" + now.id)} – Shoal`;
    main.className = now.id;
    main.setAttribute("aria-label", t("view_" + now.id));
    main.replaceChildren();
    close = now.view.open(main, rest) ?? null;
    if (focus) main.focus({ preventScroll: true });
}

/* keys */

const keys = [
    ...views.map((v) => [["g", v.key], () => t("view_" + v.id)]),
    [["/"], () => t("key_focus")],
    [["?"], () => t("key_help")],
    [["Esc"], () => t("key_escape")],
    [["Enter"], () => t("key_send")],
    [["Shift", "Enter"], () => t("key_newline")],
    [["←", "→"], () => t("key_tokens")],
    [["Space"], () => t("key_play")],
];

function help_show() {
    fill(help,
        h("h2", { id: "help-title" }, t("help")),
        h("dl", null, keys.map(([names, words]) => [
            h("dt", null, names.map((k) => h("kbd", null, k))), h("dd", null, words()),
        ])),
        h("form", { method: "dialog" }, h("button", { autofocus: true }, t("close"))));
    help.setAttribute("aria-labelledby", "help-title");
    if (!help.open) help.showModal();
}

let going = false; // "g" was the key before

const writes = (e) => e.matches?.("input:not([type=checkbox]):not([type=radio]), textarea, select, [contenteditable]");

addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.altKey || e.metaKey || e.isComposing || document.querySelector("dialog[open]")) return;
    if (e.key === "Escape") {
        tip.hide();
        if (writes(e.target)) e.target.blur();
        return;
    }
    const to = going && views.find((v) => v.key === e.key);
    going = e.key === "g";
    if (writes(e.target)) return void (going = false);
    if (to) location.hash = "#/" + to.id;
    else if (e.key === "/") main.querySelector("[data-focus]")?.focus();
    else if (e.key === "?") help_show();
    else return;
    e.preventDefault();
});

document.getElementById("help-open").addEventListener("click", help_show);
document.getElementById("skip").addEventListener("click", (e) => {
    e.preventDefault(); // the hash is the view's
    main.focus();
});
addEventListener("hashchange", () => {
    token_take(); // of an address that was pasted into a tab that shows the page
    show(true);
});
addEventListener("shoal:words", () => show(false));
addEventListener("unhandledrejection", (e) => complain(e.reason));
addEventListener("error", (e) => complain(e.error ?? e.message));

token_take();
choose(load("language", ""));
show(false);
