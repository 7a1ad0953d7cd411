// Blackboard: a question to the answer pipeline, and the entries of its agents, shown as they are written.
import { models, stream } from "./api.js";
import { Conversations } from "./conversations.js";
import { Memories } from "./memories.js";
import { Sleep } from "./sleep.js";
import { fill, h, labelled, number, option, seconds, show_error } from "./dom.js";
import { languages, t } from "./words.js";

// Form fields and the last board. They last until the page is reloaded.
const state = {
    model: "", question: "", agents: "", iterations: "", role_type: "auto", language: "auto", conversation: "", seed: "",
    events: [], start: 0, duration: 0,
};
let running = null; // AbortController of the question in progress
let shown = null; // BoardView on the page
let answered = () => {}; // called after an answer

const ROLE_TYPES = ["auto", "discussion", "planning", "informational", "conversational", "default", "model"];

const text_of = ({ key, value: v }) => key === "question_type" ? t("type_" + v) : (typeof v === "string" ? v : JSON.stringify(v, null, 1)).trim();
const kind_of = (e) => t(e.role ? "kind_" + e.role : "board_" + e.key);

/** Opens a dialog with the full text of an entry and the messages of its prompt. */
function show_entry(e) {
    const dialog = h("dialog", { class: "entry", "aria-label": e.agent ?? kind_of(e), onclose: () => dialog.remove() },
        h("h2", null, e.agent ?? kind_of(e), e.agent && h("small", null, " ", kind_of(e))),
        h("p", { class: "full-text" }, text_of(e) || "–"),
        e.failed && h("p", { class: "error" }, e.failed),
        e.messages && [h("h3", null, t("prompt_messages")), e.messages.map((m) => [h("small", null, m.role), h("pre", { tabindex: 0 }, m.content)])],
        h("form", { method: "dialog" }, h("button", { autofocus: true }, t("close"))));
    document.body.append(dialog);
    dialog.showModal();
}

function note_node(e) {
    const text = text_of(e);
    return h("li", null, h("button", { type: "button", class: "note " + (e.role ?? ""), onclick: () => show_entry(e) },
        h("span", { class: "author" }, e.agent && e.agent !== e.role && h("b", null, e.agent), h("small", null, kind_of(e)), e.truncated && h("small", null, t("truncated"))),
        h("span", { class: "text" }, e.failed ?? (text || "–"))));
}

/** The board: the input, the entries of each iteration and the output; the answer is above them. */
class BoardView {
    constructor() {
        this.answer = h("section", { class: "outcome", "aria-live": "polite" });
        this.groups = h("div", { role: "log", "aria-label": t("view_ask") });
        this.lists = {};
        this.notes = {};
        this.pending = h("li", { class: "generating" }); // the number of agents that are still generating
        this.status = h("p", { class: "muted", role: "status" });
        this.element = h("div", null, this.answer, this.groups, this.status);
    }
    handle(event, v) {
        if (event === "step") this.start_step(v);
        else if (event === "entry") this.add_entry(v);
        else if (event === "result") this.draw_result(v);
    }
    list_of(role, iteration) {
        const id = role === "output" ? "output" : role ? `i${iteration}` : "input";
        if (!this.lists[id]) {
            this.lists[id] = h("ul");
            this.groups.append(h("section", { class: "round" }, h("h3", null, id === "input" ? t("input") : id === "output" ? t("kind_output") : t("iteration_n", iteration)), this.lists[id]));
        }
        return this.lists[id];
    }
    start_step({ role, iteration, agents }) {
        this.n_pending = agents;
        this.draw_pending(role === "gist" ? this.list_of() : this.list_of(role, iteration));
    }
    draw_pending(list) {
        if (!this.n_pending) return this.pending.remove();
        this.pending.textContent = t("n_generating", this.n_pending);
        return list.append(this.pending);
    }
    /** A second entry of an agent in an iteration replaces the first: the agent was queried again with a shorter prompt. */
    add_entry(e) {
        if (e.key === "final_response" && !e.role) return;
        if (!e.agent && !text_of(e)) return;
        const id = [e.key, e.role, e.iteration].join(), list = this.list_of(e.role, e.iteration), node = note_node(e);
        if (this.notes[id]?.isConnected || this.notes[id]?.parentNode) this.notes[id].replaceWith(node);
        else list.append(node);
        this.notes[id] = node;
        if (e.agent && this.n_pending) this.n_pending--;
        this.draw_pending(list);
    }
    draw_result(r) {
        this.pending.remove();
        fill(this.answer, h("h2", null, t("answer")), h("p", { class: "full-text" }, r.answer),
            h("small", null, [r.source !== "output" && t("source_" + r.source), r.role_type && `${t("role_type")}: ${t("type_" + r.role_type)}`,
                t("n_tokens", number(r.usage.completion_tokens)), seconds(state.duration)].filter(Boolean).join(" · ")),
            r.why && h("p", { class: "error" }, r.why));
    }
    /** Shows whether the question was stopped before its result. */
    show_status() {
        const complete = state.events.some(([event]) => event === "result");
        if (!running) this.pending.remove();
        this.status.textContent = running || complete ? "" : t("finish_stopped");
    }
}

