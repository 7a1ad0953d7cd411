// Chat: one model, or two side by side that get the same words.
import { ApiError, events, json, models } from "./api.js";
import { bars, complain, fill, h, labelled, load, number, option, save, seconds, svg, tip } from "./dom.js";
import { t } from "./words.js";

const TOP = 5; // alternatives of a token that are asked for
const fields = [ // of a request; empty: the server's own
    { name: "temperature", min: 0, max: 100, step: 0.05 },
    { name: "top_p", min: 0, max: 1, step: 0.05 },
    { name: "max_tokens", min: 1, step: 1 },
    { name: "seed", step: 1 },
];

/*
 * columns: [{model, messages}], of which the second is shown when `two`. A message is {role,
 * content} and, of a reply, thoughts, tokens [[text, logprob, [[text, logprob], …]], …], stats
 * {first, speed, n, finish} and error; id, at and arm (its side of an experiment) as the server
 * said; and what a person said of it: rating, correction. `node` and `live` are the screen's and
 * are not kept.
 */
const blank = { columns: [{ model: "", messages: [] }, { model: "", messages: [] }], two: false, settings: {} };
const state = { ...blank, ...load("chat", {}) };
let known = { base: [], adapters: [], teams: [] };
let takes = null; // since when replies can be rated, in seconds; null: they cannot
let running = null; // AbortController of the replies under way
let repaint = () => {};

function keep(tokens = true) {
    const columns = state.columns.map((c) => ({
        model: c.model,
        messages: c.messages.map(({ live, node, ...m }) => (tokens ? m : { ...m, tokens: undefined })),
    }));
    if (!save("chat", { ...state, columns }) && tokens) keep(false); // probabilities are what takes room
}

/* a reply */

/** The tokens of a chunk; a character that several make belongs to the last of them. */
function tokens_add(m, list, decoder) {
    const text = (bytes) => new TextDecoder().decode(new Uint8Array(bytes));
    for (const c of list)
        m.tokens.push([
            decoder.decode(new Uint8Array(c.bytes ?? []), { stream: true }), c.logprob,
            c.top_logprobs.map((o) => [o.bytes?.length ? text(o.bytes) : o.token, o.logprob]),
        ]);
}

function request_of(column) {
    const body = { model: column.model, messages: [], stream: true, stream_options: { include_usage: true } };
    for (const { name } of fields)
        if (state.settings[name] !== undefined) body[name] = state.settings[name];
    if (state.settings.system) body.messages.push({ role: "system", content: state.settings.system });
    // A question that got no answer is not asked again with the next one.
    column.messages.slice(0, -1).forEach((m, i, all) => {
        if (m.role === "user" ? i + 1 === all.length || all[i + 1].content : m.content)
            body.messages.push({ role: m.role, content: m.content });
    });
    if (column.model.startsWith("team:")) body.include_reasoning = true;
    else Object.assign(body, { logprobs: true, top_logprobs: TOP });
    return body;
}

async function reply(column, m, signal) {
    const began = performance.now(), decoder = new TextDecoder();
    let first = 0, last = 0, usage = null;
    try {
        const opened = (r) => (m.arm = r.headers.get("X-Shoal-AB") ?? undefined);
        for await (const e of events("/v1/chat/completions", { body: request_of(column), signal, opened })) {
            if (e.data === "[DONE]") break;
            const v = JSON.parse(e.data), choice = v.choices?.[0];
            if (v.error) throw new ApiError(500, v.error.message);
            if (v.id) [m.id, m.at] = [v.id, v.created];
            if (v.usage) usage = v.usage;
            if (choice?.finish_reason) m.stats.finish = choice.finish_reason;
            if (choice?.delta?.reasoning_content) m.thoughts = (m.thoughts ?? "") + choice.delta.reasoning_content;
            if (choice?.delta?.content) {
                last = performance.now();
                first ||= last;
                m.content += choice.delta.content;
                tokens_add(m, choice.logprobs?.content ?? [], decoder);
                m.stats.n = m.tokens.length;
            }
            speed_take(m, began, first, last);
            m.node?.paint();
        }
        m.stats.n = usage?.completion_tokens ?? m.stats.n;
        speed_take(m, began, first, last);
    } catch (e) {
        if (e.name === "AbortError") m.stats.finish = "stopped";
        else m.error = e.message ?? String(e);
        if (e.status === 401 || e.status === 403) complain(e);
    }
    m.live = false;
    m.node?.paint();
    keep();
}

