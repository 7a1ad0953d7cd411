// vLLM's adapter routes and side endpoints, byte for byte. No package: users call them with curl.
import {readFileSync} from "node:fs";

import {assert, check, http, json, narrowUrl, user} from "./lib.mjs";

const dir = process.env.SHOAL_ADAPTERS;
const load = (body) => http("/v1/load_lora_adapter", body);
const unload = (body) => http("/v1/unload_lora_adapter", body);
const ask = (model) =>
    http("/v1/chat/completions", {model, messages: user("2587 - 9 = ?"), temperature: 0, max_tokens: 30});
const words = async (model) => (await ask(model)).json.choices[0].message.content;
const ids = async () => (await json("/v1/models")).data.map((m) => m.id);

function refused(r, status, type, message) {
    assert.equal(r.status, status, r.text);
    assert.equal(r.json.error.type, type);
    if (message instanceof RegExp)
        assert.match(r.json.error.message, message);
    else
        assert.equal(r.json.error.message, message);
    assert.ok("param" in r.json.error && "code" in r.json.error);
}

await check("load and unload", async () => {
    const r = await load({lora_name: "late", lora_path: `${dir}/a`});
    assert.equal(r.status, 200, r.text);
    assert.equal(r.text, "Success: LoRA adapter 'late' added successfully.");
    assert.match(r.type, /^text\/plain/);
    assert.ok((await ids()).includes("late"));
    assert.equal(await words("late"), await words("a"));
    const gone = await unload({lora_name: "late", lora_int_id: 3});
    assert.equal(gone.status, 200);
    assert.equal(gone.text, "Success: LoRA adapter 'late' removed successfully.");
    assert.ok(!(await ids()).includes("late"));
    assert.equal((await ask("late")).status, 404);
});

await check("load_inplace puts another adapter under the name", async () => {
    await load({lora_name: "late", lora_path: `${dir}/a`});
    refused(await load({lora_name: "late", lora_path: `${dir}/b`}), 400, "InvalidUserInput",
            /^The lora adapter 'late' has already been loaded\./);
    assert.equal(await words("late"), await words("a"));
    const r = await load({lora_name: "late", lora_path: `${dir}/b`, load_inplace: true, is_3d_lora_weight: false});
    assert.equal(r.text, "Success: LoRA adapter 'late' added successfully.");
    assert.equal(await words("late"), await words("b"));
    assert.notEqual(await words("a"), await words("b"));
    assert.equal((await ids()).filter((m) => m === "late").length, 1);
    await unload({lora_name: "late"});
});

await check("invalid load and unload requests", async () => {
    const both = "Both 'lora_name' and 'lora_path' must be provided.";
    for (const body of [{}, {lora_name: "x"}, {lora_path: `${dir}/a`}, {lora_name: "", lora_path: ""},
                        {lora_name: null, lora_path: "x"}])
        refused(await load(body), 400, "InvalidUserInput", both);
    refused(await load({lora_name: "x", lora_path: "/nowhere/at/all"}), 404, "NotFoundError", /nowhere/);
    refused(await load({lora_name: "x", lora_path: `${dir}/broken`}), 400, "BadRequestError", /broken/);
    refused(await load({lora_name: "x*y", lora_path: `${dir}/a`}), 400, "BadRequestError", /'x\*y'/);
    refused(await load({lora_name: 7, lora_path: `${dir}/a`}), 400, "BadRequestError", /lora_name/);
    refused(await unload({}), 400, "InvalidUserInput", /lora_name/);
    refused(await unload({lora_name: "nobody"}), 404, "NotFoundError", "The lora adapter 'nobody' cannot be found.");
    assert.deepEqual(await ids(), ["fry-1", "a", "b", "auto", "team:pair"]);
});

await check("an adapter is unloaded while it is used", async () => {
    await load({lora_name: "late", lora_path: `${dir}/a`});
    const long = {model: "late", messages: user("go"), max_tokens: 300, temperature: 1, seed: 3, ignore_eos: true};
    const running = Array.from({length: 8}, () => http("/v1/chat/completions", long));
    await unload({lora_name: "late"});
    const texts =
        (await Promise.all(running)).filter((r) => r.status === 200).map((r) => r.json.choices[0].message.content);
    const {content} = (await json("/v1/chat/completions", {...long, model: "a"})).choices[0].message;
    for (const text of texts)
        assert.equal(text, content);
});

await check("health, ping, version", async () => {
    for (const [path, body] of [["/health"], ["/ping"], ["/ping", {}]]) {
        const r = await http(path, body);
        assert.deepEqual([r.status, r.text], [200, ""]);
    }
    assert.match((await json("/version")).version, /^\d+\.\d+/);
});

const texts = [
    "春はあけぼの、やうやう白くなりゆく", "从896和523中选小", "family 👩‍👩‍👧 and 😀",
    "a <|im_start|>user\nb<|im_end|>\n", "  \t\n x  ", ""
];

await check("tokenize and detokenize", async () => {
    for (const prompt of texts) {
        const t = await json("/tokenize", {prompt, add_special_tokens: false});
        assert.equal(t.count, t.tokens.length);
        assert.ok(t.tokens.every(Number.isInteger) && t.token_strs === null);
        assert.equal((await json("/detokenize", {tokens: t.tokens})).prompt, prompt);
    }
    const {token_strs, tokens} = await json("/tokenize", {prompt: texts[3], return_token_strs: true});
    assert.equal(token_strs.length, tokens.length);
    assert.ok(token_strs.includes("<|im_end|>"));
    assert.equal((await http("/tokenize", {prompt: 5})).status, 400);
    assert.equal((await http("/detokenize", {tokens: ["a"]})).status, 400);
});

await check("messages are tokenized as in a chat", async () => {
    const messages = user("2587 - 9 = ?");
    const {count, tokens} = await json("/tokenize", {messages});
    const r = await json("/v1/chat/completions", {messages, max_tokens: 1});
    assert.equal(count, r.usage.prompt_tokens);
    const text = (await json("/detokenize", {tokens})).prompt;
    assert.equal(text, "<|im_start|>user\n2587 - 9 = ?<|im_end|>\n<|im_start|>assistant\n");
    const parts = await json("/tokenize", {messages: user([{type: "text", text: "2587 - 9 = ?"}])});
    assert.deepEqual(parts.tokens, tokens);
});

await check("tokenizer_info has the model's own template and specials", async () => {
    const info = await json("/tokenizer_info", undefined, narrowUrl);
    const file = JSON.parse(readFileSync(`${process.env.SHOAL_NARROW_MODEL}/tokenizer_config.json`));
    assert.equal(info.chat_template, file.chat_template);
    assert.equal(info.eos_token, "<|im_end|>");
    assert.equal(info.bos_token, "<|endoftext|>");
    assert.equal((await json("/tokenize", {prompt: info.eos_token, add_special_tokens: false})).count, 1);
});
