// The report of the night, below the memories: the last sleep with its verdict, and the versions of the adapter with what each learned, from
// where, recall and retention before and after; restoring a version, starting a sleep, deleting the adapter.
import { has_ended, json } from "./api.js";
import { confirm_dialog, date_time, fill, h, percent, show_error } from "./dom.js";
import { source_link } from "./memories.js";
import { t } from "./words.js";

const POLL_MS = 2000; // while a sleep is running
const is_busy = (job) => !!job && !has_ended(job.state);
const change = (name, v) => v && h("small", null, `${name}: ${percent(v.before.value)} → ${percent(v.after.value)} (n = ${v.n})`);

/** `open_source(conversation, turn)` is called when the user follows the link of a fact to its source. */
export class Sleep {
    constructor(open_source) {
        this.open_source = open_source;
        this.at = h("span");
        this.job = h("small", { role: "status" });
        this.verdict = h("div", { class: "figures" });
        this.list = h("ul", { class: "memories" });
        this.start = h("button", { type: "button", onclick: () => this.send("/v1/sleep", "POST") }, t("sleep_now"));
        this.remove = h("button", { type: "button", onclick: () => this.delete() }, t("delete"));
        this.element = h("section", { hidden: true, "aria-label": t("sleep") },
            h("div", { class: "row" }, h("h2", null, t("sleep")), h("span", { class: "space" }), this.start, this.remove),
            h("p", { class: "muted" }, t("sleep_hint"), " ", this.at), this.job, this.verdict, this.list);
    }

    close() {
        this.closed = true;
        clearTimeout(this.timer);
    }

    /** Loads the report again. The section stays hidden if the server remembers nothing. */
    async refresh() {
        clearTimeout(this.timer);
        try {
            this.exists ??= (await json("/v1/system")).memories;
            if (!this.exists) return;
            const v = await json("/v1/sleep");
            if (this.closed) return;
            this.draw(v);
            if (is_busy(v.job)) this.timer = setTimeout(() => this.refresh(), POLL_MS);
        } catch (e) {
            if (!this.closed) show_error(e);
        }
    }

    draw(v) {
        this.element.hidden = v.memories === 0 && v.versions.length === 0;
        this.at.textContent = v.at ? t("sleep_at", v.at) : "";
        const busy = is_busy(v.job);
        this.start.disabled = this.remove.disabled = busy;
        this.remove.hidden = v.versions.length === 0;
        this.job.textContent = v.job ? [t("state_" + v.job.state), date_time(v.job.ended ?? v.job.started ?? v.job.created), busy && v.job.progress?.title]
            .filter(Boolean).join(" · ") : "";
        fill(this.verdict, v.result && h("p", null, t(v.result.published ? "sleep_published" : "sleep_unchanged", v.result.why)),
            v.result && !v.result.published && this.figures(v.result));
        fill(this.list, v.versions.map((version) => this.item(version, busy)));
    }

    /** Recall, and the accuracy of each family, before and after. */
    figures({ recall, retention }) {
        return [change(t("sleep_recall"), recall), retention?.sets.map((s) => change(s.name, s))];
    }

    item(version, busy) {
        const learned = version.learned.filter((m) => m.new);
        return h("li", null,
            h("div", { class: "row" }, h("span", { title: version.hash }, t("sleep_version", version.number), version.current && ` · ${t("sleep_current")}`),
                h("span", { class: "space" }), !version.current && h("button", { type: "button", disabled: busy,
                    "aria-label": `${t("sleep_restore")}: ${version.number}`, onclick: () => this.send("/v1/sleep/rollback", "POST", { to: version.hash }) }, t("sleep_restore"))),
            h("small", null, date_time(version.created), " · ", version.hash.slice(0, 12)),
            h("div", { class: "figures" }, this.figures(version)),
            version.forgotten.length > 0 && h("small", { class: "bad" }, t("sleep_forgotten", version.forgotten.length)),
            h("ul", null, learned.map((m) => this.fact(m))));
    }

    fact({ attribute, value, text, source, after }) {
        if (value === undefined) return h("li", { class: "muted" }, t("sleep_deleted_fact"));
        return h("li", null, h("span", { class: "full-text", title: text }, value), h("small", null, ` ${t("fact_" + attribute)} · ${t("sleep_answers", after)}`,
            source_link(source, this.open_source)));
    }

    async send(path, method, body) {
        this.start.disabled = true;
        try {
            await json(path, { method, body });
        } catch (e) {
            show_error(e);
        }
        await this.refresh();
    }

    async delete() {
        if (await confirm_dialog(t("sleep_delete_confirm"), t("delete"))) this.send("/v1/sleep", "DELETE");
    }
}