/** Speed is of what comes after the first token, which waited for the prompt. */
function speed_take(m, began, first, last) {
    if (!first) return;
    m.stats.first = (first - began) / 1000;
    if (m.stats.n > 1 && last > first) m.stats.speed = (m.stats.n - 1) / ((last - first) / 1000);
}

async function send(words) {
    const own = (running = new AbortController());
    const shown = state.columns.slice(0, state.two ? 2 : 1);
    const replies = shown.map((column) => {
        const m = { role: "assistant", content: "", tokens: [], stats: {}, live: true };
        column.messages.push({ role: "user", content: words }, m);
        return [column, m];
    });
    keep();
    repaint();
    await Promise.all(replies.map(([column, m]) => reply(column, m, own.signal)));
    if (running !== own) return; // another one has begun
    running = null;
    repaint(false);
}

/* what a person says of a reply */

/** Of what came whole, since the server began. */
const can_be_rated = (m) => takes !== null && m.id && !m.live && !m.error && m.stats?.finish !== "stopped" && m.at >= takes;

async function rate(m, said) {
    try {
        await json("/v1/feedback", { body: { id: m.id, ...said } });
        Object.assign(m, said);
        keep();
    } catch (e) {
        complain(e);
    }
    m.node?.paint();
}

/** Words in place of the reply's; the dialog is gone with its answer. */
function correct(m) {
    const words = h("textarea", { rows: 6, required: true, value: m.correction ?? m.content });
    const close = () => dialog.close();
    const dialog = h("dialog", { class: "correction", "aria-label": t("correct"), onclose: () => dialog.remove() },
        h("form", { onsubmit: (e) => {
            e.preventDefault();
            close();
            rate(m, { correction: words.value });
        } }, labelled(t("correction"), words, t("correction_hint")), h("div", { class: "row" }, h("span", { class: "space" }),
            h("button", { type: "button", onclick: close }, t("dismiss")), h("button", { type: "submit", class: "main" }, t("save")))));
    document.body.append(dialog);
    dialog.showModal();
    words.focus();
}

// Drawn: not every machine has a font with thumbs.
const THUMB = "M1.5 7h2.5v7H1.5zM5.5 7.2 8.3 1.5c1.3 0 1.9.9 1.6 2.1L9.2 6.3h4c.9 0 1.4.7 1.2 1.5l-1.3 5c-.2.7-.7 1.2-1.5 1.2H5.5z";

function rating_node(m) {
    const thumb = (rating, label) => h("button", {
        type: "button", "aria-label": t(label), title: t(label), "aria-pressed": String(m.rating === rating), onclick: () => rate(m, { rating }),
    }, svg("svg", { viewBox: "0 0 16 16", class: "thumb", "aria-hidden": "true" }, svg("path", { d: THUMB, transform: rating < 0 ? "rotate(180 8 8)" : null })));
    return h("span", { class: "rating", role: "group", "aria-label": t("rating") }, thumb(1, "good"), thumb(-1, "bad"),
        h("button", { type: "button", "aria-pressed": String(!!m.correction), onclick: () => correct(m) }, t(m.correction ? "corrected" : "correct")));
}

/* what it looks like */

function alternatives(token) {
    const own = (o) => o[1] === token[1], best = token[2];
    // What was drawn may be none of the likeliest.
    const all = best.some(own) ? best : [...best, [token[0], token[1]]];
    return bars(all.map((o) => ({ text: visible(o[0]), p: Math.exp(o[1]), own: own(o) })));
}
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

