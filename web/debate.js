// Debate: a question to a team, and the agents' turns by round, shown as they arrive.
import { models, stream } from "./api.js";
import { fill, h, labelled, option, percent, seconds, show_error } from "./dom.js";
import { t } from "./words.js";

// Form fields and the last debate. They last until the page is reloaded.
const state = { team: "", question: "", choices: "", rounds: "", seed: "", asked: "", events: [], start: 0, duration: 0 };
let running = null; // AbortController of the debate in progress
let shown = null; // DebateView on the page

/** {answer: number of agents with this answer}. */
function count_votes(answers) {
    const count = {};
    for (const a of answers) if (a !== undefined) count[a] = (count[a] ?? 0) + 1;
    return count;
}

function turn_node(u) {
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * (u.confidence ?? 0) + "%";
    return h("li", { class: "turn" + (u.flip ? " flipped" : "") },
        h("header", null, h("b", null, u.name), u.truncated && h("small", null, t("truncated"))),
        u.text.trim() && h("p", null, u.text.trim()),
        u.failed && h("p", { class: "error" }, u.failed),
        u.answer !== undefined && h("footer", null,
            u.flip && [h("s", null, u.before), " → "], h("b", { class: "answer" }, u.answer),
            u.flip && h("span", { class: "tag" }, t("flip")),
            h("span", { class: "track", title: t("confidence") }, bar), h("small", null, percent(u.confidence))));
}

/** A debate: the turns by round, and the votes above them. */
class DebateView {
    constructor(question) {
        this.votes = h("section", { class: "votes", "aria-live": "polite" });
        this.rounds = h("div", { role: "log", "aria-label": t("conversation") });
        this.status = h("p", { class: "muted", role: "status" });
        this.element = h("div", null, h("h2", null, question), this.votes, this.rounds, this.status);
        this.first_answers = {};
        this.last_answers = {};
        this.turn_lists = []; // one per round
    }
    handle(event, v) {
        if (event === "turn") this.add_turn(v);
        else if (event === "vote" || event === "result") this.draw_votes(v, event === "result");
    }
    add_turn(u) {
        const list = (this.turn_lists[u.round] ??= h("ul"));
        if (!list.isConnected && !list.parentNode) this.rounds.append(h("section", { class: "round" }, h("h3", null, t("round_n", u.round + 1)), list));
        list.append(turn_node(u));
        if (u.answer === undefined) return;
        if (u.round === 0) this.first_answers[u.name] = u.answer;
        this.last_answers[u.name] = u.answer;
    }
    /** The weighted scores of the vote, next to the numbers of agents in round 1 and now. */
    draw_votes(r, final) {
        const max_score = Math.max(...Object.values(r.scores), 1e-9);
        const first = count_votes(Object.values(this.first_answers)), now = count_votes(Object.values(this.last_answers));
        const row = ([answer, score]) => {
            const bar = h("div", { class: "bar" });
            bar.style.width = 100 * score / max_score + "%";
            return h("tr", { class: answer === r.answer && "selected" }, h("td", null, answer), h("td", { class: "num" }, first[answer] ?? 0),
                h("td", { class: "num" }, now[answer] ?? 0), h("td", { class: "track" }, bar), h("td", { class: "num" }, score.toFixed(2)));
        };
        const column = (id) => h("th", { class: "num" }, t(id));
        fill(this.votes, h("h3", null, t("votes")),
            h("table", { class: "bars" }, h("thead", null, h("tr", null, h("th", null, t("answer")), column("first_votes"), column("current_votes"), h("th", null), column("score"))),
                h("tbody", null, Object.entries(r.scores).sort((a, b) => b[1] - a[1]).map(row))),
            final && h("p", { class: "decided" }, t("decision"), " ", h("b", { class: "answer" }, r.answer ?? "–"),
                h("small", null, ` ${t("ending")}: ${t("ending_" + r.ending)} · ${t("rounds")}: ${r.rounds} · ${seconds(state.duration)}`)));
    }
    /** Shows whether the debate is running, complete or stopped. */
    show_status() {
        const complete = state.events.some(([event]) => event === "result");
        this.status.textContent = running ? t("debate_running") : complete ? "" : t("finish_stopped");
    }
}

function on_event(event, v) {
    if (event === "result") state.duration = (performance.now() - state.start) / 1000;
    state.events.push([event, v]);
    shown?.handle(event, v);
}

async function ask() {
    const integer = (v) => (v === "" ? undefined : Number(v));
    const choices = state.choices.split("\n").map((c) => c.trim()).filter(Boolean);
    const body = {
        team: state.team.replace(/^team:/, ""), question: state.question.trim(), choices: choices.length ? choices : undefined,
        rounds: integer(state.rounds), seed: integer(state.seed),
    };
    running = new AbortController();
    Object.assign(state, { asked: body.question, events: [], start: performance.now() });
    open.paint();
    try {
        await stream("/v1/debate", { signal: running.signal, body }, on_event);
    } catch (e) {
        show_error(e);
    }
    running = null;
    open.paint(false);
}

export function open(root) {
    const bound_field = (name, tag, props) => h(tag, { ...props, value: state[name], oninput: (e) => (state[name] = e.target.value) });
    const team = h("select", { required: true, onchange: () => (state.team = team.value) });
    const submit = h("button", { class: "main", type: "submit" });
    const result = h("div", { class: "debate-result" });
    /** `all`: draws the debate again, not only the button and the status. */
    open.paint = (all = true) => {
        submit.textContent = t(running ? "stop" : "start_debate");
        if (all) {
            shown = state.asked ? new DebateView(state.asked) : null;
            state.events.forEach(([event, v]) => shown.handle(event, v));
            fill(result, shown?.element);
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
    h("div", { class: "grid" }, labelled(t("team"), team),
        labelled(t("rounds"), bound_field("rounds", "input", { type: "number", min: 1, max: 64, placeholder: t("default") })),
        labelled(t("seed"), bound_field("seed", "input", { type: "number", min: 0, placeholder: "1" }))),
    labelled(t("question"), bound_field("question", "textarea", { rows: 2, required: true, "data-focus": true })),
    labelled(t("choices"), bound_field("choices", "textarea", { rows: 3, placeholder: t("choices_hint") })),
    h("div", { class: "row" }, submit));
    fill(root, h("h1", null, t("view_debate")), form, result);
    open.paint();
    models().then(({ teams }) => {
        state.team ||= teams[0]?.id ?? "";
        fill(team, teams.map((m) => option(m.id, m.id.slice(5), state.team)));
        if (!teams.length) form.before(h("p", { class: "muted" }, t("no_teams")));
    }).catch(show_error);
    return () => {
        shown = null;
        open.paint = () => {};
    };
}
