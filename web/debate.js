// Debate: a question to a team, and what is said, round by round, as it is spoken.
import { follow, models } from "./api.js";
import { complain, fill, h, labelled, option, percent, seconds } from "./dom.js";
import { t } from "./words.js";

// What was asked and answered, while the page lives.
const state = { team: "", question: "", choices: "", rounds: "", seed: "", asked: "", told: [], began: 0, took: 0 };
let running = null, shown = null; // the talk on the page

/** {answer: how many agents give it}. */
function heads(answers) {
    const count = {};
    for (const a of answers) if (a !== undefined) count[a] = (count[a] ?? 0) + 1;
    return count;
}

function utterance(u) {
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * (u.confidence ?? 0) + "%";
    return h("li", { class: "said" + (u.flip ? " flipped" : "") },
        h("header", null, h("b", null, u.name), u.truncated && h("small", null, t("truncated"))),
        u.text.trim() && h("p", null, u.text.trim()),
        u.failed && h("p", { class: "error" }, u.failed),
        u.answer !== undefined && h("footer", null,
            u.flip && [h("s", null, u.before), " → "], h("b", { class: "answer" }, u.answer),
            u.flip && h("span", { class: "tag" }, t("flip")),
            h("span", { class: "track", title: t("confidence") }, bar), h("small", null, percent(u.confidence))));
}

/** A debate under way: turns are added to their rounds, and above them stands how the vote is. */
class Talk {
    constructor(question) {
        this.votes = h("section", { class: "votes", "aria-live": "polite" });
        this.rounds = h("div", { role: "log", "aria-label": t("conversation") });
        this.quiet = h("p", { class: "quiet", role: "status" });
        this.element = h("div", null, h("h2", null, question), this.votes, this.rounds, this.quiet);
        this.first = {};
        this.last = {};
        this.lists = [];
    }
    take(event, v) {
        if (event === "turn") this.turn(v);
        else if (event === "vote" || event === "result") this.count(v, event === "result");
    }
    turn(u) {
        const list = (this.lists[u.round] ??= h("ul"));
        if (!list.isConnected && !list.parentNode) this.rounds.append(h("section", { class: "round" }, h("h3", null, t("round_n", u.round + 1)), list));
        list.append(utterance(u));
        if (u.answer === undefined) return;
        if (u.round === 0) this.first[u.name] = u.answer;
        this.last[u.name] = u.answer;
    }
    /** What counts, and beside it what a plain vote of the first round was. */
    count(r, over) {
        const most = Math.max(...Object.values(r.scores), 1e-9), first = heads(Object.values(this.first)), now = heads(Object.values(this.last));
        const row = ([answer, score]) => {
            const bar = h("div", { class: "bar" });
            bar.style.width = 100 * score / most + "%";
            return h("tr", { class: answer === r.answer && "own" }, h("td", null, answer), h("td", { class: "n" }, first[answer] ?? 0),
                h("td", { class: "n" }, now[answer] ?? 0), h("td", { class: "track" }, bar), h("td", { class: "n" }, score.toFixed(2)));
        };
        const column = (id) => h("th", { class: "n" }, t(id));
        fill(this.votes, h("h3", null, t("votes")),
            h("table", { class: "bars" }, h("thead", null, h("tr", null, h("th", null, t("answer")), column("first_votes"), column("votes_now"), h("th", null), column("score"))),
                h("tbody", null, Object.entries(r.scores).sort((a, b) => b[1] - a[1]).map(row))),
            over && h("p", { class: "decided" }, t("decided"), " ", h("b", { class: "answer" }, r.answer ?? "–"),
                h("small", null, ` ${t("ending")}: ${r.ending} · ${t("rounds")}: ${r.rounds} · ${seconds(state.took)}`)));
    }
    /** Whether more will come; what never came is said. */
    rest() {
        const over = state.told.some(([event]) => event === "result");
        this.quiet.textContent = running ? t("talking") : over ? "" : t("finish_stopped");
    }
}

function tell(event, v) {
    if (event === "result") state.took = (performance.now() - state.began) / 1000;
    state.told.push([event, v]);
    shown?.take(event, v);
}

async function ask() {
    const whole = (v) => (v === "" ? undefined : Number(v));
    const choices = state.choices.split("\n").map((c) => c.trim()).filter(Boolean);
    const body = {
        team: state.team.replace(/^team:/, ""), question: state.question.trim(), choices: choices.length ? choices : undefined,
        rounds: whole(state.rounds), seed: whole(state.seed),
    };
    running = new AbortController();
    Object.assign(state, { asked: body.question, told: [], began: performance.now() });
    open.paint();
    try {
        await follow("/v1/debate", { signal: running.signal, body }, tell);
    } catch (e) {
        complain(e);
    }
    running = null;
    open.paint(false);
}

export function open(root) {
    const bound = (name, tag, props) => h(tag, { ...props, value: state[name], oninput: (e) => (state[name] = e.target.value) });
    const team = h("select", { required: true, onchange: () => (state.team = team.value) });
    const go = h("button", { class: "main", type: "submit" });
    const result = h("div", { class: "talk" });
    /** `all`: another talk than before. */
    open.paint = (all = true) => {
        go.textContent = t(running ? "stop" : "debate_go");
        if (all) {
            shown = state.asked ? new Talk(state.asked) : null;
            state.told.forEach(([event, v]) => shown.take(event, v));
            fill(result, shown?.element);
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
    h("div", { class: "grid" }, labelled(t("team"), team),
        labelled(t("rounds"), bound("rounds", "input", { type: "number", min: 1, max: 64, placeholder: t("default") })),
        labelled(t("seed"), bound("seed", "input", { type: "number", min: 0, placeholder: "1" }))),
    labelled(t("question"), bound("question", "textarea", { rows: 2, required: true, "data-focus": true })),
    labelled(t("choices"), bound("choices", "textarea", { rows: 3, placeholder: t("choices_hint") })),
    h("div", { class: "row" }, go));
    fill(root, form, result);
    open.paint();
    models().then(({ teams }) => {
        state.team ||= teams[0]?.id ?? "";
        fill(team, teams.map((m) => option(m.id, m.id.slice(5), state.team)));
        if (!teams.length) form.before(h("p", { class: "quiet" }, t("no_teams")));
    }).catch(complain);
    return () => {
        shown = null;
        open.paint = () => {};
    };
}
