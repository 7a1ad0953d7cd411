// The openai package with the server.
import {execFileSync} from "node:child_process";
import OpenAI, {BadRequestError, NotFoundError} from "openai";
import {zodResponseFormat} from "openai/helpers/zod";
import {z} from "zod";

import {assert, check, http, narrowUrl, Skip, url, user} from "./lib.mjs";

const client = new OpenAI({baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 30000});
const narrow = new OpenAI({baseURL: `${narrowUrl}/v1`, apiKey: "none", maxRetries: 0, timeout: 30000});
const question = "2587 + 9 = ?";
const chat = (more = {}, at = client) =>
    at.chat.completions.create({model: "a", messages: user(question), temperature: 0, max_tokens: 40, ...more});
const words = async (more, at) => (await chat(more, at)).choices[0].message.content;
async function streamed(more, at) {
    const chunks = [];
    for await (const c of await chat({stream: true, ...more}, at))
        chunks.push(c);
    return chunks;
}
const joined = (chunks, index = 0) => chunks.flatMap((c) => c.choices)
                                          .filter((c) => c.index === index)
                                          .map((c) => c.delta?.content ?? c.text ?? "")
                                          .join("");

// chat

await check("chat", async () => {
    const r = await chat();
    assert.match(r.id, /^chatcmpl-\w+$/);
    assert.equal(r.object, "chat.completion");
    assert.equal(r.model, "a");
    assert.ok(Math.abs(r.created - Date.now() / 1000) < 120);
    assert.match(r.system_fingerprint, /^fp_/);
    const [c] = r.choices;
    assert.equal(c.finish_reason, "stop");
    assert.equal(c.message.role, "assistant");
    assert.match(c.message.content, /answer: ./);
    assert.equal(c.message.tool_calls, undefined);
    assert.equal(c.logprobs, null);
    assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
    assert.ok(r.usage.prompt_tokens > 5 && r.usage.completion_tokens > 2);
});

await check("parts, a developer's message, null content and unknown fields", async () => {
    const parts = [{type: "text", text: question.slice(0, 4)}, {type: "text", text: question.slice(4)}];
    assert.equal(await words({messages: user(parts)}), await words());
    assert.equal(await words({messages: [{role: "developer", content: "answer"}, ...user(question)]}),
                 await words({messages: [{role: "system", content: "answer"}, ...user(question)]}));
    await words({messages: [...user(question), {role: "assistant", content: null}, ...user(question)]});
    assert.equal(await words({store: false, metadata: {a: "b"}, service_tier: "auto", user: "me"}), await words());
});

await check("a stream has the text of the whole reply, and its usage", async () => {
    const whole = await chat();
    const chunks = await streamed({stream_options: {include_usage: true}});
    assert.equal(joined(chunks), whole.choices[0].message.content);
    assert.deepEqual(chunks[0].choices[0].delta, {role: "assistant", content: ""});
    assert.ok(chunks.every((c) => c.id === chunks[0].id && c.created === chunks[0].created));
    assert.ok(chunks.every((c) => c.object === "chat.completion.chunk"));
    assert.deepEqual(chunks.at(-2).choices[0].delta, {});
    assert.equal(chunks.at(-2).choices[0].finish_reason, "stop");
    assert.ok(chunks.slice(0, -1).every((c) => c.usage === null && c.choices.length === 1));
    assert.deepEqual(chunks.at(-1).choices, []);
    const counts =
        ({prompt_tokens, completion_tokens, total_tokens}) => [prompt_tokens, completion_tokens, total_tokens];
    assert.deepEqual(counts(chunks.at(-1).usage), counts(whole.usage));
    assert.ok((await streamed()).every((c) => c.usage == null));
});

await check("n answers, each sampled with its own seed", async () => {
    const hot = {temperature: 1.5, seed: 7};
    const many = await chat({...hot, n: 3});
    assert.deepEqual(many.choices.map((c) => c.index), [0, 1, 2]);
    const texts = many.choices.map((c) => c.message.content);
    assert.deepEqual(texts, (await chat({...hot, n: 3})).choices.map((c) => c.message.content));
    assert.ok(new Set(texts).size > 1);
    assert.equal(await words(hot), texts[0]);
    assert.equal(await words({...hot, seed: 9}), texts[2]);
    const chunks = await streamed({...hot, n: 3});
    assert.deepEqual([0, 1, 2].map((i) => joined(chunks, i)), texts);
    assert.ok(new Set((await chat({temperature: 1.5, n: 8})).choices.map((c) => c.message.content)).size > 1);
});

