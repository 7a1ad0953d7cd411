// Blackboard: a question to the answer pipeline; what its agents write stands on a board as soon as it is written.
import { follow, models } from "./api.js";
import { complain, fill, h, labelled, number, option, seconds } from "./dom.js";
import { languages, t } from "./words.js";

// What was asked and answered, while the page lives.
const state = {
    model: "", question: "", agents: "", iterations: "", role_type: "auto", language: "auto", conversation: "", seed: "",
    told: [], began: 0, took: 0,
};
let running = null, shown = null; // the board on the page

const TYPES = ["auto", "discussion", "planning", "informational", "conversational", "default", "model"];

const text_of = ({ key, value: v }) => key === "question_type" ? t("type_" + v) : (typeof v === "string" ? v : JSON.stringify(v, null, 1)).trim();
const kind_of = (e) => t(e.role ? "kind_" + e.role : "board_" + e.key);

/** All of an entry: its text, and what it answers. */
function entry_show(e) {
    const dialog = h("dialog", { class: "entry", "aria-label": e.agent ?? kind_of(e), onclose: () => dialog.remove() },
        h("h2", null, e.agent ?? kind_of(e), e.agent && h("small", null, " ", kind_of(e))),
        h("p", { class: "whole" }, text_of(e) || "–"),
        e.failed && h("p", { class: "error" }, e.failed),
        e.messages && [h("h3", null, t("answers_to")), e.messages.map((m) => [h("small", null, m.role), h("pre", { tabindex: 0 }, m.content)])],
        h("form", { method: "dialog" }, h("button", { autofocus: true }, t("close"))));
    document.body.append(dialog);
    dialog.showModal();
}

function note(e) {
    const text = text_of(e);
    return h("li", null, h("button", { type: "button", class: "note " + (e.role ?? ""), onclick: () => entry_show(e) },
        h("span", { class: "by" }, e.agent && e.agent !== e.role && h("b", null, e.agent), h("small", null, kind_of(e)), e.truncated && h("small", null, t("truncated"))),
        h("span", { class: "text" }, e.failed ?? (text || "–"))));
}

/** The board: what is given, then each iteration, then who answers; above it the answer. */
class Board {
    constructor() {
        this.answer = h("section", { class: "outcome", "aria-live": "polite" });
        this.groups = h("div", { role: "log", "aria-label": t("view_ask") });
        this.lists = {};
        this.notes = {};
        this.waiting = h("li", { class: "waiting" });
        this.quiet = h("p", { class: "quiet", role: "status" });
        this.element = h("div", null, this.answer, this.groups, this.quiet);
    }
    take(event, v) {
        if (event === "step") this.step(v);
        else if (event === "entry") this.entry(v);
        else if (event === "result") this.result(v);
    }
    list(role, iteration) {
        const id = role === "output" ? "output" : role ? `i${iteration}` : "given";
        if (!this.lists[id]) {
            this.lists[id] = h("ul");
            this.groups.append(h("section", { class: "round" }, h("h3", null, id === "given" ? t("given") : id === "output" ? t("kind_output") : t("iteration_n", iteration)), this.lists[id]));
        }
        return this.lists[id];
    }
    step({ role, iteration, agents }) {
        this.left = agents;
        this.waits(role === "gist" ? this.list() : this.list(role, iteration));
    }
    waits(list) {
        if (!this.left) return this.waiting.remove();
        this.waiting.textContent = t("n_think", this.left);
        return list.append(this.waiting);
    }
    /** The same agent's in the same iteration is the same note: it was asked again, with less. */
    entry(e) {
        if (e.key === "final_response" && !e.role) return;
        if (!e.agent && !text_of(e)) return;
        const id = [e.key, e.role, e.iteration].join(), list = this.list(e.role, e.iteration), node = note(e);
        if (this.notes[id]?.isConnected || this.notes[id]?.parentNode) this.notes[id].replaceWith(node);
        else list.append(node);
        this.notes[id] = node;
        if (e.agent && this.left) this.left--;
        this.waits(list);
    }
    result(r) {
        this.waiting.remove();
        fill(this.answer, h("h2", null, t("answer")), h("p", { class: "whole" }, r.answer),
            h("small", null, [r.source !== "output" && t("source_" + r.source), r.role_type && `${t("role_type")}: ${t("type_" + r.role_type)}`,
                t("n_tokens", number(r.usage.completion_tokens)), seconds(state.took)].filter(Boolean).join(" · ")),
            r.why && h("p", { class: "error" }, r.why));
    }
    /** Whether more will come; what never came is said. */
    rest() {
        const over = state.told.some(([event]) => event === "result");
        if (!running) this.waiting.remove();
        this.quiet.textContent = running || over ? "" : t("finish_stopped");
    }
}

