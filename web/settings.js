// Settings: the key, the language, light or dark, all of this browser; the server's backups.
import { json, key } from "./api.js";
import { bytes, complain, fill, h, labelled, load, moment, number, option, percent, save } from "./dom.js";
import { choose, languages, t } from "./words.js";

function theme_set(theme) {
    save("theme", theme || null);
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    dispatchEvent(new Event("shoal:theme"));
}

function key_node() {
    const secret = h("input", { type: "password", autocomplete: "off", value: key.get(), "data-focus": true, spellcheck: "false" });
    const remember = h("input", { type: "checkbox", checked: key.remembered() });
    const said = h("small", { role: "status" });
    return h("form", {
        class: "panel", onsubmit: async (e) => {
            e.preventDefault();
            key.set(secret.value.trim(), remember.checked);
            said.textContent = "";
            try {
                await json("/v1/models");
                said.textContent = t("key_fine");
            } catch (problem) {
                complain(problem);
            }
        },
    }, h("h2", null, t("api_key")), labelled(t("api_key"), secret, t("key_hint")),
    h("div", { class: "row" }, h("label", { class: "check" }, remember, t("remember")), said,
        h("span", { class: "space" }), h("button", { type: "submit" }, t("save"))));
}

/* backups */

/** Asks in words; whether the answer is yes. */
function confirmed(words, yes) {
    return new Promise((answer) => {
        const dialog = h("dialog", { "aria-label": yes, onclose: () => {
            answer(dialog.returnValue === "yes");
            dialog.remove();
        } }, h("form", { method: "dialog" }, h("p", null, words), h("div", { class: "row" }, h("span", { class: "space" }),
            h("button", { value: "no", autofocus: true }, t("cancel")), h("button", { value: "yes", class: "main" }, yes))));
        document.body.append(dialog);
        dialog.showModal();
    });
}

class Backups {
    constructor() {
        this.said = h("small", { role: "status" });
        this.list = h("div", { class: "wide" });
        this.now = h("button", { type: "button", class: "main", onclick: () =>
            this.work("/v1/backups", "POST", (b) => t("backup_made", bytes(b.bytes), bytes(b.new_bytes))) }, t("backup_now"));
        this.element = h("section", { class: "panel backups", hidden: true }, h("h2", null, t("backups")),
            h("p", { class: "quiet" }, t("backups_hint")), this.list,
            h("div", { class: "row" }, this.said, h("span", { class: "space" }), this.now));
        this.busy = false;
        this.gone = false;
        // A key that may not see them, or none yet: there is nothing to show, and the form above says why.
        this.refresh().catch((e) => [401, 403].includes(e.status) || complain(e));
    }
    async refresh() {
        const all = await json("/v1/backups");
        if (this.gone) return;
        this.element.hidden = false;
        this.now.disabled = this.busy;
        if (all.working) this.said.textContent = `${t("backup_" + all.working.what)} ${all.working.total ? percent(all.working.done / all.working.total) : ""}`;
        const held = this.list.contains(document.activeElement) && document.activeElement.dataset.act;
        fill(this.list, all.restore && this.mark(all.restore), all.backups.length ? h("table", { class: "list" },
            h("thead", null, h("tr", null, ["backup_when", "backup_files", "backup_size", "backup_new"].map((id, i) =>
                h("th", { class: i && "n" }, t(id))), h("td"))),
            h("tbody", null, all.backups.map((b) => this.row(b)))) : h("p", { class: "quiet" }, t("no_backups")));
        if (held) this.list.querySelector(`[data-act="${held}"]`)?.focus();
    }
    /** What is asked of the next start, or what became of it. */
    mark(r) {
        return h("div", { class: "notice" }, h("span", null, r.failed ? t("restore_failed", r.id, r.failed) : t("restore_waits", r.id)),
            this.button("cancel", r.id, () => this.work(`/v1/backups/${r.id}/restore`, "DELETE", () => t("restore_cancelled"))));
    }
    button(word, id, act) {
        return h("button", { type: "button", "data-act": word + id, disabled: this.busy, "aria-label": `${t(word)} ${id}`, onclick: act }, t(word));
    }
    row(b) {
        const path = "/v1/backups/" + b.id;
        const act = (word, method, end, said, question) => this.button(word, b.id, async () => {
            if (!question || await confirmed(t(question, b.id), t(word))) this.work(path + end, method, said);
        });
        return h("tr", null, h("th", { scope: "row" }, b.created ? moment(b.created) : b.id, b.problem && h("p", { class: "error" }, b.problem)),
            [number(b.files), bytes(b.bytes), bytes(b.new_bytes)].map((text) => h("td", { class: "n" }, text)),
            h("td", null, h("div", { class: "row" },
                act("backup_check", "POST", "/check", (c) => c.problems.length ? c.problems.join("\n") : t("backup_fine", bytes(c.bytes))),
                !b.problem && act("restore", "POST", "/restore", (r) => t("restore_waits", r.id), "restore_sure"),
                act("delete", "DELETE", "", (d) => t("backup_gone", bytes(d.bytes)), "backup_delete_sure"))));
    }
    /** A call that takes as long as it takes; meanwhile the list says how far it is. */
    async work(path, method, said) {
        let over = false;
        this.busy = true;
        this.said.textContent = t("backup_begun");
        const follow = async () => {
            while (!over && !this.gone) {
                await this.refresh().catch(() => {});
                await new Promise((r) => setTimeout(r, 1000));
            }
        };
        follow();
        try {
            this.end = said(await json(path, { method }));
        } catch (e) {
            this.end = "";
            complain(e);
        }
        over = true;
        this.busy = false;
        await this.refresh().catch(complain);
        this.said.textContent = this.end;
    }
}

export function open(root) {
    const backups = new Backups();
    const language = h("select", { onchange: () => (save("language", language.value || null), choose(language.value)) },
        option("", t("by_browser"), load("language", "")),
        Object.entries(languages).map(([id, name]) => option(id, name, load("language", ""))));
    const theme = h("select", { onchange: () => theme_set(theme.value) },
        ["", "light", "dark"].map((id) => option(id, t("theme_" + (id || "system")), load("theme", null) ?? "")));
    const version = h("p", { class: "quiet" });
    fill(root, h("h1", null, t("view_settings")), key_node(),
        h("section", { class: "panel" }, h("h2", null, t("look")),
            h("div", { class: "grid" }, labelled(t("language"), language), labelled(t("theme"), theme))),
        backups.element, version);
    json("/version").then((v) => (version.textContent = `Shoal ${v.version}`)).catch(complain);
    return () => (backups.gone = true);
}