await check("stop texts and their possible beginnings are not sent", async () => {
    const free = await words();
    for (const stop of [free.slice(3, 6), [free.slice(5, 7), "never"], ["", free.slice(-3)]]) {
        const cut = Math.min(...[stop].flat().filter((s) => s && free.includes(s)).map((s) => free.indexOf(s)));
        const r = await chat({stop});
        assert.equal(r.choices[0].message.content, free.slice(0, cut));
        assert.equal(r.choices[0].finish_reason, "stop");
        assert.equal(joined(await streamed({stop})), free.slice(0, cut));
    }
    const r = await chat({max_completion_tokens: 2});
    assert.equal(r.choices[0].finish_reason, "length");
    assert.equal(r.usage.completion_tokens, 2);
});

// log-probabilities

const bytesOf = (content) => Buffer.from(content.flatMap((t) => t.bytes));

await check("log-probabilities: the most probable token is first and chosen at temperature 0", async () => {
    const [c] = (await chat({logprobs: true, top_logprobs: 5})).choices;
    assert.equal(bytesOf(c.logprobs.content).toString(), c.message.content);
    for (const t of c.logprobs.content) {
        assert.equal(t.top_logprobs.length, 5);
        assert.equal(t.top_logprobs[0].token, t.token);
        assert.equal(t.top_logprobs[0].logprob, t.logprob);
        assert.ok(t.logprob <= 0);
        t.top_logprobs.reduce((a, b) => (assert.ok(a.logprob >= b.logprob), b));
    }
    const chunks = await streamed({logprobs: true, top_logprobs: 5});
    const told = chunks.flatMap((k) => k.choices[0]?.logprobs?.content ?? []);
    assert.deepEqual(told.map((t) => [t.token, Math.fround(t.logprob)]),
                     c.logprobs.content.map((t) => [t.token, Math.fround(t.logprob)]));
});

await check("a token that is a piece of a character has its true bytes", async () => {
    const text = "日本語で答え😀です";
    const guided = {guided_choice: [text], logprobs: true, top_logprobs: 2};
    const [c] = (await chat(guided)).choices;
    assert.equal(c.message.content, text);
    assert.equal(bytesOf(c.logprobs.content).toString(), text);
    assert.ok(c.logprobs.content.some((t) => t.bytes.length < 3 && t.bytes[0] > 127), "no token is a piece");
    const chunks = await streamed(guided);
    assert.ok(chunks.every((k) => !JSON.stringify(k).includes("\uFFFD")));
    assert.equal(joined(chunks), text);
    assert.equal(bytesOf(chunks.flatMap((k) => k.choices[0]?.logprobs?.content ?? [])).toString(), text);
});

// tools

const object = (properties) =>
    ({type: "object", properties, required: Object.keys(properties), additionalProperties: false});
const add = {
    type: "function",
    function: {
        name: "add",
        description: "adds",
        strict: true,
        parameters:
            object({x: {type: "integer", minimum: 0, maximum: 9999}, y: {type: "integer", minimum: 0, maximum: 9999}})
    }
};
const say = {
    type: "function",
    function: {name: "say", parameters: object({text: {type: "string", maxLength: 12}})}
};
const named = (name) => ({type: "function", function: {name}});

function callChecked(call) {
    assert.match(call.id, /^call_\w+$/);
    assert.equal(call.type, "function");
    const args = JSON.parse(call.function.arguments);
    if (call.function.name === "add")
        assert.ok(Number.isInteger(args.x) && Number.isInteger(args.y));
    else
        assert.equal(typeof args.text, "string");
    return call.function.name;
}

await check("tools: a function by its name, and any", async () => {
    for (const [choice, wanted] of [[named("add"), /^add$/], [named("say"), /^say$/], ["required", /^(add|say)$/]]) {
        const [c] = (await chat({tools: [add, say], tool_choice: choice, max_tokens: 100})).choices;
        assert.equal(c.finish_reason, "tool_calls");
        assert.equal(c.message.content, null);
        assert.equal(c.message.tool_calls.length, 1);
        assert.match(callChecked(c.message.tool_calls[0]), wanted);
    }
    assert.equal(await words({tools: [add], tool_choice: "none"}), await words());
});

