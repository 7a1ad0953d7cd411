// Chat: a conversation with one model, or with two models that get the same messages.
import { ApiError, events, json, models } from "./api.js";
import { bar_table, fill, h, labelled, load, number, option, save, seconds, show_error, svg, tooltip } from "./dom.js";
import { Steps } from "./steps.js";
import { t } from "./words.js";

const TOP_LOGPROBS = 5; // requested alternatives per token
const sampling_fields = [ // fields of a request; an empty field leaves the server's default
    { name: "temperature", min: 0, max: 100, step: 0.05 },
    { name: "top_p", min: 0, max: 1, step: 0.05 },
    { name: "max_tokens", min: 1, step: 1 },
    { name: "seed", step: 1 },
];

/*
 * columns: [{model, messages}]; the second is shown if `two`. A message is {role, content}. A reply
 * also has: thoughts (the turns of a team or, if `reasoned`, the model's reasoning); steps of an
 * agent as the server sends them, and its confidence; tokens of the content [[text, logprob, [[text, logprob], …]], …]; stats {first, speed, n, finish}; error; id, at
 * (time) and arm (variant of an A/B test) from the server; rating and correction by the user. `node`
 * and `live` belong to the screen and are not stored.
 */
const blank = { columns: [{ model: "", messages: [] }, { model: "", messages: [] }], two: false, settings: {} };
const state = { ...blank, ...load("chat", {}) };
let available = { base: [], adapters: [], teams: [], agents: [] };
let ratable_since = null; // Unix time from which replies can be rated; null: the server takes no ratings
let running = null; // AbortController of the replies in progress
let repaint = () => {};

function store_state(tokens = true) {
    const columns = state.columns.map((c) => ({
        model: c.model,
        messages: c.messages.map(({ live, node, ...m }) => (tokens ? m : { ...m, tokens: undefined })),
    }));
    if (!save("chat", { ...state, columns }) && tokens) store_state(false); // the token probabilities take most of the space
}

/* a reply */

/** Adds the tokens of a chunk. A character that spans several tokens belongs to the last of them. */
function add_tokens(m, list, decoder) {
    const text = (bytes) => new TextDecoder().decode(new Uint8Array(bytes));
    for (const c of list)
        m.tokens.push([
            decoder.decode(new Uint8Array(c.bytes ?? []), { stream: true }), c.logprob,
            c.top_logprobs.map((o) => [o.bytes?.length ? text(o.bytes) : o.token, o.logprob]),
        ]);
}

function request_body(column) {
    const body = { model: column.model, messages: [], stream: true, stream_options: { include_usage: true } };
    for (const { name } of sampling_fields)
        if (state.settings[name] !== undefined) body[name] = state.settings[name];
    if (state.settings.system) body.messages.push({ role: "system", content: state.settings.system });
    // A message without a reply is not sent again with the next one.
    column.messages.slice(0, -1).forEach((m, i, all) => {
        if (m.role === "user" ? i + 1 === all.length || all[i + 1].content : m.content)
            body.messages.push({ role: m.role, content: m.content });
    });
    if (column.model.startsWith("team:")) body.include_reasoning = true;
    else if (!column.model.startsWith("agent:")) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    return body;
}

async function reply(column, m, signal) {
    const start = performance.now(), decoder = new TextDecoder();
    let first = 0, last = 0, usage = null;
    try {
        const on_open = (r) => (m.arm = r.headers.get("X-Shoal-AB") ?? undefined);
        for await (const e of events("/v1/chat/completions", { body: request_body(column), signal, on_open })) {
            if (e.data === "[DONE]") break;
            const v = JSON.parse(e.data), choice = v.choices?.[0];
            if (v.error) throw new ApiError(500, v.error.message);
            if (v.id) [m.id, m.at] = [v.id, v.created];
            if (v.usage) usage = v.usage;
            if (choice?.finish_reason) m.stats.finish = choice.finish_reason;
            const { content, reasoning_content } = choice?.delta ?? {}, { step, agent } = choice?.shoal ?? {}, tokens = choice?.logprobs?.content ?? [];
            if (step) (m.steps ??= []).push(step);
            if (agent) m.confidence = agent.calibrated ?? agent.confidence;
            if (reasoning_content && !column.model.startsWith("agent:")) { // the steps of an agent have its reasoning
                m.thoughts = (m.thoughts ?? "") + reasoning_content;
                m.reasoned = !column.model.startsWith("team:");
            }
            if (content) {
                m.content += content;
                add_tokens(m, tokens, decoder);
            }
            if (content || step || (reasoning_content && m.reasoned)) {
                last = performance.now();
                first ||= last;
                m.stats.n = (m.stats.n ?? 0) + tokens.length;
            }
            update_speed(m, start, first, last);
            m.node?.paint();
        }
        m.stats.n = usage?.completion_tokens ?? m.stats.n;
        update_speed(m, start, first, last);
    } catch (e) {
        if (e.name === "AbortError") m.stats.finish = "stopped";
        else m.error = e.message ?? String(e);
        if (e.status === 401 || e.status === 403) show_error(e);
    }
    m.live = false;
    m.node?.paint();
    store_state();
}

