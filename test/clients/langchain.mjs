// LangChain's chat model on the server, in its typical uses.
import {AIMessage, HumanMessage, SystemMessage, ToolMessage} from "@langchain/core/messages";
import {StringOutputParser} from "@langchain/core/output_parsers";
import {ChatPromptTemplate} from "@langchain/core/prompts";
import {tool} from "@langchain/core/tools";
import {ChatOpenAI, OpenAIEmbeddings} from "@langchain/openai";
import {z} from "zod";

import {assert, check, json, narrowUrl, url, user} from "./lib.mjs";

const model = (name, more = {}, root = url) => new ChatOpenAI({
    model: name,
    apiKey: "none",
    temperature: 0,
    maxTokens: 60,
    maxRetries: 0,
    timeout: 30000,
    configuration: {baseURL: `${root}/v1`},
    ...more
});
const question = "2587 - 9 = ?";
const direct = async (name, messages) =>
    (await json("/v1/chat/completions", {model: name, messages, temperature: 0, max_tokens: 60}))
        .choices[0]
        .message.content;

await check("invoke", async () => {
    const r = await model("a").invoke([new SystemMessage("answer"), new HumanMessage(question)]);
    assert.equal(r.content, await direct("a", [{role: "system", content: "answer"}, ...user(question)]));
    assert.equal(r.response_metadata.finish_reason, "stop");
    assert.equal(r.usage_metadata.total_tokens, r.usage_metadata.input_tokens + r.usage_metadata.output_tokens);
});

await check("stream", async () => {
    let text = "", usage;
    for await (const c of await model("b").stream(question)) {
        text += c.content;
        usage = c.usage_metadata ?? usage;
    }
    assert.equal(text, await direct("b", user(question)));
    assert.ok(usage.output_tokens > 2);
});

await check("a chain, in a batch of two", async () => {
    const chain =
        ChatPromptTemplate.fromTemplate("order down: {letters}").pipe(model("a")).pipe(new StringOutputParser());
    const got = await chain.batch([{letters: "b y g"}, {letters: "y t d x"}]);
    assert.deepEqual(got,
                     [await direct("a", user("order down: b y g")), await direct("a", user("order down: y t d x"))]);
});

const add = tool(({x, y}) => x + y, {
    name: "add",
    description: "adds two numbers",
    schema: z.object({x: z.number().int().min(0).max(9999), y: z.number().int().min(0).max(9999)})
});

await check("bound tools: forced, by name, and the conversation that follows", async () => {
    for (const tool_choice of ["any", "add"]) {
        const said = await model("a", {maxTokens: 120}).bindTools([add], {tool_choice}).invoke(question);
        assert.equal(said.tool_calls.length, 1, JSON.stringify(said));
        const [call] = said.tool_calls;
        assert.equal(call.name, "add");
        const result = await add.invoke(call);
        assert.ok(result instanceof ToolMessage);
        assert.equal(result.content, String(call.args.x + call.args.y));
        const last = await model("a").invoke([new HumanMessage(question), said, result]);
        assert.ok(last instanceof AIMessage && last.content.length > 0);
    }
    let all;
    for await (const c of await model("a", {maxTokens: 120}).bindTools([add], {tool_choice: "any"}).stream(question))
        all = all ? all.concat(c) : c;
    assert.equal(all.tool_calls.length, 1);
    assert.ok(Number.isInteger(all.tool_calls[0].args.x));
});

await check("bound tools: the model's own choice", async () => {
    const text =
        "<tool_call>{\"name\": \"add\", \"arguments\": {\"x\": 2, \"y\": 3}}</tool_call>"; // it has not learned to call
    const bound = (more) => model("fry-tools", {maxTokens: 100, ...more}, narrowUrl).bindTools([add]);
    const said = await bound({modelKwargs: {guided_choice: [text]}}).invoke(question);
    assert.deepEqual(said.tool_calls.map((c) => [c.name, c.args]), [["add", {x: 2, y: 3}]]);
    const last = await bound().invoke([new HumanMessage(question), said, await add.invoke(said.tool_calls[0])]);
    assert.ok(last instanceof AIMessage);
});

await check("structured output", async () => {
    const shape = z.object({answer: z.number().int().min(0).max(99999), sure: z.boolean()});
    for (const method of ["jsonSchema", "functionCalling"]) {
        const got =
            await model("b", {maxTokens: 120}).withStructuredOutput(shape, {method, name: "reply"}).invoke(question);
        assert.deepEqual(got, shape.parse(got));
    }
});

await check("embeddings", async () => {
    const e = new OpenAIEmbeddings({model: "a", apiKey: "none", maxRetries: 0, configuration: {baseURL: `${url}/v1`}});
    const [one, two] = await e.embedDocuments(["春は", "spring"]);
    assert.deepEqual(await e.embedQuery("春は"), one);
    assert.notDeepEqual(one, two);
});
