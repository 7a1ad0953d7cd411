// A debate as a LangGraph graph: two agents answer, read each other, answer again, and all four
// answers vote. The same protocol in plain loops over the same server must come to the same.
import {Annotation, END, START, StateGraph} from "@langchain/langgraph";
import {ChatOpenAI} from "@langchain/openai";

import {assert, check, json, url, user} from "./lib.mjs";

const items = ["2587 - 9 = ?", "7325減6等於?", "41 + 8 = ?", "906 + 5 = ?", "1200 - 3 = ?", "77 + 6 = ?"];
const agents = ["a", "b"], rounds = 2, limits = {
    temperature: 0,
    seed: 1
};

const asked = (question, other) =>
    (other === undefined ? question : `${question}\nanother says: ${other}\n${question}`);
/** What follows the last "answer:", without blanks. */
const answerOf = (text) => (text.split("answer:").length > 1 ? text.split("answer:").at(-1).replace(/\s/g, "") : "");
/** The most frequent of the answers that are any; of equals the earliest. */
function vote(answers) {
    const given = answers.filter((x) => x !== "");
    const count = (x) => given.filter((y) => y === x).length;
    return given.reduce((best, x) => (best === undefined || count(x) > count(best) ? x : best), undefined);
}

function debateGraph() {
    const State = Annotation.Root({
        question: Annotation(),
        texts: Annotation({reducer: (old, more) => ({...old, ...more}), default: () => ({})}),
        verdict: Annotation(),
    });
    const graph = new StateGraph(State);
    const node = (agent, round) => `${agent}_${round}`;
    for (const [i, agent] of agents.entries()) {
        const model = new ChatOpenAI({
            model: agent,
            apiKey: "none",
            maxTokens: 40,
            maxRetries: 0,
            timeout: 30000,
            temperature: limits.temperature,
            modelKwargs: {seed: limits.seed},
            configuration: {baseURL: `${url}/v1`}
        });
        for (let round = 0; round < rounds; round++)
            graph.addNode(node(agent, round), async ({question, texts}) => {
                const reply = await model.invoke(asked(question, texts[node(agents[1 - i], round - 1)]));
                return {texts: {[node(agent, round)]: reply.content}};
            });
    }
    const order = Array.from({length: rounds}, (_, r) => agents.map((agent) => node(agent, r)));
    graph.addNode("vote", ({texts}) => ({verdict: vote(order.flat().map((n) => answerOf(texts[n])))}));
    for (const first of order[0])
        graph.addEdge(START, first);
    for (const next of order[1])
        graph.addEdge(order[0], next);
    return graph.addEdge(order[1], "vote").addEdge("vote", END).compile();
}

async function debateLoops(question) {
    const say = async (model, content) =>
        (await json("/v1/chat/completions", {model, messages: user(content), max_tokens: 40, ...limits}))
            .choices[0]
            .message.content;
    const texts = [];
    for (let round = 0; round < rounds; round++) {
        const before = texts.at(-1) ?? [];
        texts.push([await say("a", asked(question, before[1])), await say("b", asked(question, before[0]))]);
    }
    return {texts, verdict: vote(texts.flat().map(answerOf))};
}

await check("a debate as a graph comes to what plain loops come to", async () => {
    const graph = debateGraph();
    const drawn = await Promise.all(items.map((question) => graph.invoke({question})));
    let moved = 0;
    for (const [i, question] of items.entries()) {
        const plain = await debateLoops(question);
        assert.equal(drawn[i].verdict, plain.verdict);
        assert.match(drawn[i].verdict, /\d/);
        assert.deepEqual([0, 1].map((r) => agents.map((a) => drawn[i].texts[`${a}_${r}`])), plain.texts);
        moved += plain.texts[0].some((t, k) => t !== plain.texts[1][k]);
    }
    assert.ok(moved > 0, "nobody is moved by what the other says: the second round tests nothing");
});

await check("a graph streams what its nodes say, as they say it", async () => {
    const seen = [];
    for await (const update of await debateGraph().stream({question: items[0]}, {streamMode: "updates"}))
        seen.push(...Object.keys(update));
    assert.deepEqual(seen.slice(0, 2).sort(), ["a_0", "b_0"]);
    assert.equal(seen.at(-1), "vote");
    assert.equal(seen.length, agents.length * rounds + 1);
});