/** Tokens per second after the first token, whose time is that of the prefill. */
function update_speed(m, start, first, last) {
    if (!first) return;
    m.stats.first = (first - start) / 1000;
    if (m.stats.n > 1 && last > first) m.stats.speed = (m.stats.n - 1) / ((last - first) / 1000);
}

async function send(text) {
    const controller = (running = new AbortController());
    const shown = state.columns.slice(0, state.two ? 2 : 1);
    const replies = shown.map((column) => {
        const m = { role: "assistant", content: "", tokens: [], stats: {}, live: true };
        column.messages.push({ role: "user", content: text }, m);
        return [column, m];
    });
    store_state();
    repaint();
    await Promise.all(replies.map(([column, m]) => reply(column, m, controller.signal)));
    if (running !== controller) return; // a later message is in progress
    running = null;
    repaint(false);
}

/* ratings and corrections */

/** Complete replies since the start of the server can be rated. */
const can_be_rated = (m) => ratable_since !== null && m.id && !m.live && !m.error && m.stats?.finish !== "stopped" && m.at >= ratable_since;

async function send_feedback(m, feedback) {
    try {
        await json("/v1/feedback", { body: { id: m.id, ...feedback } });
        Object.assign(m, feedback);
        store_state();
    } catch (e) {
        show_error(e);
    }
    m.node?.paint();
}

/** Opens a dialog for a corrected text of the reply. */
function open_correction(m) {
    const field = h("textarea", { rows: 6, required: true, value: m.correction ?? m.content });
    const close = () => dialog.close();
    const dialog = h("dialog", { class: "correction", "aria-label": t("correct"), onclose: () => dialog.remove() },
        h("form", { onsubmit: (e) => {
            e.preventDefault();
            close();
            send_feedback(m, { correction: field.value });
        } }, labelled(t("correction"), field, t("correction_hint")), h("div", { class: "row" }, h("span", { class: "space" }),
            h("button", { type: "button", onclick: close }, t("dismiss")), h("button", { type: "submit", class: "main" }, t("save")))));
    document.body.append(dialog);
    dialog.showModal();
    field.focus();
}

// A path, because not every machine has a font with thumbs.
const THUMB = "M1.5 7h2.5v7H1.5zM5.5 7.2 8.3 1.5c1.3 0 1.9.9 1.6 2.1L9.2 6.3h4c.9 0 1.4.7 1.2 1.5l-1.3 5c-.2.7-.7 1.2-1.5 1.2H5.5z";

function rating_node(m) {
    const thumb = (rating, label) => h("button", {
        type: "button", "aria-label": t(label), title: t(label), "aria-pressed": String(m.rating === rating), onclick: () => send_feedback(m, { rating }),
    }, svg("svg", { viewBox: "0 0 16 16", class: "thumb", "aria-hidden": "true" }, svg("path", { d: THUMB, transform: rating < 0 ? "rotate(180 8 8)" : null })));
    return h("span", { class: "rating", role: "group", "aria-label": t("rating") }, thumb(1, "good"), thumb(-1, "bad"),
        h("button", { type: "button", "aria-pressed": String(!!m.correction), onclick: () => open_correction(m) }, t(m.correction ? "corrected" : "correct")));
}

/* display */

function alternatives(token) {
    const selected = (o) => o[1] === token[1], best = token[2];
    // The sampled token may not be among the most probable ones.
    const all = best.some(selected) ? best : [...best, [token[0], token[1]]];
    return bar_table(all.map((o) => ({ text: visible(o[0]), p: Math.exp(o[1]), selected: selected(o) })));
}
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