await check("tools: the client's helper assembles a streamed call", async () => {
    const ask = {tools: [add, say], tool_choice: named("say"), max_tokens: 100};
    const whole = (await chat(ask)).choices[0].message.tool_calls[0];
    const stream = client.chat.completions.stream({model: "a", messages: user(question), temperature: 0, ...ask});
    const done = [];
    stream.on("tool_calls.function.arguments.done", (e) => done.push(e));
    const {message, finish_reason} = (await stream.finalChatCompletion()).choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.equal(callChecked(message.tool_calls[0]), "say");
    assert.deepEqual(message.tool_calls[0].function.arguments, whole.function.arguments);
    assert.deepEqual(done.map((e) => [e.name, e.arguments]), [["say", whole.function.arguments]]);
});

await check("tools: runTools calls the function", async () => {
    let got;
    const tool = {
        type: "function",
        function: {
            ...add.function,
            parse: JSON.parse,
            function: (a) => {
                got = a;
                return a.x + a.y;
            }
        }
    };
    const run = client.chat.completions.runTools({
        model: "a",
        messages: user(question),
        temperature: 0,
        max_tokens: 100,
        tools: [tool],
        tool_choice: named("add")
    });
    const result = await run.finalFunctionToolCallResult();
    assert.equal(result, String(got.x + got.y));
    await run.done();
});

await check("tools: calls and their results are sent back in the conversation", async () => {
    const call = {id: "call_1", type: "function", function: {name: "add", arguments: "{\"x\":1,\"y\":2}"}};
    const talk = [
        ...user(question), {role: "assistant", content: null, tool_calls: [call]},
        {role: "tool", tool_call_id: "call_1", content: "3"}
    ];
    assert.equal(typeof await words({messages: talk}), "string");
    assert.equal(typeof await words({messages: talk, tools: [add], tool_choice: "none"}), "string");
});

// The model is not trained on tool calls, so the prompt dictates its text; the test checks how the server parses it.
const callText = "{\"name\": \"add\", \"arguments\": {\"x\": 2, \"y\": 3}}";
const telling = (text, more = {}) =>
    ({model: "fry-tools", tools: [add], guided_choice: [text], max_tokens: 200, ...more});

for (const [name, text, before, args] of [
         [
             "in marks, behind words", `I add. <tool_call>\n${callText}\n</tool_call>`, "I add. ",
             ["{\"x\": 2, \"y\": 3}"]
         ],
         ["as a bare object", callText, "", ["{\"x\": 2, \"y\": 3}"]],
         [
             "twice", `<tool_call>${callText}</tool_call>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>`, "",
             ["{\"x\": 2, \"y\": 3}", "{}"]
         ],
         ["without arguments", "<tool_call>{\"name\": \"add\"}</tool_call>", "", ["{}"]],
])
    await check(`tools: a call that the model chooses, ${name}`, async () => {
        const [c] = (await chat(telling(text), narrow)).choices;
        assert.equal(c.finish_reason, "tool_calls", JSON.stringify(c));
        assert.equal(c.message.content ?? "", before);
        assert.deepEqual(c.message.tool_calls.map((t) => t.function), args.map((a) => ({name: "add", arguments: a})));
        const stream = narrow.chat.completions.stream({...telling(text), messages: user(question), temperature: 0});
        const {message, finish_reason} = (await stream.finalChatCompletion()).choices[0];
        assert.equal(finish_reason, "tool_calls");
        assert.equal(message.content ?? "", before);
        assert.deepEqual(message.tool_calls.map((t) => [t.function.name, t.function.arguments]),
                         args.map((a) => ["add", a]));
        assert.equal(await words(telling(text, {tool_choice: "none"}), narrow), text);
    });

