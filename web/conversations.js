// The stored conversations of the key in a side bar: search, open, rename, delete; and the exchanges of the open one.
import { call, json } from "./api.js";
import { confirm_dialog, date_time, fill, h, labelled, number, show_error } from "./dom.js";
import { t } from "./words.js";

const PAGE = 20; // exchanges that are loaded at a time
const path_of = (id) => "/v1/conversations/" + encodeURIComponent(id);

/** `choose(id)` is called when the user opens a conversation, begins a new one, or deletes the open one (""). */
export class Conversations {
    constructor(choose) {
        this.choose = choose;
        this.id = "";
        this.entries = [];
        this.hits = null; // results of the search; null: all conversations are listed
        this.loads = 0;
        this.search = h("input", { type: "search", maxlength: 80, placeholder: t("search"), "aria-label": t("search"), oninput: () => this.wait() });
        this.list = h("ul", { class: "item-list" });
        this.bar = h("aside", { "aria-label": t("conversations") },
            h("div", { class: "row" }, h("h2", null, t("conversations")), h("span", { class: "space" }),
                h("button", { type: "button", onclick: () => this.begin() }, t("new_chat"))),
            this.search, this.list);
        this.history = h("section", { class: "exchanges" });
    }

    close() {
        clearTimeout(this.timer);
        this.closed = true;
    }

    /** Loads the list again, and the exchanges of the open conversation. */
    async refresh() {
        try {
            this.entries = (await json("/v1/conversations")).data;
        } catch (e) {
            if (!this.closed) show_error(e);
            return;
        }
        if (!this.closed) await this.open(this.id);
    }

    begin() {
        this.choose(date_time(Date.now()));
    }

    /* the list */

    wait() {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.find(), 250);
    }

    async find() {
        const text = this.search.value.trim();
        try {
            const hits = text ? (await json("/v1/conversations?search=" + encodeURIComponent(text))).data : null;
            if (this.closed || text !== this.search.value.trim()) return; // the user has gone on
            this.hits = hits;
            this.draw_list();
        } catch (e) {
            if (!this.closed) show_error(e);
        }
    }

    item(id, title, detail) {
        return h("li", null, h("a", { href: "#/ask", "aria-current": id === this.id && "true", onclick: (e) => {
            e.preventDefault();
            this.choose(id);
        } }, h("span", { class: "title" }, title), h("small", null, detail)));
    }

    draw_list() {
        const title_of = (id) => this.entries.find((e) => e.id === id)?.title ?? id;
        fill(this.list, this.hits
            ? this.hits.map((x) => this.item(x.id, title_of(x.id), `${x.user} — ${x.assistant}`))
            : this.entries.map((e) => this.item(e.id, e.title, `${number(e.exchanges)} · ${date_time(e.updated)}`)),
        (this.hits ?? this.entries).length === 0 && h("li", { class: "muted" }, t(this.hits ? "no_hits" : "no_conversations")));
    }

    /* the open conversation */

    /** Shows the last exchanges of a conversation, back to the exchange `turn`, which it scrolls to; "": of none. */
    async open(id, turn) {
        this.id = id;
        this.draw_list();
        const entry = this.entries.find((e) => e.id === id), load = ++this.loads;
        if (!entry) return fill(this.history);
        this.exchanges = [];
        this.first = entry.last + 1;
        this.list_node = h("ol");
        this.earlier = h("button", { type: "button", onclick: () => this.load_earlier(entry, this.loads) }, t("earlier"));
        const title = h("h2", null, entry.title);
        fill(this.history, h("div", { class: "row" }, title, h("span", { class: "space" }),
            h("button", { type: "button", onclick: () => this.rename(entry) }, t("rename")),
            h("button", { type: "button", onclick: () => this.remove(entry) }, t("delete"))), this.earlier, this.list_node);
        do if (!await this.load_earlier(entry, load)) return;
        while (turn < this.first && !this.earlier.hidden);
        const node = this.list_node.querySelector(`[data-number="${turn}"]`);
        node?.scrollIntoView({ block: "center" });
        node?.focus({ preventScroll: true });
    }

    /** Returns whether the exchanges are on the page. */
    async load_earlier(entry, load) {
        const after = Math.max(this.first - 1 - PAGE, entry.last - entry.exchanges);
        try {
            const { data } = await json(`${path_of(entry.id)}?after=${after}&limit=${this.first - 1 - after}`);
            if (this.closed || load !== this.loads) return false;
            this.list_node.prepend(...data.filter((x) => x.number < this.first).map((x) => h("li", { "data-number": x.number, tabindex: -1 }, x.at && h("small", null, date_time(x.at)),
                h("p", { class: "question" }, x.user), h("p", { class: "full-text" }, x.assistant))));
            this.first = after + 1;
            this.earlier.hidden = after <= entry.last - entry.exchanges;
            return true;
        } catch (e) {
            if (!this.closed) show_error(e);
            return false;
        }
    }

    async change(path, options) {
        try {
            await call(path, options);
            return true;
        } catch (e) {
            show_error(e);
            return false;
        }
    }

    async rename(entry) {
        const title = h("input", { value: entry.title, maxlength: 60 });
        if (!await confirm_dialog(labelled(t("title"), title), t("rename"))) return;
        if (await this.change(path_of(entry.id), { body: { title: title.value.trim() } })) this.refresh();
    }

    async remove(entry) {
        if (!await confirm_dialog(t("conversation_delete_confirm", entry.title), t("delete"))) return;
        if (!await this.change(path_of(entry.id), { method: "DELETE" })) return;
        this.choose("");
        this.refresh();
    }
}
