// The frame of the page: table of views, navigation, keyboard shortcuts.
import { take_token } from "./api.js";
import { fill, h, load, show_error, tooltip } from "./dom.js";
import { set_language, t } from "./words.js";

const groups = ["talk", "grow", "watch", "admin"]; // named group_ID in words.js

/*
 * The views by group; the link of a group opens its first view. To add a view, add a row here, its module
 * web/ID.js, and its name in words.js as view_ID. `key` opens it after g.
 *
 * The module has open(root, path), which fills root and may return a function that closes the view.
 * `path` is the rest of the address: "job-1" for #/jobs/job-1.
 */
const views = [
    { group: "talk", id: "chat", key: "c" },
    { group: "talk", id: "debate", key: "d" },
    { group: "talk", id: "ask", key: "b" },
    { group: "grow", id: "jobs", key: "j" },
    { group: "grow", id: "evolution", key: "v" },
    { group: "grow", id: "ab", key: "x" },
    { group: "watch", id: "world", key: "w" },
    { group: "watch", id: "agents", key: "a" },
    { group: "admin", id: "system", key: "s" },
    { group: "admin", id: "settings", key: "e" },
];

const main = document.getElementById("main");
const help = document.getElementById("help");
let close = null;

const views_of = (group) => views.filter((v) => v.group === group);
const link = (view, text, current) => h("li", null, h("a", { href: "#/" + view.id, "aria-current": current, title: `g ${view.key}` }, text));

/** Draws the navigation: a list of the groups and a list of the views of the current group. */
function draw_frame(current) {
    document.getElementById("skip").textContent = t("skip");
    const nav = document.getElementById("nav");
    nav.setAttribute("aria-label", t("views"));
    fill(nav,
        h("ul", { class: "groups" }, groups.map((g) => link(views_of(g)[0], t("group_" + g), g === current.group && "true"))),
        h("ul", { class: "views", "aria-label": t("group_" + current.group) },
            views_of(current.group).map((v) => link(v, t("view_" + v.id), v === current && "page"))));
    const button = document.getElementById("help-open");
    button.setAttribute("aria-label", t("help"));
    button.title = t("help");
}

/**
 * Closes the current view and opens the view that the address names. `focus`: moves the focus to the view, or, if it was on
 * the link of a group, to the link of the view, next to which are the other views of the group.
 */
function show(focus) {
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
    const from_group = document.activeElement?.closest(".groups");
    draw_frame(view);
    document.title = `${t("view_" + view.id)} – Shoal`;
    main.className = view.id;
    main.setAttribute("aria-label", t("view_" + view.id));
    main.replaceChildren();
    close = view.module.open(main, rest) ?? null;
    if (focus) (from_group ? document.querySelector(".views [aria-current]") : main).focus({ preventScroll: true });
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
addEventListener("unhandledrejection", (e) => show_error(e.reason));
addEventListener("error", (e) => show_error(e.error ?? e.message));

take_token();
await Promise.all(views.map(async (v) => (v.module = await import(`./${v.id}.js`))));

addEventListener("hashchange", () => {
    take_token(); // an address with a token may be pasted into an open tab
    show(true);
});
addEventListener("shoal:language", () => show(false));
set_language(load("language", "")); // shows the view