/** The text of a reply with a span per token. Where tokens and text differ, the text is shown. */
class ReplyText {
    constructor() {
        this.n_chars = this.n_tokens = 0; // of the text that has spans
        this.current = -1;
        this.rest = document.createTextNode("");
        this.element = h("div", {
            class: "reply-text", onpointerover: (e) => this.show_alternatives(e.target), onpointerleave: () => tooltip.hide(),
            onkeydown: (e) => this.on_key(e), onblur: () => tooltip.hide(),
        }, this.rest);
    }
    paint(m) {
        for (; this.n_tokens < (m.tokens?.length ?? 0); this.n_tokens++) {
            const text = m.tokens[this.n_tokens][0];
            if (!text || !m.content.startsWith(text, this.n_chars)) continue;
            const span = h("span", { class: "token", "data-token": this.n_tokens }, text);
            const p = Math.exp(m.tokens[this.n_tokens][1]);
            if (p < 0.5) span.classList.add(p < 0.1 ? "very-unlikely" : "unlikely");
            this.rest.before(span);
            this.n_chars += text.length;
        }
        this.rest.data = m.content.slice(this.n_chars);
        this.message = m;
        if (this.n_chars) this.element.tabIndex = 0;
    }
    show_alternatives(span) {
        if (span.dataset?.token === undefined) return tooltip.hide();
        this.element.querySelector(".active")?.classList.remove("active");
        span.classList.add("active");
        tooltip.show(span, alternatives(this.message.tokens[span.dataset.token]));
        return undefined;
    }
    on_key(e) {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key], spans = this.element.querySelectorAll(".token");
        if (!step || !spans.length) return;
        this.current = Math.max(0, Math.min(spans.length - 1, this.current + step));
        this.show_alternatives(spans[this.current]);
        this.element.setAttribute("aria-describedby", "tip");
        e.preventDefault();
    }
}

function message_node(m) {
    if (m.role === "user") return h("article", { class: "user" }, m.content);
    const text = new ReplyText(), footer = h("footer"), turns = h("pre");
    const summary = h("summary"), steps = new Steps(), thoughts = h("details", { class: "team-turns" }, summary, turns);
    const node = h("article", { class: "reply" }, thoughts, steps.element, text.element, footer);
    node.paint = () => {
        const follow = node.parentNode && near_end(node.parentNode);
        thoughts.hidden = !m.thoughts;
        summary.textContent = t(m.reasoned ? "reasoning" : "turns");
        if (turns.textContent !== (m.thoughts ?? "")) turns.textContent = m.thoughts ?? "";
        steps.paint(m);
        text.paint(m);
        node.setAttribute("aria-busy", String(!!m.live));
        node.classList.toggle("live", !!m.live);
        const focused = footer.contains(document.activeElement) && [...footer.querySelectorAll("button")].indexOf(document.activeElement);
        fill(footer, h("span", null, stats_of(m)), m.arm && h("span", { class: "tag", title: t("variant_of_reply") }, m.arm), can_be_rated(m) && rating_node(m), m.error && h("p", { class: "error", role: "alert" }, m.error));
        if (focused !== false) footer.querySelectorAll("button")[focused]?.focus();
        if (follow) node.parentNode.scrollTop = node.parentNode.scrollHeight;
    };
    m.node = node;
    node.paint();
    return node;
}

const near_end = (e) => e.scrollHeight - e.scrollTop - e.clientHeight < 80;

function stats_of(m) {
    const s = m.stats ?? {}, parts = [];
    if (s.n) parts.push(t("n_tokens", number(s.n)));
    if (s.speed) parts.push(t("tokens_per_second", number(s.speed)));
    if (s.first) parts.push(t("time_to_first_token", seconds(s.first)));
    if (s.finish && s.finish !== "stop") parts.push(t("finish_" + s.finish) ?? s.finish);
    return parts.join(" · ");
}