await check("tools: text that only looks like a call is content", async () => {
    const texts = [
        "<tool_call>add 2 and 3</tool_call>", "a < b <tool", "{\"name\": \"Ann\", \"arguments\": {}}",
        "{\"name\": \"add\"}", "{ x", "<tool_call>"
    ];
    for (const text of texts) {
        const [c] = (await chat(telling(text), narrow)).choices;
        assert.deepEqual([c.message.content, c.message.tool_calls, c.finish_reason], [text, undefined, "stop"]);
        const chunks = await streamed(telling(text), narrow);
        assert.equal(joined(chunks), text);
        assert.ok(chunks.every((k) => !k.choices[0].delta.tool_calls));
    }
});

await check("tools: a truncated call ends with the reason length", async () => {
    const cut = telling(`<tool_call>${callText}</tool_call>`, {max_tokens: 40});
    assert.equal((await chat(cut, narrow)).choices[0].finish_reason, "length");
    const deep = {
        type: "function",
        function: {name: "say", parameters: object({text: {type: "string", minLength: 200}})}
    };
    const ask = {tools: [deep], tool_choice: "required", max_tokens: 40};
    assert.equal((await chat(ask)).choices[0].finish_reason, "length");
    assert.equal((await streamed(ask)).at(-1).choices[0].finish_reason, "length");
});

await check("tools: without support in the template the error says what to do", async () => {
    await assert.rejects(chat({tools: [add]}), (e) => e instanceof BadRequestError && /tool_choice/.test(e.message));
});

// structured output

await check("structured output: a plain schema, the zod helper, any object", async () => {
    const schema = object({answer: {type: "integer", minimum: 0, maximum: 99999}, sure: {enum: ["yes", "no"]}});
    const format = {type: "json_schema", json_schema: {name: "reply", strict: true, schema}};
    const plain = JSON.parse(await words({response_format: format, max_tokens: 80}));
    assert.deepEqual(Object.keys(plain), ["answer", "sure"]);
    assert.ok(Number.isInteger(plain.answer) && ["yes", "no"].includes(plain.sure));

    const shape = z.object({digits: z.array(z.number().int()).max(3), voice: z.string().max(8).nullable()});
    const parsed = await client.chat.completions.parse({
        model: "b",
        messages: user(question),
        temperature: 0,
        max_tokens: 120,
        response_format: zodResponseFormat(shape, "shape")
    });
    assert.deepEqual(parsed.choices[0].message.parsed, shape.parse(parsed.choices[0].message.parsed));

    assert.equal(typeof JSON.parse(await words({response_format: {type: "json_object"}, max_tokens: 80})), "object");
    assert.equal(await words({response_format: {type: "text"}}), await words());
    const thought = {
        ...format.json_schema,
        schema: object({thought: {type: "string", maxLength: 10}, answer: {type: "integer", maximum: 99, minimum: 0}})
    };
    const order = await words({response_format: {type: "json_schema", json_schema: thought}, max_tokens: 80});
    assert.deepEqual(Object.keys(JSON.parse(order)), ["thought", "answer"]); // in the requested order
    assert.equal(JSON.parse(joined(await streamed({response_format: format, max_tokens: 80}))).answer, plain.answer);
    await assert.rejects(words({response_format: {type: "xml"}}), BadRequestError);
    await assert.rejects(
        words({response_format: {type: "json_schema", json_schema: {name: "x", schema: {type: "thing"}}}}),
        BadRequestError);
});

// embeddings, models, completions

await check("embeddings: base64, which the client requests, equals float bit by bit", async () => {
    const input = ["春は", "spring"];
    const [plain, packed] = await Promise.all(
        [{encoding_format: "float"}, {}].map((f) => client.embeddings.create({model: "a", input, ...f})));
    assert.deepEqual(packed.data.map((d) => [d.object, d.index]), [["embedding", 0], ["embedding", 1]]);
    plain.data.forEach((d, i) => {
        assert.ok(d.embedding.length > 100);
        assert.deepEqual(d.embedding.map(Math.fround), Array.from(packed.data[i].embedding));
        assert.ok(Math.abs(d.embedding.reduce((s, x) => s + x * x, 0) - 1) < 1e-5);
    });
    assert.notDeepEqual(plain.data[0].embedding, plain.data[1].embedding);
    assert.equal(plain.usage.prompt_tokens, plain.usage.total_tokens);
    const short = await client.embeddings.create({model: "a", input: "春は", dimensions: 16});
    assert.equal(short.data[0].embedding.length, 16);
    assert.ok(Math.abs(Array.from(short.data[0].embedding).reduce((s, x) => s + x * x, 0) - 1) < 1e-5);
    const ids = (await http("/tokenize", {prompt: "春は"})).json.tokens;
    const byIds = await client.embeddings.create({model: "a", input: ids});
    assert.deepEqual(Array.from(byIds.data[0].embedding), Array.from(packed.data[0].embedding));
});