function tell(event, v) {
    if (event === "result") state.took = (performance.now() - state.began) / 1000;
    state.told.push([event, v]);
    shown?.take(event, v);
}

async function ask() {
    const whole = (v) => (v === "" ? undefined : Number(v));
    const body = {
        model: state.model || undefined, question: state.question.trim(), agents: whole(state.agents), iterations: whole(state.iterations),
        role_type: state.role_type, language: state.language, conversation: state.conversation.trim() || undefined, seed: whole(state.seed),
    };
    running = new AbortController();
    Object.assign(state, { told: [], began: performance.now() });
    open.paint();
    try {
        await follow("/v1/ask", { signal: running.signal, body }, tell);
    } catch (e) {
        complain(e);
    }
    running = null;
    open.paint(false);
}

export function open(root) {
    const bound = (name, tag, props) => h(tag, { ...props, value: state[name], oninput: (e) => (state[name] = e.target.value) });
    const chosen = (name, rows) => h("select", { onchange: (e) => (state[name] = e.target.value) }, rows.map(([id, text]) => option(id, text, state[name])));
    const model = h("select", { onchange: () => (state.model = model.value) });
    const go = h("button", { class: "main", type: "submit" });
    const board = h("div", { class: "board" });
    /** `all`: another board than before. */
    open.paint = (all = true) => {
        go.textContent = t(running ? "stop" : "ask_go");
        if (all) {
            shown = running || state.told.length ? new Board() : null;
            state.told.forEach(([event, v]) => shown.take(event, v));
            fill(board, shown?.element);
        }
        shown?.rest();
    };
    const form = h("form", {
        class: "panel", onsubmit: (e) => {
            e.preventDefault();
            if (running) running.abort();
            else ask();
        },
    },
    h("div", { class: "grid" }, labelled(t("model"), model),
        labelled(t("agents"), bound("agents", "input", { type: "number", min: 1, max: 15, placeholder: "3" })),
        labelled(t("iterations"), bound("iterations", "input", { type: "number", min: 1, max: 16, placeholder: "2" })),
        labelled(t("role_type"), chosen("role_type", TYPES.map((id) => [id, t("type_" + id)]))),
        labelled(t("language"), chosen("language", [["auto", t("by_question")], ...Object.entries(languages)])),
        labelled(t("conversation"), bound("conversation", "input", { maxlength: 40, placeholder: t("conversation_hint"), spellcheck: "false" })),
        labelled(t("seed"), bound("seed", "input", { type: "number", min: 0, placeholder: "1" }))),
    labelled(t("question"), bound("question", "textarea", { rows: 2, required: true, "data-focus": true })),
    h("div", { class: "row" }, go));
    fill(root, form, board);
    open.paint();
    models().then(({ base, adapters }) => {
        fill(model, [...base, ...adapters].map((m) => option(m.id, m.id, state.model)));
        state.model = model.value;
    }).catch(complain);
    return () => {
        document.querySelector("dialog.entry")?.close();
        shown = null;
        open.paint = () => {};
    };
}
