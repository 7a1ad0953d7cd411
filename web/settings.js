// Settings: API key, language and theme of this browser; backups of the server.
import { api_key, json } from "./api.js";
import { bytes, confirm_dialog, date_time, fill, h, labelled, load, number, option, percent, save, show_error } from "./dom.js";
import { languages, set_language, t } from "./words.js";

function set_theme(theme) {
    save("theme", theme || null);
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    dispatchEvent(new Event("shoal:theme"));
}

function key_node() {
    const field = h("input", { type: "password", autocomplete: "off", value: api_key.get(), "data-focus": true, spellcheck: "false" });
    const remember = h("input", { type: "checkbox", checked: api_key.remembered() });
    const status = h("small", { role: "status" });
    return h("form", {
        class: "panel", onsubmit: async (e) => {
            e.preventDefault();
            api_key.set(field.value.trim(), remember.checked);
            status.textContent = "";
            try {
                await json("/v1/models");
                status.textContent = t("key_accepted");
            } catch (error) {
                show_error(error);
            }
        },
    }, h("h2", null, t("api_key")), labelled(t("api_key"), field, t("key_hint")),
    h("div", { class: "row" }, h("label", { class: "check" }, remember, t("remember")), status,
        h("span", { class: "space" }), h("button", { type: "submit" }, t("save"))));
}

/* backups */

class Backups {
    constructor() {
        this.status = h("small", { role: "status" });
        this.list = h("div", { class: "scroll-x" });
        this.backup_button = h("button", { type: "button", class: "main", onclick: () =>
            this.run("/v1/backups", "POST", (b) => t("backup_created", bytes(b.bytes), bytes(b.new_bytes))) }, t("backup_now"));
        this.element = h("section", { class: "panel backups", hidden: true }, h("h2", null, t("backups")),
            h("p", { class: "muted" }, t("backups_hint")), this.list,
            h("div", { class: "row" }, this.status, h("span", { class: "space" }), this.backup_button));
        this.busy = false;
        this.closed = false;
        // Without a key of the scope admin the section stays hidden; the form above is where the user enters a key.
        this.refresh().catch((e) => [401, 403].includes(e.status) || show_error(e));
    }
    async refresh() {
        const all = await json("/v1/backups");
        if (this.closed) return;
        this.element.hidden = false;
        this.backup_button.disabled = this.busy;
        if (all.working) this.status.textContent = `${t("backup_" + all.working.what)} ${all.working.total ? percent(all.working.done / all.working.total) : ""}`;
        const focused = this.list.contains(document.activeElement) && document.activeElement.dataset.act;
        fill(this.list, all.restore && this.restore_notice(all.restore), all.backups.length ? h("table", { class: "list" },
            h("thead", null, h("tr", null, ["backup_when", "backup_files", "backup_size", "backup_new"].map((id, i) =>
                h("th", { class: i && "num" }, t(id))), h("td"))),
            h("tbody", null, all.backups.map((b) => this.row(b)))) : h("p", { class: "muted" }, t("no_backups")));
        if (focused) this.list.querySelector(`[data-act="${focused}"]`)?.focus();
    }
    /** A restore that is scheduled for the next start, or the reason why it failed. */
    restore_notice(r) {
        return h("div", { class: "notice" }, h("span", null, r.failed ? t("restore_failed", r.id, r.failed) : t("restore_scheduled", r.id)),
            this.button("cancel", r.id, () => this.run(`/v1/backups/${r.id}/restore`, "DELETE", () => t("restore_cancelled"))));
    }
    button(label, id, onclick) {
        return h("button", { type: "button", "data-act": label + id, disabled: this.busy, "aria-label": `${t(label)} ${id}`, onclick }, t(label));
    }
    row(b) {
        const path = "/v1/backups/" + b.id;
        const action = (label, method, end, result_text, question) => this.button(label, b.id, async () => {
            if (!question || await confirm_dialog(t(question, b.id), t(label))) this.run(path + end, method, result_text);
        });
        return h("tr", null, h("th", { scope: "row" }, b.created ? date_time(b.created) : b.id, b.problem && h("p", { class: "error" }, b.problem)),
            [number(b.files), bytes(b.bytes), bytes(b.new_bytes)].map((text) => h("td", { class: "num" }, text)),
            h("td", null, h("div", { class: "row" },
                action("backup_check", "POST", "/check", (c) => c.problems.length ? c.problems.join("\n") : t("backup_intact", bytes(c.bytes))),
                !b.problem && action("restore", "POST", "/restore", (r) => t("restore_scheduled", r.id), "restore_confirm"),
                action("delete", "DELETE", "", (d) => t("backup_deleted", bytes(d.bytes)), "backup_delete_confirm"))));
    }
    /** Sends a request that is answered when its work is done. Meanwhile the section shows the progress. */
    async run(path, method, result_text) {
        let done = false;
        this.busy = true;
        this.status.textContent = t("backup_started");
        const show_progress = async () => {
            while (!done && !this.closed) {
                await this.refresh().catch(() => {});
                await new Promise((r) => setTimeout(r, 1000));
            }
        };
        show_progress();
        let text = "";
        try {
            text = result_text(await json(path, { method }));
        } catch (e) {
            show_error(e);
        }
        done = true;
        this.busy = false;
        await this.refresh().catch(show_error);
        this.status.textContent = text;
    }
}

export function open(root) {
    const backups = new Backups();
    const language = h("select", { onchange: () => (save("language", language.value || null), set_language(language.value)) },
        option("", t("language_browser"), load("language", "")),
        Object.entries(languages).map(([id, name]) => option(id, name, load("language", ""))));
    const theme = h("select", { onchange: () => set_theme(theme.value) },
        ["", "light", "dark"].map((id) => option(id, t("theme_" + (id || "system")), load("theme", null) ?? "")));
    const version = h("p", { class: "muted" });
    fill(root, h("h1", null, t("view_settings")), key_node(),
        h("section", { class: "panel" }, h("h2", null, t("appearance")),
            h("div", { class: "grid" }, labelled(t("language"), language), labelled(t("theme"), theme))),
        backups.element, version);
    json("/version").then((v) => (version.textContent = `Shoal ${v.version}`)).catch(show_error);
    return () => (backups.closed = true);
}