await check("models: the base first, then adapters, each retrievable", async () => {
    const all = [];
    for await (const m of client.models.list())
        all.push(m);
    assert.deepEqual(all.map((m) => m.id), ["fry-1", "a", "b", "auto", "team:pair"]);
    assert.deepEqual(all.map((m) => m.parent), [null, "fry-1", "fry-1", "fry-1", "fry-1"]);
    for (const m of all)
        assert.deepEqual(await client.models.retrieve(m.id), m);
    assert.equal((await client.models.retrieve("fry-1:a")).id, "fry-1:a");
    assert.equal((await client.models.retrieve(all[0].root)).object, "model"); // a path: slashes
    await assert.rejects(client.models.retrieve("nobody"), NotFoundError);
});

const complete = (more) =>
    client.completions.create({model: "a", prompt: question, temperature: 0, max_tokens: 8, ...more});

await check("completions: texts, token lists, n, echo, log-probabilities, streams", async () => {
    const tokens = (await http("/tokenize", {prompt: question})).json.tokens;
    const one = await complete();
    assert.match(one.id, /^cmpl-/);
    assert.equal(one.object, "text_completion");
    assert.equal((await complete({prompt: tokens})).choices[0].text, one.choices[0].text);
    const two = await complete({prompt: [tokens, tokens.slice(0, 4)], n: 2, temperature: 1, seed: 3});
    assert.deepEqual(two.choices.map((c) => c.index), [0, 1, 2, 3]);
    assert.equal((await complete({prompt: [question, "x"]})).choices[0].text, one.choices[0].text);

    const [c] = (await complete({echo: true, logprobs: 3})).choices;
    assert.equal(c.text, question + one.choices[0].text);
    assert.equal(c.logprobs.tokens.join(""), c.text);
    assert.equal(c.logprobs.token_logprobs[0], null);
    assert.equal(c.logprobs.top_logprobs[0], null);
    c.logprobs.text_offset.forEach((at, i) => assert.ok(c.text.startsWith(c.logprobs.tokens[i], at)));
    c.logprobs.top_logprobs.slice(1).forEach(
        (top, i) => assert.equal(top[c.logprobs.tokens[i + 1]], c.logprobs.token_logprobs[i + 1]));
    const only = await complete({echo: true, max_tokens: 0, logprobs: 1});
    assert.equal(only.choices[0].text, question);
    assert.equal(only.choices[0].logprobs.tokens.length, tokens.length);
    assert.equal(only.usage.completion_tokens, 0);

    const chunks = [];
    for await (
        const k of await complete({stream: true, echo: true, logprobs: 3, stream_options: {include_usage: true}}))
        chunks.push(k);
    const told = chunks.flatMap((k) => k.choices);
    assert.equal(told.map((k) => k.text).join(""), c.text);
    assert.deepEqual(told.flatMap((k) => k.logprobs?.tokens ?? []), c.logprobs.tokens);
    assert.deepEqual(told.flatMap((k) => k.logprobs?.text_offset ?? []), c.logprobs.text_offset);
    assert.equal(chunks.at(-1).usage.prompt_tokens, tokens.length);
});

// errors and loads

await check("errors come as the client's own classes", async () => {
    await assert.rejects(chat({model: "nobody"}),
                         (e) => e instanceof NotFoundError && e.code === "model_not_found" && /nobody/.test(e.message));
    const wrong = [
        {temperature: "hot"}, {n: 0}, {max_tokens: -1}, {messages: []}, {messages: user(7)}, {stop: 5},
        {logit_bias: {x: 1}}, {top_logprobs: 3}, {stream: "yes"}, {tools: [add], tool_choice: named("sub")}
    ];
    for (const more of wrong)
        await assert.rejects(chat(more),
                             (e) => e instanceof BadRequestError && e.type === "invalid_request_error" &&
                                    e.message.length > 20,
                             JSON.stringify(more));
    await assert.rejects(chat({messages: user("7 ".repeat(600))}),
                         (e) => e instanceof BadRequestError && e.code === "context_length_exceeded");
    await assert.rejects(complete({prompt: [[999999]]}), BadRequestError);
    await assert.rejects(client.embeddings.create({model: "nobody", input: "x"}), NotFoundError);
});