function on_event(event, v) {
    if (event === "result") state.duration = (performance.now() - state.start) / 1000;
    state.events.push([event, v]);
    shown?.handle(event, v);
}

async function ask() {
    const integer = (v) => (v === "" ? undefined : Number(v));
    const body = {
        model: state.model || undefined, question: state.question.trim(), agents: integer(state.agents), iterations: integer(state.iterations),
        role_type: state.role_type, language: state.language, conversation: state.conversation.trim() || undefined, seed: integer(state.seed),
    };
    running = new AbortController();
    Object.assign(state, { events: [], start: performance.now() });
    open.paint();
    try {
        await stream("/v1/ask", { signal: running.signal, body }, on_event);
    } catch (e) {
        show_error(e);
    }
    running = null;
    open.paint(false);
    answered();
}

export function open(root) {
    const bound_field = (name, tag, props) => h(tag, { ...props, value: state[name], oninput: (e) => (state[name] = e.target.value) });
    const bound_select = (name, rows) => h("select", { onchange: (e) => (state[name] = e.target.value) }, rows.map(([id, text]) => option(id, text, state[name])));
    const model = h("select", { onchange: () => (state.model = model.value) });
    const conversation = bound_field("conversation", "input", { maxlength: 40, placeholder: t("conversation_hint"), spellcheck: "false" });
    const choose = (id, turn) => {
        state.conversation = conversation.value = id;
        conversations.open(id, turn);
        if (!id) memories.refresh(), sleep.refresh(); // a deleted conversation takes its memories with it
    };
    const conversations = new Conversations(choose), memories = new Memories(choose, () => sleep.refresh()), sleep = new Sleep(choose);
    conversations.bar.append(memories.element, sleep.element);
    const submit = h("button", { class: "main", type: "submit" });
    const board = h("div", { class: "board" });
    /** `all`: draws the board again, not only the button and the status. */
    open.paint = (all = true) => {
        submit.textContent = t(running ? "stop" : "start_ask");
        if (all) {
            shown = running || state.events.length ? new BoardView() : null;
            state.events.forEach(([event, v]) => shown.handle(event, v));
            fill(board, shown?.element);
        }
        shown?.show_status();
    };
    const form = h("form", {
        class: "panel", onsubmit: (e) => {
            e.preventDefault();
            if (running) running.abort();
            else ask();
        },
    },
    h("div", { class: "grid" }, labelled(t("model"), model),
        labelled(t("agents"), bound_field("agents", "input", { type: "number", min: 1, max: 15, placeholder: "3" })),
        labelled(t("iterations"), bound_field("iterations", "input", { type: "number", min: 1, max: 16, placeholder: "2" })),
        labelled(t("role_type"), bound_select("role_type", ROLE_TYPES.map((id) => [id, t("type_" + id)]))),
        labelled(t("language"), bound_select("language", [["auto", t("language_of_question")], ...Object.entries(languages)])),
        labelled(t("conversation"), conversation),
        labelled(t("seed"), bound_field("seed", "input", { type: "number", min: 0, placeholder: "1" }))),
    labelled(t("question"), bound_field("question", "textarea", { rows: 2, required: true, "data-focus": true })),
    h("div", { class: "row" }, submit));
    fill(root, h("h1", null, t("view_ask")), h("div", { class: "split" }, conversations.bar, h("div", null, conversations.history, form, board)));
    open.paint();
    answered = () => {
        conversations.id = state.conversation.trim();
        conversations.refresh();
        memories.refresh();
        sleep.refresh();
    };
    answered();
    models().then(({ base, adapters }) => {
        fill(model, [...base, ...adapters].map((m) => option(m.id, m.id, state.model)));
        state.model = model.value;
    }).catch(show_error);
    return () => {
        document.querySelector("dialog.entry")?.close();
        shown = null;
        open.paint = answered = () => {};
        conversations.close();
        memories.close();
        sleep.close();
    };
}
