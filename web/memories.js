// The long-term memories of the key, below its conversations: value, source and date of each; deleting one, and undoing the last change.
import { json } from "./api.js";
import { confirm_dialog, date_time, fill, h, show_error } from "./dom.js";
import { t } from "./words.js";

const SHOWN = 500; // the strongest memories

/** The link to the exchange that a memory comes from, after a separator; nothing without a conversation. */
export const source_link = ({ conversation, turn }, open_source) => conversation && [" · ", h("a", { href: "#/ask", onclick: (e) => {
    e.preventDefault();
    open_source(conversation, turn);
} }, t("turn_of", turn, conversation))];

/** `open_source(conversation, turn)` is called when the user follows the link of a memory to its source, `changed()` after a change. */
export class Memories {
    constructor(open_source, changed) {
        this.open_source = open_source;
        this.changed = changed;
        this.status = h("small", { role: "status" });
        this.list = h("ul", { class: "memories" });
        this.element = h("section", { hidden: true, "aria-label": t("memories") },
            h("div", { class: "row" }, h("h2", null, t("memories")), h("span", { class: "space" }),
                h("button", { type: "button", onclick: () => this.undo() }, t("undo"))),
            h("p", { class: "muted" }, t("memories_hint")), this.status, this.list);
    }

    close() {
        this.closed = true;
    }

    /** Loads the list again. The section stays hidden if the server remembers nothing. */
    async refresh() {
        try {
            this.exists ??= (await json("/v1/system")).memories;
            if (!this.exists) return;
            const { data } = await json("/v1/memories?limit=" + SHOWN);
            if (this.closed) return;
            this.element.hidden = false;
            fill(this.list, data.map((m) => this.item(m)), data.length === 0 && h("li", { class: "muted" }, t("no_memories")));
        } catch (e) {
            if (!this.closed) show_error(e);
        }
    }

    item(m) {
        return h("li", null,
            h("div", { class: "row" }, h("span", { class: "full-text", title: m.text }, m.value), h("span", { class: "space" }),
                h("button", { type: "button", "aria-label": `${t("delete")}: ${m.value}`, onclick: () => this.remove(m) }, t("delete"))),
            h("small", null, t("fact_" + m.attribute), " · ", date_time(m.source.time), source_link(m.source, this.open_source)));
    }

    async change(path, method, text) {
        try {
            await json(path, { method });
            this.status.textContent = text;
        } catch (e) {
            show_error(e);
        }
        await this.refresh();
        this.changed();
    }

    async remove(m) {
        if (await confirm_dialog(t("memory_delete_confirm", m.value), t("delete"))) this.change("/v1/memories/" + m.id, "DELETE", t("memory_deleted", m.value));
    }

    undo() {
        this.change("/v1/memories/undo", "POST", t("undone"));
    }
}