await check("adapters and a mix of them at once equal each of them alone", async () => {
    const models = ["fry-1", "a", "b", "a*0.5+b*0.5", "fry-1:a"],
          asked = ["2587 - 9 = ?", "order down: b y g", "81,37からEへ進む。どこ？"];
    const cases = models.flatMap((model) => asked.map((q) => ({model, messages: user(q)})));
    const alone = [];
    for (const c of cases)
        alone.push(await words(c));
    const together = await Promise.all(cases.map((c, i) => (i % 2 ? words(c) : streamed(c).then((k) => joined(k)))));
    assert.deepEqual(together, alone);
    const said = (model) => alone.filter((_, i) => cases[i].model === model).join("\n");
    assert.equal(said("fry-1:a"), said("a"));
    assert.equal(new Set(models.slice(0, 4).map(said)).size, 4, "adapters that change nothing test nothing");

    const {SHOAL, SHOAL_MODEL, SHOAL_ADAPTERS: dir} = process.env;
    const flags = {
        "fry-1": [],
        a: ["--adapter", `${dir}/a`],
        b: ["--adapter", `${dir}/b`],
        "a*0.5+b*0.5": ["--adapter", `${dir}/a=0.5,${dir}/b=0.5`]
    };
    for (const [i, {model, messages}] of cases.entries()) {
        if (!flags[model] || i % asked.length)
            continue;
        const args = [
            "run", SHOAL_MODEL, "--chat", messages[0].content, "--temp", "0", "-n", "40", "--json", "--quiet",
            ...flags[model]
        ];
        assert.equal(JSON.parse(execFileSync(SHOAL, args, {encoding: "utf8"})).text, alone[i], `shoal run, ${model}`);
    }
});

await check("50 streams at once all end, with the text of a single one", async () => {
    const wanted = await words({model: "b"});
    const all = await Promise.all(Array.from({length: 50}, () => streamed({model: "b"})));
    for (const chunks of all) {
        assert.equal(joined(chunks), wanted);
        assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
    }
});

// The narrow server generates one reply at a time, so requests that are not cancelled delay all others: 128
// answers of 400 tokens take half a minute, and the next request must be served at once.
for (const [name, start] of [[
         "a stream",
         async (ask, end) => {
             const s = await narrow.chat.completions.create({...ask, stream: true}, {signal: end.signal});
             for await (const c of s)
                 if (c.choices[0].delta.content)
                     break; // the reply is in progress
             end.abort();
         }
     ],
                             [
                                 "a reply",
                                 async (ask, end) => {
                                     const r = narrow.chat.completions.create(ask, {signal: end.signal});
                                     setTimeout(() => end.abort(), 300);
                                     await assert.rejects(r, /abort/i);
                                 }
                             ],
])
    await check(`${name} is cancelled when its client disconnects`, async () => {
        const ask =
            {model: "fry-tools", messages: user("go"), max_tokens: 400, n: 128, temperature: 1, ignore_eos: true};
        await start(ask, new AbortController());
        const began = Date.now();
        await words({model: "fry-tools"}, narrow);
        assert.ok(Date.now() - began < 5000, `the next request took ${Date.now() - began} ms`);
    });

await check("no request is counted as running at the end", async () => {
    const zero = (what, text) => new RegExp(`^vllm:num_requests_${what}(\\{.*\\})? 0(\\.0)?$`, "m").test(text);
    let r;
    for (let tries = 0; tries < 30; tries++) {
        r = await http("/metrics", undefined, narrowUrl);
        if (r.status === 404)
            throw new Skip("this server has no /metrics");
        if (zero("running", r.text) && zero("waiting", r.text))
            return;
        await new Promise((done) => setTimeout(done, 100));
    }
    assert.fail(r.text.match(/^vllm:num_requests_.*$/gm)?.join(" "));
});
