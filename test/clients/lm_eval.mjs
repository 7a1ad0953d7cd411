// lm-evaluation-harness's requests, recorded in lm_eval/*.json as it sends them with
// --model local-completions and local-chat-completions, and its reading of the replies.
// A fixture is {request: {path, body}, items: [{context, continuation}]}: the texts of the token lists.
import {execFileSync} from "node:child_process";
import {readFileSync, writeFileSync} from "node:fs";

import {assert, check, http, json} from "./lib.mjs";

const {SHOAL, SHOAL_LM_EVAL, SHOAL_MODEL, SHOAL_TMP} = process.env;
const fixture = (name) => JSON.parse(readFileSync(`${SHOAL_LM_EVAL}/${name}.json`));
const post = ({path, body}) => json(path, body);
const tokenize = async (prompt) => (await json("/tokenize", {prompt, add_special_tokens: false})).tokens;
const sorted = (reply) => [...reply.choices].sort((a, b) => a.index - b.index);
const sum = (list) => list.reduce((a, b) => a + b, 0);

/** As TemplateAPI.parse_logprobs: the tokens between the context and the one that was generated. */
function scores(reply, ctxlens) {
    const choices = sorted(reply);
    return ctxlens.map((ctxlen, i) => {
        const {token_logprobs, top_logprobs} = choices[i].logprobs;
        const values = token_logprobs.slice(ctxlen, -1), tops = top_logprobs.slice(ctxlen, -1);
        return {values, sum: sum(values), greedy: values.every((v, k) => v === Math.max(...Object.values(tops[k])))};
    });
}
const ctxlens = (items) => Promise.all(items.map(async (i) => (await tokenize(i.context)).length));

await check("the tokenizer is found without Python", async () => {
    const info = await json("/tokenizer_info");
    assert.equal(typeof info.eos_token, "string");
    assert.equal((await tokenize(info.eos_token)).length, 1);
    assert.ok(info.chat_template.includes("messages"));
});

await check("recorded token lists are from this model", async () => {
    for (const name of ["loglikelihood", "generate_until"]) {
        const {request, items} = fixture(name);
        for (const [i, {context, continuation}] of items.entries())
            assert.deepEqual(request.body.prompt[i], await tokenize(context + (continuation ?? "")));
    }
});

await check("log-likelihoods: one generated token follows, every position is complete", async () => {
    const {request, items} = fixture("loglikelihood");
    const reply = await post(request);
    assert.equal(reply.choices.length, items.length);
    for (const c of reply.choices) {
        const ids = request.body.prompt[c.index], l = c.logprobs;
        for (const list of [l.tokens, l.token_logprobs, l.top_logprobs, l.text_offset])
            assert.equal(list.length, ids.length + 1);
        assert.equal(l.token_logprobs[0], null);
        assert.equal(l.top_logprobs[0], null);
        for (let i = 1; i <= ids.length; i++) {
            const values = Object.values(l.top_logprobs[i]);
            assert.ok(values.includes(l.token_logprobs[i]), `the token at ${i} is not among its alternatives`);
            assert.ok(l.token_logprobs[i] <= Math.max(...values));
        }
        assert.ok(Object.values(l.top_logprobs.at(-1)).every((v) => v <= l.token_logprobs.at(-1)));
    }
});

await check("log-likelihoods equal those of shoal run bit by bit", async () => {
    const {request, items} = fixture("loglikelihood");
    const file = `${SHOAL_TMP}/lm_eval.jsonl`;
    writeFileSync(file, items.map((i) => JSON.stringify({prompt: i.context + i.continuation})).join("\n") + "\n");
    const args = [
        "run", SHOAL_MODEL, "--file", file, "-n", "1", "--temp", "0", "--json", "--quiet", "--prompt-logprobs", "--echo",
        "--exact" // as the server
    ];
    const lines = execFileSync(SHOAL, args, {encoding: "utf8"}).trim().split("\n").map((l) => JSON.parse(l));
    const lens = await ctxlens(items), got = scores(await post(request), lens);
    lines.forEach((line, i) => {
        assert.deepEqual(line.prompt_ids, request.body.prompt[i]);
        assert.deepEqual(got[i].values.map(Math.fround), line.prompt_logprobs.slice(lens[i]).map(Math.fround));
    });
    assert.ok(new Set(got.map((s) => s.sum)).size === items.length && got.every((s) => s.sum < 0));
});

