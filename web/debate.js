// Debate: a question to a team, and what was said, round by round.
import { json, models } from "./api.js";
import { complain, fill, h, labelled, option, percent, seconds } from "./dom.js";
import { t } from "./words.js";

// What was asked and answered, while the page lives.
const state = { team: "", question: "", choices: "", rounds: "", seed: "", result: null, took: 0 };
let running = null;

/** {answer: how many agents gave it} of a round. */
function heads(said) {
    const count = {};
    for (const u of said) if (u.answer !== undefined) count[u.answer] = (count[u.answer] ?? 0) + 1;
    return count;
}

function utterance(u, before) {
    const flip = u.answer !== undefined && before !== undefined && before !== u.answer;
    const bar = h("div", { class: "bar" });
    bar.style.width = 100 * (u.confidence ?? 0) + "%";
    return h("li", { class: "said" + (flip ? " flipped" : "") },
        h("header", null, h("b", null, u.name), u.truncated && h("small", null, t("truncated"))),
        u.text.trim() && h("p", null, u.text.trim()),
        u.failed && h("p", { class: "error" }, u.failed),
        u.answer !== undefined && h("footer", null,
            flip && [h("s", null, before), " → "], h("b", { class: "answer" }, u.answer),
            flip && h("span", { class: "tag" }, t("flip")),
            h("span", { class: "track", title: t("confidence") }, bar), h("small", null, percent(u.confidence))));
}

function rounds_node(r) {
    const rounds = Map.groupBy ? Map.groupBy(r.said, (u) => u.round) : grouped(r.said);
    const last = {};
    return [...rounds].map(([n, said]) => h("section", { class: "round" },
        h("h3", null, t("round_n", n + 1)),
        h("ul", null, said.map((u) => {
            const line = utterance(u, last[u.name]);
            if (u.answer !== undefined) last[u.name] = u.answer;
            return line;
        }))));
}

function grouped(said) {
    const rounds = new Map();
    for (const u of said) rounds.set(u.round, [...(rounds.get(u.round) ?? []), u]);
    return rounds;
}

/** The end: what counted, and beside it what a plain vote of the first round was. */
function votes_node(r) {
    const most = Math.max(...Object.values(r.scores), 1e-9);
    const first = heads(r.said.filter((u) => u.round === 0));
    const row = ([answer, score]) => {
        const bar = h("div", { class: "bar" });
        bar.style.width = 100 * score / most + "%";
        return h("tr", { class: answer === r.answer && "own" }, h("td", null, answer),
            h("td", { class: "n" }, first[answer] ?? 0), h("td", { class: "track" }, bar), h("td", { class: "n" }, score.toFixed(2)));
    };
    return h("section", { class: "votes" },
        h("h3", null, t("votes")),
        h("table", { class: "bars" }, h("thead", null, h("tr", null, h("th", null, t("answer")),
            h("th", { class: "n" }, t("first_votes")), h("th", null), h("th", { class: "n" }, t("score")))),
            h("tbody", null, Object.entries(r.scores).sort((a, b) => b[1] - a[1]).map(row))),
        h("p", null, t("decided"), " ", h("b", { class: "answer" }, r.answer ?? "–"),
            h("small", null, ` ${t("ending")}: ${r.ending} · ${t("rounds")}: ${r.rounds} · ${seconds(state.took)}`)));
}

async function ask(paint) {
    const whole = (v) => (v === "" ? undefined : Number(v));
    const choices = state.choices.split("\n").map((c) => c.trim()).filter(Boolean);
    const began = performance.now();
    running = new AbortController();
    state.result = null;
    paint();
    try {
        state.result = await json("/v1/debate", {
            signal: running.signal, body: {
                team: state.team.replace(/^team:/, ""), question: state.question.trim(),
                choices: choices.length ? choices : undefined, rounds: whole(state.rounds), seed: whole(state.seed),
            },
        });
        state.took = (performance.now() - began) / 1000;
    } catch (e) {
        complain(e);
    }
    running = null;
}

export function open(root) {
    let here = true;
    const bound = (name, tag, props) => h(tag, { ...props, value: state[name], oninput: (e) => (state[name] = e.target.value) });
    const team = h("select", { required: true, onchange: () => (state.team = team.value) });
    const go = h("button", { class: "main", type: "submit" });
    const result = h("div", { class: "talk", "aria-live": "polite" });
    const paint = () => {
        if (!here) return;
        go.textContent = t(running ? "stop" : "debate_go");
        fill(result, running && h("p", { class: "quiet" }, t("talking")), state.result && [
            h("h2", null, state.result.question), rounds_node(state.result), votes_node(state.result)]);
    };
    const form = h("form", {
        class: "panel", onsubmit: (e) => {
            e.preventDefault();
            if (running) running.abort();
            else ask(paint).then(() => open.paint());
        },
    },
    h("div", { class: "grid" }, labelled(t("team"), team),
        labelled(t("rounds"), bound("rounds", "input", { type: "number", min: 1, max: 64, placeholder: t("default") })),
        labelled(t("seed"), bound("seed", "input", { type: "number", min: 0, placeholder: "1" }))),
    labelled(t("question"), bound("question", "textarea", { rows: 2, required: true, "data-focus": true })),
    labelled(t("choices"), bound("choices", "textarea", { rows: 3, placeholder: t("choices_hint") })),
    h("div", { class: "row" }, go));
    open.paint = paint;
    fill(root, form, result);
    paint();
    models().then(({ teams }) => {
        state.team ||= teams[0]?.id ?? "";
        fill(team, teams.map((m) => option(m.id, m.id.slice(5), state.team)));
        if (!teams.length) form.before(h("p", { class: "quiet" }, t("no_teams")));
    }).catch(complain);
    return () => (here = false);
}
