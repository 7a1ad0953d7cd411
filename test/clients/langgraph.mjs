// A debate driven by LangGraph, compared with the server's: the graph contains the protocol (which agents see which
// answers, when it ends, how answers are counted), the server generates the turns. Both must be equal, turn by turn:
// the same messages, and with the same seeds the same texts, answers, probabilities and votes.
import {Annotation, END, START, StateGraph} from "@langchain/langgraph";
import {ChatOpenAI} from "@langchain/openai";

import {assert, check, json, url} from "./lib.mjs";

// The team of test_clients.sh, and the prompts of the protocol "du" in English.
const agents = [{name: "a", system: "You look for what is wrong."}, {name: "b"}];
const rounds = 3;
const lead = "Other agents have worked on this question too. Their answers:";
const go = "Use what is right in them, look for what is wrong, and give your answer to the question again.";

const items = ["2587 - 9 = ?", "41 + 8 = ?", "906 + 5 = ?", "1200 - 3 = ?", "77 + 6 = ?", "pick the smallest of 4, 9, 2"];

/** What an agent is asked: the question, and from the second round on what the other said last. */
function messagesOf(agent, question, other) {
    const content = other === undefined ? question : `${question}\n\n${lead}\n\nAgent 1:\n${other || "(no answer)"}\n\n${go}`;
    return [...(agent.system ? [{role: "system", content: agent.system}] : []), {role: "user", content}];
}

/** What follows the last "answer:" of a line, and the probability of the tokens that say it. */
function answerOf(text, tokens) {
    const at = text.toLowerCase().lastIndexOf("answer:");
    if (at < 0) return null;
    const from = at + "answer:".length, answer = text.slice(from).match(/^[ \t]*([^\n]*?)[ \t\r.]*(\n|$)/)[1];
    if (!answer) return null;
    const bytes = (s) => Buffer.byteLength(s);
    const begin = bytes(text.slice(0, text.indexOf(answer, from))), end = begin + bytes(answer);
    let place = 0, sum = 0;
    for (const {logprob, bytes: {length}} of tokens) {
        if (place < end && place + length > begin) sum += logprob;
        place += length;
    }
    return {answer, confidence: Math.exp(sum)};
}

const same = (a, b) => a.replace(/\s/g, "").toLowerCase() === b.replace(/\s/g, "").toLowerCase();

/** The majority of the last round, of equals the more probable one: {answer, scores}. */
function vote(turns) {
    const candidates = [];
    for (const {answer} of turns)
        if (answer && !candidates.some((c) => same(c.answer, answer.answer))) candidates.push({answer: answer.answer, score: 0, mass: 0});
    for (const agent of agents) {
        const last = turns.filter((t) => t.agent === agent.name && t.answer).at(-1)?.answer;
        const c = last && candidates.find((one) => same(one.answer, last.answer));
        if (!c) continue;
        c.score += 1;
        c.mass += last.confidence;
    }
    const best = candidates.reduce((b, c) => (!b || c.score > b.score || (c.score === b.score && c.mass > b.mass) ? c : b), undefined);
    return {answer: best?.answer, scores: Object.fromEntries(candidates.map((c) => [c.answer, c.score]))};
}

/** `draws(agent, round)` gives a turn's temperature and seed. */
function debateGraph(draws) {
    const State = Annotation.Root({
        question: Annotation(),
        turns: Annotation({reducer: (old, more) => [...old, ...more], default: () => []}),
        verdict: Annotation(),
    });
    const graph = new StateGraph(State);
    const node = (agent, round) => `${agent.name}_${round}`;
    const order = Array.from({length: rounds}, (_, round) => agents.map((agent) => node(agent, round)));
    for (const [i, agent] of agents.entries())
        for (let round = 0; round < rounds; round++) {
            const {temperature, seed} = draws(agent, round);
            const model = new ChatOpenAI({
                model: agent.name,
                apiKey: "none",
                maxTokens: 40,
                maxRetries: 0,
                timeout: 30000,
                temperature,
                topP: 1,
                logprobs: true,
                modelKwargs: {seed, loop_tokens: 16},
                configuration: {baseURL: `${url}/v1`},
            });
            graph.addNode(node(agent, round), async ({question, turns}) => {
                const other = turns.find((t) => t.agent === agents[1 - i].name && t.round === round - 1);
                const messages = messagesOf(agent, question, other?.text);
                const reply = await model.invoke(messages);
                const tokens = reply.response_metadata.logprobs.content;
                return {turns: [{agent: agent.name, round, messages, text: reply.content, answer: answerOf(reply.content, tokens)}]};
            });
        }
    graph.addNode("vote", ({turns}) => ({verdict: vote([...turns].sort((x, y) => x.round - y.round || (x.agent < y.agent ? -1 : 1)))}));
    for (const first of order[0]) graph.addEdge(START, first);
    for (let round = 1; round < rounds; round++)
        for (const next of order[round]) graph.addEdge(order[round - 1], next);
    return graph.addEdge(order.at(-1), "vote").addEdge("vote", END).compile();
}

/** One question both ways; whether anybody was moved by the other. */
async function compared(question, temperature, seed) {
    const own = await json("/v1/debate", {team: "pair", question, rounds, seed, temperature, trace: true});
    const turnOf = (agent, round) => own.said.find((s) => s.name === agent.name && s.round === round);
    const drawn = await debateGraph((agent, round) => turnOf(agent, round).asked).invoke({question});
    assert.equal(own.said.length, agents.length * rounds);
    for (const agent of agents)
        for (let round = 0; round < rounds; round++) {
            const theirs = drawn.turns.find((t) => t.agent === agent.name && t.round === round), ours = turnOf(agent, round);
            assert.deepEqual(theirs.messages, ours.asked.messages);
            assert.equal(theirs.text, ours.text);
            assert.equal(theirs.answer?.answer, ours.answer);
            if (ours.answer) assert.ok(Math.abs(theirs.answer.confidence - ours.confidence) < 1e-5);
        }
    assert.equal(drawn.verdict.answer, own.answer);
    assert.deepEqual(drawn.verdict.scores, own.scores);
    return agents.some((agent) => turnOf(agent, 0).text !== turnOf(agent, 1).text);
}

for (const [how, temperature, seed] of [["greedy", 0, 1], ["drawn at temperature 0.8", 0.8, 1], ["drawn with another seed", 0.8, 2]])
    await check(`a debate as a graph equals the server's, turn by turn: ${how}`, async () => {
        const moved = await Promise.all(items.map((question) => compared(question, temperature, seed)));
        assert.ok(moved.some(Boolean), "nobody is moved by what the other says: later rounds test nothing");
    });

await check("seeds determine the samples", async () => {
    const said = async (seed) =>
        (await json("/v1/debate", {team: "pair", question: items[0], rounds: 1, temperature: 1.5, seed})).said.map((s) => s.text);
    assert.notDeepEqual(await said(1), await said(2));
});

await check("a graph streams the text of its nodes while they generate it", async () => {
    const seen = [];
    for await (const update of await debateGraph(() => ({temperature: 0, seed: 1})).stream({question: items[0]}, {streamMode: "updates"}))
        seen.push(...Object.keys(update));
    assert.deepEqual(seen.slice(0, 2).sort(), ["a_0", "b_0"]);
    assert.equal(seen.at(-1), "vote");
    assert.equal(seen.length, agents.length * rounds + 1);
});