/** Selects a model: base, adapter, team, agent, or a weighted sum of adapters as text. */
function model_picker(column, label) {
    const mix = h("input", {
        placeholder: "a*0.7+b*0.3", "aria-label": t("mix"), value: column.model, spellcheck: "false",
        onchange: () => ((column.model = mix.value.trim()), store_state()),
    });
    const select = h("select", {
        "aria-label": label, onchange: () => {
            mix.hidden = select.value !== "*";
            column.model = mix.hidden ? select.value : mix.value.trim();
            if (!mix.hidden) mix.focus();
            store_state();
        },
    });
    const group = (text, list) => list.length > 0 &&
        h("optgroup", { label: text }, list.map((m) => option(m.id, m.id, column.model)));
    const all = [...available.base, ...available.adapters, ...available.teams, ...available.agents];
    if (!column.model && all.length) column.model = all[0].id;
    const is_mix = !!column.model && !all.some((m) => m.id === column.model);
    fill(select, group(t("base"), available.base), group(t("adapters"), available.adapters),
        group(t("teams"), available.teams), group(t("tool_agents"), available.agents), option("*", t("enter_mix"), is_mix ? "*" : ""));
    mix.hidden = !is_mix;
    if (is_mix) mix.value = column.model;
    return h("div", { class: "picker" }, select, mix);
}

function column_node(column, i) {
    const log = h("div", { class: "log", role: "log", "aria-label": t("conversation") },
        column.messages.length ? column.messages.map(message_node) : h("p", { class: "muted" }, t("chat_empty")));
    log.addEventListener("scroll", () => tooltip.hide(), { passive: true });
    queueMicrotask(() => (log.scrollTop = log.scrollHeight));
    const label = state.two ? `${t("model")} ${i + 1}` : t("model");
    return h("section", { class: "column", "aria-label": label }, model_picker(column, label), log);
}

function settings_node() {
    const s = state.settings;
    const number_field = ({ name, ...limits }) => labelled(t(name), h("input", {
        type: "number", ...limits, step: "any", value: s[name] ?? "", placeholder: t("default"),
        onchange: (e) => {
            s[name] = e.target.value === "" ? undefined : Number(e.target.value);
            store_state();
        },
    }));
    return h("details", { class: "panel", open: load("chat_open", false), ontoggle: (e) => save("chat_open", e.target.open) },
        h("summary", null, t("sampling")),
        h("div", { class: "grid" }, sampling_fields.map(number_field)),
        labelled(t("system_prompt"), h("textarea", {
            rows: 2, value: s.system ?? "", onchange: (e) => ((s.system = e.target.value), store_state()),
        })));
}

export function open(root, path) {
    if (path) {
        state.columns[0].model = path;
        history.replaceState(null, "", "#/chat");
    }
    const columns = h("div", { class: "columns" });
    const message = h("textarea", {
        rows: 2, "data-focus": true, "aria-label": t("message"), placeholder: t("message"), enterkeyhint: "send",
        onkeydown: (e) => {
            // Enter also confirms a composition of an input method.
            if (e.key !== "Enter" || e.shiftKey || e.isComposing || e.keyCode === 229) return;
            e.preventDefault();
            form.requestSubmit();
        },
    });
    const submit = h("button", { class: "main", type: "submit" });
    const two = h("input", {
        type: "checkbox", checked: state.two, onchange: () => ((state.two = two.checked), store_state(), repaint()),
    });
    const form = h("form", {
        class: "composer", onsubmit: (e) => {
            e.preventDefault();
            if (running && !running.signal.aborted) return running.abort();
            const text = message.value.trim();
            if (!text) return message.focus();
            message.value = "";
            return send(text);
        },
    }, settings_node(), message, h("div", { class: "row" }, h("label", { class: "check" }, two, t("side_by_side")),
        h("button", { type: "button", onclick: () => start_over() }, t("new_chat")), h("span", { class: "space" }), submit));
    const start_over = () => {
        running?.abort();
        for (const c of state.columns) c.messages = [];
        store_state();
        repaint();
        message.focus();
    };
    repaint = (all = true) => {
        submit.textContent = t(running ? "stop" : "send");
        columns.classList.toggle("two", state.two);
        if (all) fill(columns, state.columns.slice(0, state.two ? 2 : 1).map(column_node));
    };
    fill(root, columns, form);
    repaint();
    models().then((m) => {
        available = m;
        if (root.contains(form)) repaint();
    }).catch(show_error);
    json("/v1/system").then((v) => {
        ratable_since = v.feedback ? v.started : null;
        state.columns.forEach((c) => c.messages.forEach((m) => m.node?.paint?.()));
    }).catch(show_error);
    return () => {
        document.querySelector(".correction")?.close();
        repaint = () => {};
        state.columns.forEach((c) => c.messages.forEach((m) => delete m.node));
    };
}