await check("log-likelihoods do not depend on other requests, and strings have those of their tokens", async () => {
    const {request, items} = fixture("loglikelihood"), lens = await ctxlens(items);
    const all = scores(await post(request), lens);
    for (const [i, prompt] of request.body.prompt.entries()) {
        const alone = await post({path: request.path, body: {...request.body, prompt: [prompt]}});
        assert.deepEqual(scores(alone, [lens[i]])[0], all[i]);
    }
    assert.deepEqual(scores(await post(fixture("loglikelihood_strings").request), lens), all);
});

await check("generation stops, and its text is greedy and has the same log-likelihood", async () => {
    const {request, items} = fixture("generate_until");
    const reply = await post(request);
    const texts = sorted(reply).map((c) => c.text);
    assert.equal(texts.length, items.length);
    for (const [i, {context}] of items.entries()) {
        assert.ok(texts[i].length > 0 && !request.body.stop.some((s) => texts[i].includes(s)),
                  JSON.stringify(texts[i]));
        const prompt = await tokenize(context + texts[i]), ctxlen = (await tokenize(context)).length;
        const body = {...fixture("loglikelihood").request.body, prompt: [prompt]};
        const echo = await post({path: request.path, body});
        const [score] = scores(echo, [ctxlen]);
        assert.ok(score.greedy);
        const written =
            await post({path: request.path, body: {...request.body, prompt: [request.body.prompt[i]], logprobs: 1}});
        assert.deepEqual(score.values, written.choices[0].logprobs.token_logprobs.slice(0, score.values.length));
        const other = scores(await post({
                                 path: request.path,
                                 body: {...body, prompt: [[...prompt.slice(0, ctxlen), 99, ...prompt.slice(ctxlen)]]}
                             }),
                             [ctxlen]);
        assert.equal(other[0].greedy, false);
    }
});

await check("the following token is reported even if it is the end of text", async () => {
    const {request, items} = fixture("generate_until");
    const [free] =
        (await post({path: request.path, body: {...request.body, prompt: [request.body.prompt[0]], stop: []}})).choices;
    assert.equal(free.finish_reason, "stop");
    const prompt = await tokenize(items[0].context + free.text);
    const [c] =
        (await post({path: request.path, body: {...fixture("loglikelihood").request.body, prompt: [prompt]}})).choices;
    assert.equal(c.logprobs.tokens.length, prompt.length + 1);
    assert.equal(c.logprobs.tokens.at(-1), "<|im_end|>");
});

await check("an adapter has different log-likelihoods", async () => {
    const {request, items} = fixture("loglikelihood"), lens = await ctxlens(items);
    const of = async (model) =>
        scores(await post({path: request.path, body: {...request.body, model}}), lens).map((s) => s.sum);
    const [fry, a] = await Promise.all([of("fry-1"), of("a")]);
    assert.ok(fry.every((v, i) => v !== a[i]));
});

await check("chat generation stops; an empty key is a key", async () => {
    const {request} = fixture("chat_generate_until");
    const [c] = (await post(request)).choices;
    assert.ok(c.message.content.length > 0 && !request.body.stop.some((s) => c.message.content.includes(s)));
    const free = await post({path: request.path, body: {...request.body, stop: []}});
    assert.ok(free.choices[0].message.content.startsWith(c.message.content));
    assert.notEqual(free.choices[0].message.content, c.message.content);
    assert.equal((await http(request.path, {...request.body, max_tokens: 1})).status, 200);
});
