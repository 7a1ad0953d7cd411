// The ollama package with the server.
import {Ollama} from "ollama";

import {assert, check, http, json, Skip, token, url, user} from "./lib.mjs";

const there = (await http("/api/version")).status === 200;
const ollama = new Ollama({host: url, headers: {Authorization: "Bearer " + token}});
const question = "2587 - 9 = ?", options = {
    temperature: 0,
    num_predict: 40
};
const api = (name, run) => check(name, () => {
    if (!there)
        throw new Skip("this server has no /api");
    return run();
});
const direct = async (model) =>
    (await json("/v1/chat/completions", {model, messages: user(question), temperature: 0, max_tokens: 40}))
        .choices[0]
        .message.content;

await api("chat, whole and streamed, says what OpenAI's does", async () => {
    const whole = await ollama.chat({model: "a", messages: user(question), options});
    assert.equal(whole.message.content, await direct("a"));
    assert.ok(whole.done && whole.done_reason === "stop" && whole.eval_count > 2 && whole.total_duration > 0);
    let text = "", last;
    for await (const c of await ollama.chat({model: "a:latest", messages: user(question), options, stream: true})) {
        text += c.message.content;
        last = c;
    }
    assert.equal(text, whole.message.content);
    assert.equal(last.eval_count, whole.eval_count);
});

await api("generate and its context", async () => {
    const r = await ollama.generate({model: "b", prompt: question, options});
    assert.equal(r.response, await direct("b"));
    assert.ok(r.context.length > 5 && r.context.every(Number.isInteger));
});

await api("a format is kept to", async () => {
    const format = {
        type: "object",
        properties: {answer: {type: "integer", minimum: 0, maximum: 9999}},
        required: ["answer"]
    };
    const r = await ollama.chat({model: "a", messages: user(question), format, options: {...options, num_predict: 80}});
    assert.ok(Number.isInteger(JSON.parse(r.message.content).answer));
});

await api("embed", async () => {
    const r = await ollama.embed({model: "a", input: ["春は", "spring"]});
    assert.equal(r.embeddings.length, 2);
    assert.ok(Math.abs(r.embeddings[0].reduce((s, x) => s + x * x, 0) - 1) < 1e-4);
});

await api("list, show, ps", async () => {
    const names = (await ollama.list()).models.map((m) => m.name);
    for (const name of ["fry-1:latest", "a:latest", "b:latest"])
        assert.ok(names.includes(name), names.join());
    const shown = await ollama.show({model: "a"});
    assert.equal(shown.model_info["general.architecture"], "llama");
    assert.ok(shown.capabilities.includes("completion"));
    assert.ok((await ollama.ps()).models.length > 0);
});

await api("copy and delete", async () => {
    await ollama.copy({source: "a", destination: "copied"});
    const r = await ollama.chat({model: "copied", messages: user(question), options});
    assert.equal(r.message.content, await direct("a"));
    await ollama.delete({model: "copied"});
    await assert.rejects(ollama.show({model: "copied"}), /not found/);
});

await api("a model that is not there", async () => {
    await assert.rejects(ollama.chat({model: "nobody", messages: user("x")}), /model 'nobody(:latest)?' not found/);
});