/** The reply's text, a span for each token; where tokens and text part, the text is right. */
class Words {
    constructor() {
        this.at = this.told = 0; // characters and tokens that are shown
        this.current = -1;
        this.rest = document.createTextNode("");
        this.element = h("div", {
            class: "words", onpointerover: (e) => this.tell(e.target), onpointerleave: () => tip.hide(),
            onkeydown: (e) => this.key(e), onblur: () => tip.hide(),
        }, this.rest);
    }
    paint(m) {
        for (; this.told < (m.tokens?.length ?? 0); this.told++) {
            const text = m.tokens[this.told][0];
            if (!text || !m.content.startsWith(text, this.at)) continue;
            const span = h("span", { class: "token", "data-token": this.told }, text);
            const p = Math.exp(m.tokens[this.told][1]);
            if (p < 0.5) span.classList.add(p < 0.1 ? "rare" : "unsure");
            this.rest.before(span);
            this.at += text.length;
        }
        this.rest.data = m.content.slice(this.at);
        this.message = m;
        if (this.at) this.element.tabIndex = 0;
    }
    tell(span) {
        if (span.dataset?.token === undefined) return tip.hide();
        this.element.querySelector(".here")?.classList.remove("here");
        span.classList.add("here");
        tip.show(span, alternatives(this.message.tokens[span.dataset.token]));
        return undefined;
    }
    key(e) {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key], spans = this.element.querySelectorAll(".token");
        if (!step || !spans.length) return;
        this.current = Math.max(0, Math.min(spans.length - 1, this.current + step));
        this.tell(spans[this.current]);
        this.element.setAttribute("aria-describedby", "tip");
        e.preventDefault();
    }
}

function message_node(m) {
    if (m.role === "user") return h("article", { class: "user" }, m.content);
    const words = new Words(), below = h("footer"), turns = h("pre");
    const thoughts = h("details", { class: "thoughts" }, h("summary", null, t("turns")), turns);
    const node = h("article", { class: "reply" }, thoughts, words.element, below);
    node.paint = () => {
        const follow = node.parentNode && near_end(node.parentNode);
        thoughts.hidden = !m.thoughts;
        if (turns.textContent !== (m.thoughts ?? "")) turns.textContent = m.thoughts ?? "";
        words.paint(m);
        node.setAttribute("aria-busy", String(!!m.live));
        node.classList.toggle("live", !!m.live);
        const held = below.contains(document.activeElement) && [...below.querySelectorAll("button")].indexOf(document.activeElement);
        fill(below, h("span", null, stats_of(m)), m.arm && h("span", { class: "tag", title: t("arm") }, m.arm), can_be_rated(m) && rating_node(m), m.error && h("p", { class: "error", role: "alert" }, m.error));
        if (held !== false) below.querySelectorAll("button")[held]?.focus();
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
    if (s.speed) parts.push(t("per_second", number(s.speed)));
    if (s.first) parts.push(t("first_after", seconds(s.first)));
    if (s.finish && s.finish !== "stop") parts.push(t("finish_" + s.finish) ?? s.finish);
    return parts.join(" · ");
}

/** Whoever can be asked; a mix is written by hand. */
function picker(column, label) {
    const mix = h("input", {
        placeholder: "a*0.7+b*0.3", "aria-label": t("mix"), value: column.model, spellcheck: "false",
        onchange: () => ((column.model = mix.value.trim()), keep()),
    });
    const select = h("select", {
        "aria-label": label, onchange: () => {
            mix.hidden = select.value !== "*";
            column.model = mix.hidden ? select.value : mix.value.trim();
            if (!mix.hidden) mix.focus();
            keep();
        },
    });
    const group = (text, list) => list.length > 0 &&
        h("optgroup", { label: text }, list.map((m) => option(m.id, m.id, column.model)));
    const all = [...known.base, ...known.adapters, ...known.teams];
    if (!column.model && all.length) column.model = all[0].id;
    const by_hand = !!column.model && !all.some((m) => m.id === column.model);
    fill(select, group(t("base"), known.base), group(t("adapters"), known.adapters),
        group(t("teams"), known.teams), option("*", t("mix_by_hand"), by_hand ? "*" : ""));
    mix.hidden = !by_hand;
    if (by_hand) mix.value = column.model;
    return h("div", { class: "picker" }, select, mix);
}

function column_node(column, i) {
    const log = h("div", { class: "log", role: "log", "aria-label": t("conversation") },
        column.messages.length ? column.messages.map(message_node) : h("p", { class: "quiet" }, t("chat_empty")));
    log.addEventListener("scroll", () => tip.hide(), { passive: true });
    queueMicrotask(() => (log.scrollTop = log.scrollHeight));
    const label = state.two ? `${t("model")} ${i + 1}` : t("model");
    return h("section", { class: "column", "aria-label": label }, picker(column, label), log);
}

function settings_node() {
    const s = state.settings;
    const number_of = ({ name, ...limits }) => labelled(t(name), h("input", {
        type: "number", ...limits, step: "any", value: s[name] ?? "", placeholder: t("default"),
        onchange: (e) => {
            s[name] = e.target.value === "" ? undefined : Number(e.target.value);
            keep();
        },
    }));
    return h("details", { class: "panel", open: load("chat_open", false), ontoggle: (e) => save("chat_open", e.target.open) },
        h("summary", null, t("sampling")),
        h("div", { class: "grid" }, fields.map(number_of)),
        labelled(t("system_prompt"), h("textarea", {
            rows: 2, value: s.system ?? "", onchange: (e) => ((s.system = e.target.value), keep()),
        })));
}

export function open(root, path) {
    if (path) {
        state.columns[0].model = path;
        history.replaceState(null, "", "#/chat");
    }
    const columns = h("div", { class: "columns" });
    const words = h("textarea", {
        rows: 2, "data-focus": true, "aria-label": t("message"), placeholder: t("message"), enterkeyhint: "send",
        onkeydown: (e) => {
            // Enter also ends a word that is being composed.
            if (e.key !== "Enter" || e.shiftKey || e.isComposing || e.keyCode === 229) return;
            e.preventDefault();
            form.requestSubmit();
        },
    });
    const go = h("button", { class: "main", type: "submit" });
    const two = h("input", {
        type: "checkbox", checked: state.two, onchange: () => ((state.two = two.checked), keep(), repaint()),
    });
    const form = h("form", {
        class: "composer", onsubmit: (e) => {
            e.preventDefault();
            if (running && !running.signal.aborted) return running.abort();
            const text = words.value.trim();
            if (!text) return words.focus();
            words.value = "";
            return send(text);
        },
    }, settings_node(), words, h("div", { class: "row" }, h("label", { class: "check" }, two, t("side_by_side")),
        h("button", { type: "button", onclick: () => forget() }, t("new_chat")), h("span", { class: "space" }), go));
    const forget = () => {
        running?.abort();
        for (const c of state.columns) c.messages = [];
        keep();
        repaint();
        words.focus();
    };
    repaint = (all = true) => {
        go.textContent = t(running ? "stop" : "send");
        columns.classList.toggle("two", state.two);
        if (all) fill(columns, state.columns.slice(0, state.two ? 2 : 1).map(column_node));
    };
    fill(root, columns, form);
    repaint();
    models().then((m) => {
        known = m;
        if (root.contains(form)) repaint();
    }).catch(complain);
    json("/v1/system").then((v) => {
        takes = v.feedback ? v.started : null;
        state.columns.forEach((c) => c.messages.forEach((m) => m.node?.paint?.()));
    }).catch(complain);
    return () => {
        document.querySelector(".correction")?.close();
        repaint = () => {};
        state.columns.forEach((c) => c.messages.forEach((m) => delete m.node));
    };
}
