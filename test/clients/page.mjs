// The web page in a browser: see test/api/test_page.sh, which starts the server and names the browser.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const { SHOAL_URL: url, SHOAL_LOCKED_URL: locked, SHOAL_NODES_URL: with_nodes, SHOAL_TOKEN: token, SHOAL_ADAPTER: adapter, SHOAL_LIVED: lived, SHOTS: shots, CHROMIUM: chromium } = process.env;
const { chromium: browsers } = createRequire(join(shots, "x.js"))("playwright-core");

const groups = { talk: ["chat", "debate", "ask"], grow: ["jobs", "evolution", "ab"], watch: ["world", "agents"], admin: ["system", "settings"] };
const views = Object.values(groups).flat();
const group_names = { en: ["Talk", "Grow", "Watch", "Admin"], ja: ["対話", "育成", "観察", "管理"], zh: ["交流", "培育", "观察", "管理"] };
const names = {
    en: ["Chat", "Debate", "Blackboard", "Jobs", "Evolution", "A/B tests", "World", "Agents", "System", "Settings"],
    ja: ["チャット", "討論", "黒板", "ジョブ", "進化", "A/B テスト", "ワールド", "エージェント", "システム", "設定"],
    zh: ["对话", "辩论", "黑板", "任务", "进化", "A/B 测试", "网格世界", "智能体", "系统", "设置"],
};

/* The element of each view, and its expected content. */
const deep = { world: [`world/${lived}`, ".chip"], evolution: ["evolution/grown", ".node.ancestor"], ab: ["ab/trial", ".detail table"] };

let failed = 0;
async function check(name, run) {
    try {
        await run();
        console.log(`ok page: ${name}`);
    } catch (e) {
        failed++;
        console.log(`not ok page: ${name}: ${String(e?.message ?? e).replace(/\s*\n\s*/g, " | ").slice(0, 600)}`);
    }
}

/* Waits for content that appears later, with a long limit for slow machines. */
async function until(holds, otherwise) {
    for (const end = Date.now() + 15000; !(await holds()); await new Promise((r) => setTimeout(r, 50))) assert.ok(Date.now() < end, otherwise);
}

const browser = await browsers.launch({ executablePath: chromium, args: ["--no-sandbox"] });
const api = async (path, body, method) => {
    const r = await fetch(url + path, { method: method ?? (body ? "POST" : "GET"), body: body && JSON.stringify(body), headers: { "X-API-Key": token } });
    assert.ok(r.ok, `${path}: ${r.status}`);
    return Object.assign(await r.json(), { headers: r.headers });
};
const hasJobs = (await fetch(url + "/v1/jobs", { headers: { "X-API-Key": token } })).ok;

/* No page may log errors to the console or send requests to another host. `expected` are errors that a check provokes. */
const said = [], strangers = [];
let expected = /^$/;
async function context(options) {
    const c = await browser.newContext({ viewport: { width: 1280, height: 800 }, locale: "en-US", ...options });
    c.on("request", (r) => {
        if (![url, locked, with_nodes].includes(new URL(r.url()).origin)) strangers.push(r.url());
    });
    c.on("console", (m) => {
        const where = m.location().url ?? "";
        if (!["error", "warning"].includes(m.type()) || expected.test(where) || (!hasJobs && /\/v1\/jobs/.test(where))) return;
        said.push(`${m.type()}: ${m.text()} (${where})`);
    });
    c.on("weberror", (e) => said.push(`thrown: ${e.error().stack ?? e.error()}`));
    c.setDefaultTimeout(15000);
    return c;
}
async function page_of(c, view = "chat") {
    const p = await c.newPage();
    await p.goto(`${url}/#token=${token}`); // as the server prints it
    await p.goto(`${url}/#/${view}`);
    await p.locator("nav a[aria-current=page]").waitFor();
    return p;
}
async function provoke(what, run) {
    expected = what;
    await run();
    expected = /^$/;
}
/** Opens a view with at most two clicks: its group, then the view. */
async function go(p, view) {
    const link = p.locator(`nav .views a[href="#/${view}"]`);
    const [first] = Object.values(groups).find((g) => g.includes(view));
    if (!(await link.count())) await p.locator(`nav .groups a[href="#/${first}"]`).click();
    await link.click();
    await p.waitForFunction((v) => document.querySelector("main").className === v, view); // the view before may have fields of the same names
}
const reply = (p, n = 0) => p.locator(".column").nth(n).locator(".reply").last();
async function chat(p, words) {
    await p.locator(".composer > textarea").fill(words);
    await p.keyboard.press("Enter");
}
const ended = (r) => r.and(r.page().locator('[aria-busy="false"]')).waitFor();

/* ---- every view, in every language and theme, desktop and phone */

/** What a screen reader could not name, and what sticks out of the window. */
const faults = () => {
    const list = [];
    for (const e of document.querySelectorAll("button, input, select, textarea, a, summary")) {
        const name = e.getAttribute("aria-label") || e.labels?.[0]?.textContent || (e.matches("button, a, summary") ? e.textContent : "");
        if (e.checkVisibility() && !name.trim()) list.push("no name: " + e.outerHTML.slice(0, 120));
    }
    if (document.documentElement.scrollWidth > innerWidth) list.push("wider than the window: " + document.documentElement.scrollWidth);
    for (const e of document.querySelectorAll("header a, header button")) {
        const { left, right } = e.getBoundingClientRect();
        if (left < 0 || right > innerWidth) list.push(`'${e.textContent}' is outside of the window: ${left} to ${right}`);
    }
    for (const e of document.querySelectorAll("main, main > *"))
        if (e.scrollWidth > e.clientWidth + 1) list.push(`${e.tagName}.${e.className} is wider than its place: ${e.scrollWidth}`);
    return list;
};

await api("/v1/ab", { name: "trial", model: "newer", b: "critic" });
for (const lang of Object.keys(names))
    await check(`every view in ${lang}`, async () => {
        for (const theme of ["light", "dark"])
            for (const width of [1280, 375]) {
                const c = await context({ colorScheme: theme, locale: lang, viewport: { width, height: width > 400 ? 800 : 720 } });
                const p = await page_of(c);
                for (const [i, view] of views.entries()) {
                    await go(p, view);
                    assert.equal(await p.locator("nav a[aria-current=page]").textContent(), names[lang][i]);
                    assert.equal(await p.locator("html").getAttribute("lang"), lang);
                    if (deep[view]) {
                        await p.evaluate((hash) => (location.hash = hash), "#/" + deep[view][0]);
                        await p.locator(deep[view][1]).first().waitFor();
                    }
                    if (view === "world") {
                        await p.locator(".chip").first().click();
                        await p.locator(".agent-details .bars").waitFor();
                    }
                    if (view === "ask") {
                        await p.locator("textarea").fill("3 + 4 = ?");
                        await p.locator("button.main").click();
                        await p.locator(".outcome .full-text").waitFor();
                    }
                    await p.waitForTimeout(view === "system" ? 2300 : 120);
                    await p.screenshot({ path: join(shots, `${view}-${lang}-${theme}-${width}.png`) });
                    assert.deepEqual(await p.evaluate(faults), [], `${view} ${theme} ${width}`);
                }
                const [r, g, b] = await p.evaluate(() => getComputedStyle(document.documentElement).backgroundColor.match(/\d+/g).map(Number));
                assert.equal(r + g + b < 200, theme === "dark");
                await c.close();
            }
    });

for (const lang of Object.keys(names))
    await check(`the navigation in ${lang}`, async () => {
        for (const [width, height] of [[1280, 800], [800, 600], [390, 844]]) {
            const c = await context({ locale: lang, viewport: { width, height } }), p = await page_of(c);
            const texts = (selector) => p.locator(selector).allTextContents();
            assert.deepEqual(await texts("nav .groups a"), group_names[lang]);
            for (const [i, [group, members]] of Object.entries(groups).entries()) {
                await p.locator("nav .groups a", { hasText: group_names[lang][i] }).click();
                await p.locator(`main.${members[0]}`).waitFor();
                const member_names = members.map((v) => names[lang][views.indexOf(v)]);
                assert.deepEqual(await p.getByRole("navigation").getByRole("list", { name: group_names[lang][i] }).getByRole("link").allTextContents(), member_names);
                for (const [j, view] of members.entries()) {
                    await p.locator("nav .views a", { hasText: member_names[j] }).click();
                    await p.locator(`main.${view}`).waitFor();
                    assert.deepEqual(await texts("nav [aria-current=page]"), [member_names[j]]);
                    assert.deepEqual(await texts("nav [aria-current=true]"), [group_names[lang][i]]);
                    assert.deepEqual(await p.evaluate(faults), [], `${view} ${width}`);
                }
                await p.screenshot({ path: join(shots, `group-${group}-${lang}-${width}.png`) });
            }
            await c.close();
        }
    });

await check("the address of each view opens it, once", async () => {
    const c = await context();
    for (const view of views) {
        const q = await page_of(c, view);
        await q.locator(`main.${view}`).waitFor();
        let requests = 0;
        q.on("request", (r) => (requests += /\/v1\/system$/.test(r.url())));
        await q.reload();
        await q.locator(`main.${view}`).waitFor();
        assert.equal(await q.evaluate(() => location.hash), "#/" + view);
        if (view === "chat") await until(() => requests, "the chat did not request the state of the server");
        if (view === "chat") assert.equal(requests, 1);
        await q.close();
    }
    const q = await page_of(c, "no-such-view");
    await q.locator("main.chat").waitFor();
    await c.close();
});

/** Pixels of a canvas in the first curve's colour. */
const painted = (canvas) => canvas.evaluate((c) => {
    const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
    let n = 0;
    for (let i = 0; i < d.length; i += 4) n += Math.abs(d[i] - 11) + Math.abs(d[i + 1] - 107) + Math.abs(d[i + 2] - 135) < 30 && d[i + 3] > 200;
    return n;
});

/* ---- chat */

const desk = await context();
const p = await page_of(desk);

await check("a reply is shown, with its statistics", async () => {
    await p.locator(".panel summary").click();
    await p.getByLabel("Max. tokens").fill("200");
    await p.getByLabel("Temperature").fill("1.2");
    await p.getByLabel("Seed").fill("7");
    await chat(p, "sort 3, 1, 2");
    await ended(reply(p));
    assert.match(await reply(p).locator(".reply-text").textContent(), /\S/);
    const stats = await reply(p).locator("footer").textContent();
    assert.match(stats, /\d+ tokens · ([\d,.]+ tokens\/s · )?first token after [\d.]+ m?s/); // no rate if the reply came in one chunk
    assert.equal(Number(/\d+/.exec(stats)[0]) <= 200, true);
});

/** A chat server that waits for the test between its chunks: window.say(text). */
const scripted_chat = (q) => q.evaluate(() => {
    const real = window.fetch;
    window.fetch = async (path, o) => !path.includes("completions") ? real(path, o) : new Response(new ReadableStream({
        start: (c) => (window.say = (text) => c.enqueue(new TextEncoder().encode(text))) }));
});

await check("text is shown while it is generated", async () => {
    const q = await page_of(await context()); // tabs of one browser share their storage
    await q.locator('.picker option[value="fry-1"]').waitFor({ state: "attached" });
    await scripted_chat(q);
    await q.getByText("New conversation").click();
    await chat(q, "hello");
    const say = (text) => q.evaluate((all) => window.say(all), text);
    const chunk = (content) => `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content } }] })}\n\n`;
    const shows = (text) => q.waitForFunction((t) => document.querySelector(".reply .reply-text").textContent === t, text);
    await q.waitForFunction(() => window.say);
    await say(chunk("one ").slice(0, 20)); // in the middle of a line
    await say(chunk("one ").slice(20));
    await shows("one ");
    await say(": waiting\n\n" + chunk("two"));
    await shows("one two");
    assert.equal(await reply(q).getAttribute("aria-busy"), "true");
    await say(`data: ${JSON.stringify({ choices: [], usage: { completion_tokens: 2 } })}\n\n`);
    await say("data: [DONE]\n\n");
    await ended(reply(q));
    assert.match(await reply(q).locator("footer").textContent(), /2 tokens · [\d,.]+ tokens\/s · first token after [\d.]+ m?s/);
    await q.context().close();
});

await check("a token's alternatives are shown on hover, and by keys", async () => {
    await reply(p).locator(".token").nth(1).hover();
    await p.locator("#tip").waitFor();
    assert.equal(await p.locator("#tip tr:not(.selected)").count() >= 4, true);
    const shares = (await p.locator("#tip .num").allTextContents()).map((s) => parseFloat(s.replace("< ", "")));
    assert.ok(shares.length >= 5 && shares[0] >= shares[4] && shares.reduce((a, b) => a + b) <= 101, shares.join());
    assert.ok((await p.locator("#tip tr.selected").count()) >= 1, "the token itself is not among them");
    await p.screenshot({ path: join(shots, "tokens.png") });
    await p.mouse.move(5, 5);
    await p.locator("#tip").waitFor({ state: "hidden" });
    await reply(p).locator(".reply-text").focus();
    await p.keyboard.press("ArrowRight");
    await p.keyboard.press("ArrowRight");
    assert.equal(await reply(p).locator(".token.active").textContent(), await reply(p).locator(".token").nth(1).textContent());
    assert.ok(await p.locator("#tip").isVisible());
    await p.keyboard.press("Escape");
    assert.ok(await p.locator("#tip").isHidden());
});

await check("a conversation is stored, and its messages are sent with the next one", async () => {
    const before = await reply(p).locator(".reply-text").textContent();
    await p.reload();
    assert.equal(await reply(p).locator(".reply-text").textContent(), before);
    const [sent] = await Promise.all([p.waitForRequest(/completions/), chat(p, "again")]);
    const body = sent.postDataJSON();
    assert.deepEqual(body.messages.map((m) => m.role), ["user", "assistant", "user"]);
    assert.equal(body.messages[1].content, before);
    assert.equal(body.seed, 7);
    await ended(reply(p));
    await p.getByText("New conversation").click();
    assert.equal(await p.locator(".log article").count(), 0);
});

await check("stop ends a reply and keeps its text", async () => {
    let free;
    const held = new Promise((r) => (free = r));
    await p.route("**/v1/chat/completions", async (route) => {
        await held;
        await route.abort().catch(() => {});
    });
    await chat(p, "wait");
    await p.getByRole("button", { name: "Stop" }).click();
    await ended(reply(p));
    assert.match(await reply(p).locator("footer").textContent(), /stopped/);
    free();
    await p.unroute("**/v1/chat/completions");
    await p.getByText("New conversation").click();
});

await check("two models side by side get the same prompt", async () => {
    await p.getByLabel("Compare two models").check();
    await p.getByLabel("Model 2").first().locator("select").selectOption("critic");
    const models = [];
    p.on("request", (r) => /completions/.test(r.url()) && models.push(r.postDataJSON().model));
    await chat(p, "copy red blue");
    await ended(reply(p, 0));
    await ended(reply(p, 1));
    assert.deepEqual(models.sort(), ["critic", "fry-1"]);
    assert.deepEqual(await p.locator(".user").allTextContents(), ["copy red blue", "copy red blue"]);
    await p.screenshot({ path: join(shots, "side-by-side.png") });
    await p.getByText("New conversation").click();
    await p.getByLabel("Compare two models").uncheck();
});

await check("a mix of adapters; the server's error message is shown", async () => {
    await p.locator(".picker select").selectOption("*");
    await p.getByLabel("Weighted sum of adapters").fill("critic*0.5+fry-1");
    await chat(p, "3 + 4");
    await ended(reply(p));
    assert.match(await reply(p).locator("footer").textContent(), /tokens/);
    await p.getByLabel("Weighted sum of adapters").fill("nobody*1");
    await provoke(/completions/, async () => {
        await chat(p, "3 + 4");
        await ended(reply(p));
    });
    assert.match(await reply(p).locator(".error").textContent(), /the model 'nobody' does not exist/);
    await p.screenshot({ path: join(shots, "refused.png") });
    await p.getByText("New conversation").click();
});

await check("a team's turns can be unfolded", async () => {
    await p.locator(".picker select").selectOption("team:careful");
    await chat(p, "3 + 4 = ?");
    await ended(reply(p));
    await reply(p).locator(".team-turns summary").click();
    const turns = await reply(p).locator("pre").textContent();
    for (const name of ["doubter", "実務家", "explorer"]) assert.ok(turns.includes(name + ":"), turns);
    await p.screenshot({ path: join(shots, "team.png") });
    await p.locator(".picker select").selectOption("fry-1");
    await p.getByText("New conversation").click();
});

await check("an agent's steps can be unfolded", async () => {
    await p.locator(".picker select").selectOption("agent:helper");
    await chat(p, "3 + 4 = ?");
    await ended(reply(p));
    assert.equal(await reply(p).locator("footer .error").count(), 0);
    const tree = reply(p).locator(".steps"), steps = tree.locator("li"), closed = () => tree.locator("details[open]").count();
    assert.match(await tree.locator("> summary").textContent(), /^Steps: 1 · Confidence [\d.< ]+ %$/);
    assert.equal(await closed() + (await tree.evaluate((e) => +e.open)), 0, "the tree is not collapsed");
    await tree.locator("> summary").click();
    assert.deepEqual(await steps.locator("summary b").allTextContents(), ["answer"]);
    assert.match(await steps.nth(0).locator("summary small").textContent(), /^ [\d.< ]+ % · [\d.]+ m?s$/);
    assert.equal(await closed(), 0, "a step is not collapsed");
    await p.keyboard.press("Tab"); // the focus is on the summary of the tree
    await p.keyboard.press("Enter");
    await steps.nth(0).getByText("Thought").waitFor();
    assert.match(await steps.nth(0).locator("pre").textContent(), /\S/);
    assert.deepEqual(await steps.nth(0).locator(".bars code").allTextContents().then((all) => all.sort()), ["answer", "clock"]);
    assert.equal(await reply(p).locator(".team-turns").isVisible(), false);
    await p.reload();
    await steps.locator("summary b", { hasText: "answer" }).waitFor({ state: "attached" }); // stored with the chat
    await p.locator(".picker select").selectOption("fry-1");
    await p.getByText("New conversation").click();
});

await check("an agent's steps appear as they arrive, and stay unfolded", async () => {
    const q = await page_of(await context({})), evil = '<img src=x onerror="document.title=1">', tree = reply(q).locator(".steps"), steps = tree.locator("li");
    await scripted_chat(q);
    await q.locator(".picker select").selectOption("agent:helper");
    await chat(q, "where?");
    await q.waitForFunction(() => window.say);
    const chunk = (delta, shoal) => q.evaluate((all) => window.say(all), `data: ${JSON.stringify({ choices: [{ index: 0, delta, shoal }] })}\n\n`);
    const many = Object.fromEntries(Array.from({ length: 9 }, (_, i) => [`tool${i}`, 0.02 * i]));
    const call = { thought: "look", tool: "files__read", arguments: { path: evil }, observation: evil, failed: true, seconds: 0.25, probabilities: { ...many, files__read: 0.001, answer: 0.2 } };
    await chunk({ reasoning_content: "thought: look\n" }, { step: call });
    await tree.locator("> summary", { hasText: "Steps: 1" }).click();
    await steps.locator("summary").click();
    assert.deepEqual(await steps.locator("pre").allTextContents(), ["look", JSON.stringify({ path: evil }, null, 1), evil]);
    assert.equal(await steps.locator("summary").textContent(), "files__readfailed 0.1 % · 250 ms");
    assert.deepEqual(await steps.locator(".bars code").allTextContents(), ["answer", "tool8", "tool7", "tool6", "tool5", "files__read"]);
    assert.equal(await steps.locator(".bars .selected code").textContent(), "files__read");
    await chunk({}, { step: { ...call, thought: "", tool: null, arguments: null, observation: null, failed: false } });
    await chunk({ content: "there" });
    await chunk({}, { agent: { confidence: 0.5, calibrated: 0.75 } });
    await q.evaluate(() => window.say("data: [DONE]\n\n"));
    await ended(reply(q));
    assert.equal(await tree.locator("> summary").textContent(), "Steps: 2 · Confidence 75 %");
    assert.equal(await steps.nth(0).locator("details").evaluate((e) => e.open), true, "a new step folds the others");
    assert.equal(await reply(q).locator(".reply-text").textContent(), "there");
    assert.equal(await q.locator("main img").count(), 0);
    for (const width of [1280, 375]) {
        await q.setViewportSize({ width, height: 800 });
        assert.deepEqual(await q.evaluate(faults), []);
        await q.screenshot({ path: join(shots, `steps-${width}.png`) });
    }
    await q.context().close();
});

await check("markup from a model is text", async () => {
    const evil = '<img src=x onerror="document.title=1"><b>x</b>';
    const chunk = (delta, finish = null) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, logprobs: null, finish_reason: finish }] })}\n\n`;
    await p.route("**/v1/chat/completions", (r) => r.fulfill({ contentType: "text/event-stream",
        body: chunk({ content: evil }) + chunk({}, "stop") + "data: [DONE]\n\n" }));
    await chat(p, evil);
    await ended(reply(p));
    assert.equal(await reply(p).locator(".reply-text").textContent(), evil);
    assert.equal(await p.locator("main img, main b").count(), 0);
    await p.unroute("**/v1/chat/completions");
    await p.getByText("New conversation").click();
});

/* ---- debate, blackboard */

/** A server that says what we tell it to, when we do: window.say(event, data), window.say() for the end. */
const scripted = (q, path) => q.evaluate((at) => {
    const real = window.fetch;
    window.gone = false;
    window.fetch = async (to, o) => {
        if (!to.includes(at)) return real(to, o);
        let stream;
        window.asked = JSON.parse(o.body);
        o.signal.addEventListener("abort", () => {
            window.gone = true;
            stream.error(new DOMException("stopped", "AbortError"));
        });
        return new Response(new ReadableStream({ start: (c) => {
            stream = c;
            window.say = (event, data) => {
                c.enqueue(new TextEncoder().encode(event ? `event: ${event}\ndata: ${JSON.stringify(data)}\n\n` : "data: [DONE]\n\n"));
                if (!event) c.close();
            };
        } }));
    };
}, path);
const say = (q, event, data) => q.evaluate(([e, v]) => window.say(e, v), [event, data]);

await check("a debate is shown by rounds, with votes", async () => {
    await go(p, "debate");
    await p.getByLabel("Question").fill("pick the smallest of 4, 9, 2");
    await p.getByLabel("Choices").fill("4\n9\n2");
    await p.getByRole("button", { name: "Start the debate" }).click();
    await p.locator(".decided").waitFor();
    assert.equal(await p.locator(".round").count(), 2);
    assert.equal(await p.locator(".turn").count(), 6);
    const answers = await p.locator(".turn .answer").allTextContents();
    assert.ok(answers.every((a) => ["4", "9", "2"].includes(a)), answers.join());
    for (const column of [2, 3])
        assert.equal((await p.locator(`.votes td.num:nth-child(${column})`).allTextContents()).map(Number).reduce((a, b) => a + b), 3);
    const whole = await api("/v1/debate", { team: "careful", question: "pick the smallest of 4, 9, 2", choices: ["4", "9", "2"] });
    assert.equal(await p.locator(".decided .answer").textContent(), whole.answer);
    assert.deepEqual(await p.locator(".turn p").allTextContents(), whole.said.map((u) => u.text.trim()));
    await p.screenshot({ path: join(shots, "debate.png"), fullPage: true });
});

await check("turns appear while they are generated, changed answers are marked, votes are counted immediately", async () => {
    const q = await page_of(await context(), "debate");
    await q.locator("option", { hasText: "careful" }).waitFor({ state: "attached" });
    await scripted(q, "/v1/debate");
    await q.getByLabel("Question").fill("q");
    await q.getByRole("button", { name: "Start the debate" }).click();
    const turn = (round, name, answer, before) => say(q, "turn", { name, round, text: "x", answer, confidence: 0.5, flip: !!before, before });
    const rows = () => q.locator(".votes tbody tr").evaluateAll((all) => all.map((r) => [...r.cells].map((c) => c.textContent)));
    await q.waitForFunction(() => window.say);
    assert.equal(await q.evaluate(() => window.asked.stream), true);
    await turn(0, "a", "4");
    await q.locator(".turn").waitFor();
    assert.equal(await q.locator(".votes tr").count(), 0);
    await turn(0, "b", "9");
    await say(q, "vote", { round: 0, scores: { 4: 1, 9: 1 }, answer: "4" });
    await q.locator(".votes tr.selected").waitFor();
    assert.deepEqual(await rows(), [["4", "1", "1", "", "1.00"], ["9", "1", "1", "", "1.00"]]);
    await turn(1, "a", "9", "4");
    await say(q, "vote", { round: 1, scores: { 4: 0, 9: 2 }, answer: "9" });
    await q.locator(".flipped").waitFor();
    assert.match(await q.locator(".flipped footer").textContent(), /4 → 9.*changed/);
    await q.waitForFunction(() => document.querySelector(".votes tr.selected").cells[4].textContent === "2.00");
    assert.deepEqual(await rows(), [["9", "1", "2", "", "2.00"], ["4", "1", "0", "", "0.00"]]);
    await q.getByText("The debate is running").waitFor();
    await go(q, "chat");
    await turn(1, "b", "9");
    await go(q, "debate"); // it continued meanwhile
    await q.locator(".turn").nth(3).waitFor();
    assert.equal(await q.locator(".turn").count(), 4);
    await q.getByRole("button", { name: "Stop" }).click();
    await q.getByRole("button", { name: "Start the debate" }).waitFor();
    await q.getByText("stopped").waitFor();
    assert.equal(await q.evaluate(() => window.gone), true);
    assert.equal(await q.locator(".turn").count(), 4, "what was said is gone");
    await q.context().close();
});

await check("blackboard: entries appear on it, the answer above", async () => {
    await go(p, "ask");
    await p.getByRole("textbox", { name: "Question" }).fill("What is 3 + 4?");
    await p.getByLabel("Agents").fill("4");
    await p.getByLabel("Iterations").fill("2");
    await p.getByLabel("Role type").selectOption("planning");
    const [sent] = await Promise.all([p.waitForRequest(/ask/), p.getByRole("button", { name: "Ask the team" }).click()]);
    const asked = sent.postDataJSON();
    assert.deepEqual([asked.agents, asked.role_type, asked.language, asked.stream], [4, "planning", "auto", true]);
    await p.locator(".outcome .full-text").waitFor();
    const whole = await api("/v1/ask", { ...asked, stream: false });
    assert.equal(await p.locator(".outcome .full-text").textContent(), whole.answer);
    assert.deepEqual(await p.locator(".round h3").allTextContents(), ["Input", "Iteration 1", "Iteration 2", "answer"]);
    const spoken = whole.board.filter((e) => e.agent);
    assert.equal(await p.locator(".note.agent").count(), 8);
    assert.equal(await p.locator(".note.summary").count(), 2);
    assert.deepEqual(await p.locator(".note.agent, .note.summary, .note.output").locator(".text").allTextContents(), spoken.map((e) => e.value.trim() || "–"));
    assert.deepEqual((await p.locator(".note.agent b").allTextContents()).slice(0, 4), whole.roles.map((r) => r.name));
    await p.screenshot({ path: join(shots, "blackboard.png"), fullPage: true });
    await p.locator(".note.agent").nth(5).press("Enter");
    const dialog = p.getByRole("dialog", { name: whole.roles[1].name });
    await dialog.waitFor();
    const entry = spoken.filter((e) => e.role === "agent")[5];
    assert.equal(await dialog.locator(".full-text").textContent(), entry.value.trim());
    assert.deepEqual(await dialog.locator("pre").allTextContents(), entry.messages.map((m) => m.content));
    await p.screenshot({ path: join(shots, "blackboard-entry.png") });
    await p.keyboard.press("Escape");
    await dialog.waitFor({ state: "detached" });
    assert.ok(await p.locator(".note.agent").nth(5).evaluate((e) => e === document.activeElement), "the focus is lost");
});

await check("blackboard: conversations are restored after a reload, searched, renamed and deleted", async () => {
    const q = await page_of(await context({}), "ask"), links = q.locator("aside .item-list a"), exchanges = q.locator(".exchanges li");
    const ask = async (text) => {
        await q.getByRole("textbox", { name: "Question" }).fill(text);
        await q.getByRole("button", { name: "Ask the team" }).click();
        await q.locator(".exchanges .question", { hasText: text }).waitFor();
    };
    await q.getByText("No stored conversations.").waitFor();
    await q.getByLabel("Agents").fill("1");
    await q.getByLabel("Iterations").fill("1");
    await q.getByLabel("Conversation", { exact: true }).fill("空 & sky/1");
    await ask("My name is Anna.");
    for (let i = 0; i < 3; i++) await api("/v1/ask", { question: `富士山 ${i}`, conversation: "空 & sky/1", agents: 1, iterations: 1, max_tokens: 4 });
    await q.getByRole("button", { name: "New conversation" }).click();
    assert.equal(await exchanges.count(), 0);
    await ask("Hello there");
    assert.equal(await links.count(), 2);
    await q.reload();
    await links.filter({ hasText: "My name is Anna." }).click();
    await exchanges.nth(3).waitFor();
    const { data } = await api("/v1/conversations/" + encodeURIComponent("空 & sky/1"));
    assert.deepEqual(await q.locator(".exchanges .full-text").allTextContents(), data.map((x) => x.assistant));
    assert.equal(await q.getByLabel("Conversation", { exact: true }).inputValue(), "空 & sky/1");
    await q.getByRole("searchbox").fill("富士山");
    await links.nth(2).waitFor();
    await q.screenshot({ path: join(shots, "conversations.png"), fullPage: true });
    await q.getByRole("searchbox").fill("nothing like it");
    await q.getByText("Nothing found.").waitFor();
    await q.getByRole("searchbox").fill("");
    await q.locator(".exchanges").getByRole("button", { name: "Rename" }).click();
    await q.getByRole("dialog").getByLabel("Title").fill("<b>空</b>");
    await q.getByRole("dialog").getByRole("button", { name: "Rename" }).click();
    await links.filter({ hasText: "<b>空</b>" }).waitFor();
    await q.locator(".exchanges").getByRole("button", { name: "Delete" }).click();
    await q.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
    await links.nth(1).waitFor({ state: "detached" });
    assert.deepEqual((await api("/v1/conversations")).data.map((c) => c.title), ["Hello there"]);
    assert.equal(await q.getByLabel("Conversation", { exact: true }).inputValue(), "");
    await q.context().close();
});

await check("blackboard: the report of the night, with facts, recall, verdict, versions, a rollback and the deletion", async () => {
    await api("/v1/ask", { question: "My name is Zorvan.", conversation: "night", agents: 1, iterations: 1, max_tokens: 4 });
    const q = await page_of(await context({}), "ask"), report = q.getByRole("region", { name: "Report of the night" });
    const versions = report.locator("ul.memories > li"), slow = { timeout: 240000 };
    await report.getByRole("button", { name: "Sleep now" }).click();
    await report.getByText("Published: recall improved").waitFor(slow);
    assert.equal(await versions.count(), 1);
    assert.match(await versions.textContent(), /Version 1 · current.*recall: 0 % → [1-9]\d* % \(n = 2\).*Zorvan name · [12] of 2 questions answered · exchange 1 of “night”/);
    assert.equal(await report.getByRole("button", { name: /Restore/ }).count(), 0);
    await api("/v1/ask", { question: "I live in Osaka.", conversation: "night", agents: 1, iterations: 1, max_tokens: 4 });
    await report.getByRole("button", { name: "Sleep now" }).click();
    await versions.nth(1).waitFor(slow);
    assert.match(await versions.first().textContent(), /Version 2 · current/);
    assert.match(await versions.first().locator("ul").textContent(), /^Osaka residence/); // the new fact only
    assert.deepEqual(await q.evaluate(faults), []);
    await q.screenshot({ path: join(shots, "sleep.png"), fullPage: true });
    await report.getByRole("button", { name: "Restore: 1" }).click();
    await versions.nth(1).getByText("Version 1 · current").waitFor();
    assert.equal((await api("/v1/sleep")).versions[1].current, true);
    await q.setViewportSize({ width: 375, height: 720 });
    assert.deepEqual(await q.evaluate(faults), []);
    await q.screenshot({ path: join(shots, "sleep-375.png"), fullPage: true });
    await q.setViewportSize({ width: 1280, height: 800 });
    const memories = q.getByRole("region", { name: "Memories" });
    await memories.getByRole("button", { name: "Delete: Zorvan" }).click();
    await q.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
    await versions.first().getByText("It still knows 1 forgotten memories").waitFor();
    await versions.nth(1).getByText("a deleted memory").waitFor();
    await report.getByRole("button", { name: "Delete" }).click();
    await q.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
    await versions.first().waitFor({ state: "detached" });
    assert.deepEqual((await api("/v1/sleep")).versions, []);
    const evil = '<img src=x onerror="document.title=1">', figures = { n: 2, before: { value: 0 }, after: { value: 1 } };
    const version = { number: evil, hash: evil, created: evil, current: false, forgotten: [], recall: figures, retention: { sets: [{ ...figures, name: evil }] },
        learned: [{ id: 1, attribute: evil, value: evil, text: evil, source: { conversation: evil, turn: 1 }, new: true, after: 1 }] };
    await q.route("**/v1/sleep", (r) => r.fulfill({ json: { memories: 1, at: evil, job: null, result: { published: false, why: evil, recall: figures, retention: null }, versions: [version] } }));
    await q.reload();
    await report.getByText(`Not published: ${evil}`).waitFor();
    await versions.getByText(`exchange 1 of “${evil}”`).waitFor();
    assert.equal(await q.locator("main img").count(), 0, "markup in a report is no text");
    await api("/v1/conversations/night", null, "DELETE");
    await q.context().close();
});

await check("blackboard: memories are listed with their source, deleted, undone, and go with their conversation", async () => {
    const q = await page_of(await context({}), "ask"), list = q.getByRole("region", { name: "Memories" }), items = list.locator("li");
    const tell = (question, conversation) => api("/v1/ask", { question, conversation, agents: 1, iterations: 1, max_tokens: 4 });
    const confirm = async (name) => q.getByRole("dialog").getByRole("button", { name }).click();
    await list.getByText("No memories yet.").waitFor();
    await tell("I live in Osaka.", "facts & <b>");
    for (let i = 0; i < 24; i++) await tell(`${i} 富士山?`, "facts & <b>");
    await tell("I have a cat called Momo. I like tea.", "facts & <b>");
    await tell("My name is Anna.", "more");
    await q.reload();
    await items.filter({ hasText: "Osaka" }).waitFor();
    assert.equal(await items.count(), (await api("/v1/memories")).data.length);
    const osaka = items.filter({ hasText: "Osaka" });
    assert.match(await osaka.textContent(), /residence · \d{4}-\d\d-\d\d .* · exchange 1 of “facts & <b>”/);
    await osaka.getByRole("link").click(); // the oldest of 26 exchanges: two pages are loaded
    await q.locator('.exchanges li[data-number="1"]', { hasText: "I live in Osaka." }).waitFor();
    await q.waitForFunction(() => document.activeElement.dataset.number === "1");
    assert.equal(await q.locator(".exchanges li").count(), 26);
    assert.deepEqual(await q.evaluate(faults), []);
    await q.screenshot({ path: join(shots, "memories.png"), fullPage: true });
    await items.filter({ hasText: "Anna" }).getByRole("button").click();
    await confirm("Cancel");
    await q.getByRole("dialog").waitFor({ state: "detached" });
    assert.equal(await items.filter({ hasText: "Anna" }).count(), 1);
    await items.filter({ hasText: "Anna" }).getByRole("button", { name: "Delete: Anna" }).click();
    await confirm("Delete");
    await list.getByText("Memory deleted: Anna").waitFor();
    await items.filter({ hasText: "Anna" }).waitFor({ state: "detached" });
    await tell("I live in Kyoto.", "more");
    await q.reload();
    await items.filter({ hasText: "Kyoto" }).waitFor();
    assert.equal(await items.filter({ hasText: "Osaka" }).count(), 0);
    await list.getByRole("button", { name: "Undo last change" }).click();
    await osaka.waitFor();
    assert.equal(await items.filter({ hasText: "Kyoto" }).count(), 0);
    await q.setViewportSize({ width: 375, height: 720 });
    assert.deepEqual(await q.evaluate(faults), []);
    await q.screenshot({ path: join(shots, "memories-375.png"), fullPage: true });
    await q.setViewportSize({ width: 1280, height: 800 });
    await osaka.getByRole("link").click();
    await q.locator(".exchanges").getByRole("button", { name: "Delete" }).click();
    await confirm("Delete");
    await list.getByText("No memories yet.").waitFor();
    assert.deepEqual((await api("/v1/memories?ended=true")).data, []);
    const evil = '<img src=x onerror="document.title=1">';
    await q.route("**/v1/memories?*", (r) => r.fulfill({ json: { data: [{ id: 1, attribute: evil, value: evil, text: evil, source: { conversation: evil, turn: 1, time: evil } }] } }));
    await q.reload();
    await items.filter({ hasText: `exchange 1 of “${evil}”` }).waitFor();
    assert.equal(await q.locator("main img").count(), 0, "markup in a memory is no text");
    await api("/v1/conversations/more", null, "DELETE");
    await q.context().close();
});

await check("blackboard: the active role is shown, an entry appears immediately, and it can be stopped", async () => {
    const q = await page_of(await context({ viewport: { width: 375, height: 720 } }), "ask");
    await scripted(q, "/v1/ask");
    await q.getByRole("textbox", { name: "Question" }).fill("q");
    await q.getByRole("button", { name: "Ask the team" }).click();
    await q.waitForFunction(() => window.say);
    await say(q, "entry", { seq: 1, key: "input", value: "q" });
    await say(q, "step", { role: "agent", iteration: 1, agents: 2 });
    await q.getByText("Agents still generating: 2").waitFor();
    assert.equal(await q.locator(".note").count(), 1);
    await say(q, "entry", { seq: 2, key: "agent_0_output", value: "one <b>".repeat(90), agent: "1 Critic", role: "agent", iteration: 1, messages: [] });
    await q.getByText("Agents still generating: 1").waitFor();
    await q.locator(".note.agent").waitFor();
    await say(q, "entry", { seq: 3, key: "agent_1_output", value: "", agent: "2 Maker", role: "agent", iteration: 1, messages: [], failed: "no room" });
    await q.locator(".note", { hasText: "no room" }).waitFor();
    assert.equal(await q.locator(".generating").count(), 0);
    await say(q, "step", { role: "summary", iteration: 1, agents: 1 });
    await q.locator(".generating").waitFor();
    await q.screenshot({ path: join(shots, "blackboard-375.png"), fullPage: true });
    assert.deepEqual(await q.evaluate(faults), []);
    await q.getByRole("button", { name: "Stop" }).click();
    await q.getByText("stopped").waitFor();
    assert.equal(await q.locator(".generating").count(), 0);
    assert.equal(await q.evaluate(() => window.gone), true);
    assert.equal(await q.locator(".note").count(), 3);
    await q.context().close();
});

/* ---- agents, system, jobs */

await check("agents: the statistics of each; an adapter is unloaded and loaded", async () => {
    await go(p, "agents");
    const row = p.locator("tr", { hasText: "critic" });
    await row.waitFor();
    assert.ok(Number(await row.locator("td").nth(0).textContent()) >= 1);
    assert.ok(Number(await p.locator("tr", { hasText: "fry-1" }).first().locator("td").nth(2).textContent()) > 0);
    await row.getByRole("button").click();
    await row.waitFor({ state: "detached" });
    await p.getByLabel("Name", { exact: true }).fill("critic");
    await p.getByLabel("Path").fill(adapter);
    await p.getByRole("button", { name: "Load", exact: true }).click();
    await row.waitFor();
    await p.getByText("doubter").first().waitFor();
    await provoke(/load_lora/, async () => {
        await p.getByLabel("Name", { exact: true }).fill("critic");
        await p.getByLabel("Path").fill(adapter);
        await p.getByRole("button", { name: "Load", exact: true }).click();
        await p.locator(".notice").waitFor();
    });
    assert.match(await p.locator(".notice").textContent(), /already been loaded/);
    await p.screenshot({ path: join(shots, "agents.png") });
    await p.locator(".notice button").click();
});

await check("system: values are updated", async () => {
    await go(p, "system");
    await p.locator(".u-over").nth(5).waitFor();
    const facts = async () => Object.fromEntries(await p.locator(".facts div").evaluateAll((all) => all.map((d) => [d.children[0].textContent, d.children[1].textContent])));
    await until(async () => Number((await facts())["Generated tokens"]?.replace(/,/g, "")) > 40, "no token is told");
    assert.match((await facts()).Memory, /^[\d.]+ MB$/);
    assert.match(await p.locator("tr", { hasText: "Whole request" }).textContent(), /\d m?s/);
    await until(async () => (await painted(p.locator(".charts canvas").nth(4))) > 20, "no curve is drawn");
    await p.screenshot({ path: join(shots, "system.png") });
});

await check("system: the nodes of a cluster", async () => {
    const c = await context({}), q = await c.newPage();
    await q.goto(with_nodes + "/#/system");
    const rows = q.locator("tr", { hasText: "local-" });
    await rows.nth(1).waitFor();
    assert.equal(await rows.count(), 2);
    for (const text of await rows.allTextContents()) assert.match(text, /local-.*up/);
    await q.screenshot({ path: join(shots, "nodes.png"), fullPage: true });
    await c.close();
});

if (hasJobs)
    await check("a job is started, watched, drawn and deleted", async () => {
        await go(p, "jobs");
        await p.locator(".new-form").getByLabel("Kind").selectOption("world");
        await p.locator(".new-form summary").nth(1).click();
        const raw = p.getByLabel("Request");
        await raw.fill(JSON.stringify({ kind: "world", args: [], options: { policy: ["rule", "random", "reflex"], maps: 6, steps: 100 } }));
        assert.equal(await p.locator(".options .row").count(), 3);
        await p.getByRole("button", { name: "Start" }).click();
        await p.locator(".job .state.done").waitFor({ timeout: 180000 });
        await p.locator(".detail canvas").waitFor();
        assert.ok((await p.locator(".fields input").count()) > 5);
        await p.locator(".fields label", { hasText: "survival.value" }).click();
        await p.locator(".u-legend", { hasText: "survival.value" }).waitFor();
        assert.ok((await p.locator(".events li").count()) >= 1);
        await until(async () => (await painted(p.locator(".detail canvas"))) > 20, "no curve is drawn");
        await p.screenshot({ path: join(shots, "job.png"), fullPage: true });
        await p.getByText("Lines of results: 5").click();
        assert.match(await p.locator(".detail section pre").textContent(), /"policy":"rule"/);
        await p.getByRole("button", { name: "Delete" }).click();
        await p.locator(".detail .job").waitFor({ state: "detached" });
    });
else console.log("skip page: jobs: this server has none");

/* ---- worlds, evolution, experiments */

const address = (p, hash) => p.evaluate((h) => (location.hash = h), hash);
const tick_of = (p) => p.locator(".stage output").textContent();

if (hasJobs)
    await check("a small simulation is started and followed to its end", async () => {
        await go(p, "world");
        await p.waitForFunction(() => document.querySelectorAll(".new-form summary").length === 1); // the other view is removed
        await p.locator(".new-form summary").click();
        const form = p.locator(".new-form form");
        await form.getByLabel("Name").fill("life");
        for (const [label, n] of [["Generations", 2], ["Ticks", 20], ["Agents", 4]]) await form.getByLabel(label).fill(String(n));
        await form.getByRole("button", { name: "Start" }).click();
        await p.locator(".chip").nth(3).waitFor({ timeout: 180000 });
        await p.getByLabel("Follow").check();
        await p.waitForFunction(() => document.querySelector(".stage output")?.textContent === "20 / 20" &&
            document.querySelectorAll("main .grid select")[1]?.value === "2", null, { timeout: 90000 });
        await p.getByLabel("Follow").uncheck();
        await until(async () => (await painted(p.locator("canvas.world"))) > 20, "no agent is drawn");
    });
else console.log("skip page: a life as a job: this server has none");

await check("a simulation is played, stepped through and inspected", async () => {
    await address(p, `#/world/${lived}`);
    await p.locator(".chip").nth(5).waitFor();
    assert.equal(await tick_of(p), "0 / 12");
    await p.getByLabel("Speed").selectOption("30");
    await p.getByRole("button", { name: "Play" }).click();
    await p.waitForFunction(() => document.querySelector(".stage output").textContent === "12 / 12");
    await p.getByRole("button", { name: "Play" }).waitFor(); // it stops at its end
    await p.getByLabel("Previous tick").click();
    assert.equal(await tick_of(p), "11 / 12");
    await p.getByRole("slider").fill("5");
    await p.waitForFunction(() => document.querySelector(".stage output").textContent === "5 / 12");
    await p.locator("canvas.world").focus();
    await p.keyboard.press("ArrowLeft");
    await p.waitForFunction(() => document.querySelector(".stage output").textContent === "4 / 12");

    const frames = await api(`/v1/worlds/frames?run=${lived}&generation=1&from=4&n=1`);
    const i = frames.frames[0].agents.findIndex(Boolean), [x, y, energy] = frames.frames[0].agents[i];
    const box = await p.locator("canvas.world").boundingBox(), cell = box.width / frames.size;
    const [asked] = await Promise.all([p.waitForRequest(/worlds\/agent/),
        p.locator("canvas.world").click({ position: { x: (x + 0.5) * cell, y: (frames.size - y - 0.5) * cell } })]);
    const chosen = Number(new URL(asked.url()).searchParams.get("agent"));
    assert.deepEqual(frames.frames[0].agents[chosen].slice(0, 2), [x, y]);
    const v = await api(`/v1/worlds/agent?run=${lived}&generation=1&tick=4&agent=${chosen}&model=fry-1`);
    await p.locator(".agent-details .bars").waitFor();
    const shown = await p.locator(".agent-details").textContent();
    assert.ok(shown.includes(v.observation) && shown.includes(v.prompt), shown);
    if (chosen === i) assert.equal(v.energy, energy);
    assert.equal(await p.locator(".agent-details dd").first().textContent(), String(v.energy));
    assert.equal(await p.locator(".agent-details .selected code").textContent(), v.action);
    const shares = (await p.locator(".agent-details .bars .num").allTextContents()).map(parseFloat);
    assert.deepEqual(shares.map(Math.round), Object.values(v.probabilities).map((s) => Math.round(100 * s)));
    const [again] = await Promise.all([p.waitForRequest(/model=critic/), p.getByLabel("Model for action probabilities").selectOption("critic")]);
    assert.equal(new URL(again.url()).searchParams.get("tick"), "4");
    await p.getByText("Action probabilities of critic").waitFor();
    await p.screenshot({ path: join(shots, "life.png"), fullPage: true });
});

await check("evolution: curves, a family tree to click through, results", async () => {
    await go(p, "evolution");
    await p.locator(".item-list a", { hasText: "grown" }).click();
    await p.locator(".node").first().waitFor();
    const run = await api("/v1/runs/grown"), { nodes, edges, of } = run.lineage;
    assert.equal(await p.locator(".node").count(), run.generations.reduce((n, g) => n + g.candidates.length, 0));
    const text = (name) => p.locator(".tree + .panel dt", { hasText: name }).locator("+ dd").textContent();
    const kin = (name, all = new Set([name])) => {
        for (const e of edges) if (e.child === name) kin(e.parent, all.add(e.parent));
        return all;
    };
    const highlighted = async () => new Set(await p.locator(".node.ancestor title").allTextContents());
    assert.deepEqual(await highlighted(), kin(of));
    const child = [...nodes].sort((a, b) => kin(b.name).size - kin(a.name).size)[0];
    assert.ok(kin(child.name).size > 1 + edges.filter((e) => e.child === child.name).length, "nobody has grandparents");
    await p.locator(".node", { hasText: child.name }).first().click();
    assert.deepEqual(await highlighted(), kin(child.name));
    assert.equal(await text("Operator"), child.operator);
    assert.equal(await text("Hash"), child.hash);
    const from = edges.filter((e) => e.child === child.name);
    for (const e of from) assert.match(await text("Parents"), new RegExp(`${e.parent} ${Math.round(100 * e.share)} %`));
    assert.ok((await text("Fitness")).startsWith(child.fitness.value.toLocaleString("en", { maximumSignificantDigits: 3 })));
    await p.locator(".tree + .panel button").first().press("Enter");
    assert.equal(await p.locator(".tree + .panel h3").evaluate((e) => e.firstChild.data), from[0].parent);
    await p.locator(".node", { hasText: child.name }).first().focus();
    await p.keyboard.press("Space");
    assert.equal(await p.locator(".tree + .panel h3").evaluate((e) => e.firstChild.data), child.name);
    assert.equal(await p.evaluate(() => document.activeElement.getAttribute("aria-pressed")), "true", "the focus is lost");
    const rows = await p.locator("table", { hasText: "Accuracy" }).locator("tbody tr").allTextContents();
    assert.equal(rows.length, run.result.table.length);
    rows.forEach((r, i) => assert.ok(r.includes(`${(100 * run.result.table[i].acc).toFixed(1)} %`), r));
    await p.locator(".u-legend", { hasText: "doubter" }).waitFor();
    await p.screenshot({ path: join(shots, "evolution.png"), fullPage: true });
    const fitness = run.generations.at(-1).candidates.map((c) => c.fitness.value), told = p.locator(".u-legend").first().locator(".u-value");
    const digits = (v) => v.toLocaleString("en", { maximumSignificantDigits: 3 });
    assert.deepEqual((await told.allTextContents()).slice(1, 3), [fitness.reduce((a, v) => a + v) / fitness.length, Math.max(...fitness)].map(digits));
    await until(async () => (await painted(p.locator(".detail canvas").nth(2))) > 20, "no loss is drawn");
    await p.locator(".item-list a", { hasText: lived }).click(); // a run without a tree
    await p.locator(".u-legend", { hasText: "rule" }).first().waitFor();
    assert.equal(await p.locator(".node").count(), 0);
});

await check("a reply is rated and corrected, and shows its side of an experiment", async () => {
    await go(p, "chat");
    await p.locator(".picker option[value=newer]").waitFor({ state: "attached" });
    await p.locator(".picker select").selectOption("newer");
    await chat(p, "3 + 4 = ?");
    await ended(reply(p));
    assert.match(await reply(p).locator("footer .tag").textContent(), /^trial\/[ab]$/);
    const answered = () => p.waitForResponse(/feedback/).then((r) => r.json());
    const [up] = await Promise.all([answered(), reply(p).getByRole("button", { name: "Good" }).click()]);
    assert.equal(up.rating, 1);
    await reply(p).locator('[aria-label="Good"][aria-pressed="true"]').waitFor();
    await reply(p).getByRole("button", { name: "correct" }).click();
    await p.screenshot({ path: join(shots, "correction.png") });
    await p.keyboard.press("Escape");
    await p.locator(".correction").waitFor({ state: "detached" });
    await reply(p).getByRole("button", { name: "correct" }).click();
    await p.getByLabel("Corrected reply").fill("answer: 7");
    await Promise.all([answered(), p.getByRole("button", { name: "Save" }).click()]);
    await reply(p).getByRole("button", { name: "corrected" }).waitFor();
    const { data } = await api("/v1/feedback");
    assert.deepEqual([data.at(-1).id, data.at(-1).rating, data.at(-1).correction], [up.id, 1, "answer: 7"]);
    await p.screenshot({ path: join(shots, "rated.png") });
    await p.reload();
    await reply(p).locator('[aria-label="Good"][aria-pressed="true"]').waitFor();
    await p.getByText("New conversation").click();
});

await check("an experiment is started, watched until it is decided, and deleted", async () => {
    await go(p, "ab");
    await p.locator(".item-list a", { hasText: "trial" }).click();
    await p.getByRole("button", { name: "Stop" }).click();
    await p.locator(".job .state.stopped").waitFor();
    await p.getByRole("button", { name: "Delete" }).click();
    await p.locator(".detail .job").waitFor({ state: "detached" });
    await p.getByLabel("Name", { exact: true }).fill("second");
    await p.getByLabel("Model name").selectOption("newer");
    await p.getByLabel("Compared adapter").selectOption("critic");
    await p.getByRole("button", { name: "Start" }).click();
    await p.locator(".job .state.running").waitFor();
    const figures = () => api("/v1/ab/second");
    for (let i = 0; i < 200 && (await figures()).state === "running"; i++) {
        const r = await api("/v1/chat/completions", { model: "newer", messages: [{ role: "user", content: "x" }], max_tokens: 1 });
        await api("/v1/feedback", { id: r.id, rating: r.headers.get("x-shoal-ab") === "second/b" ? 1 : -1 });
        if (i % 10 === 9) await p.waitForTimeout(700); // the page polls meanwhile
    }
    await p.locator(".decision.b_better").waitFor();
    const e = await figures();
    assert.equal(e.decision, "b_better");
    const numbers = await p.locator(".detail table.list td").allTextContents();
    assert.deepEqual(numbers.map(Number), [e.requests.a, e.outcomes.a, e.mean.a, e.requests.b, e.outcomes.b, e.mean.b]);
    assert.ok((await p.locator(".detail").textContent()).includes(`/ ${e.e_value.decides_at}`));
    assert.equal(await p.locator(".bars tr.selected").count(), 1, "what has decided is not marked");
    await until(async () => (await painted(p.locator(".detail canvas"))) > 20, "no curve is drawn");
    await p.screenshot({ path: join(shots, "experiment.png"), fullPage: true });
    let held;
    await p.route("**/v1/ab/second", (r) => (r.request().method() === "DELETE" ? (held = r) : r.continue()));
    await p.getByRole("button", { name: "Delete" }).click();
    await go(p, "debate");
    await until(() => held, "the server is not asked");
    await Promise.all([p.waitForResponse((r) => r.request().method() === "DELETE"), held.continue()]);
    await p.waitForTimeout(300);
    assert.match(p.url(), /#\/debate$/, "who has left was called back");
    await p.unroute("**/v1/ab/second");
});

/* ---- keys, settings, storage */

await check("by keyboard alone", async () => {
    const press = async (...keys) => {
        for (const k of keys) await p.keyboard.press(k);
    };
    const at = (view) => p.locator(`main.${view}`).waitFor().catch((e) => assert.fail(`not at ${view} but at ${p.url()}: ${e.message}`));
    await p.locator("main").focus();
    for (const [key, view] of [["d", "debate"], ["b", "ask"], ["a", "agents"], ["j", "jobs"], ["w", "world"], ["v", "evolution"], ["x", "ab"], ["s", "system"], ["e", "settings"], ["c", "chat"]]) {
        await press("g", key);
        await at(view);
    }
    await press("/");
    assert.equal(await p.evaluate(() => document.activeElement.getAttribute("aria-label")), "Message");
    await p.keyboard.type("g d? /");
    await press("Shift+Enter");
    assert.equal(await p.locator(".composer > textarea").inputValue(), "g d? /\n");
    await p.evaluate(() => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", isComposing: true, bubbles: true })));
    assert.equal(await p.locator(".user").count(), 0, "a word that is being composed was sent");
    await p.locator(".composer > textarea").fill("");
    await press("Escape", "?");
    await p.getByRole("dialog", { name: "Keyboard shortcuts" }).waitFor();
    await p.screenshot({ path: join(shots, "help.png") });
    await press("Escape");
    assert.equal(await p.locator("dialog").evaluate((d) => d.open), false);
    await press("?", "Enter"); // its button has the focus
    assert.equal(await p.locator("dialog").evaluate((d) => d.open), false);
    await p.reload();
    await at("chat");
    await press("Tab");
    assert.equal(await p.evaluate(() => document.activeElement.id), "skip");
    await press("Tab");
    assert.ok(await p.evaluate(() => document.activeElement.matches("nav a:focus-visible") &&
        getComputedStyle(document.activeElement).outlineStyle === "solid"), "focus is not to be seen");
    const focused = () => p.evaluate(() => document.activeElement.textContent);
    await press("Tab");
    assert.equal(await focused(), "Grow");
    await press("Enter");
    await at("jobs");
    assert.equal(await focused(), "Jobs"); // from a group to its views
    await press("Tab");
    assert.equal(await focused(), "Evolution");
    await press("Enter");
    await at("evolution");
    assert.equal(await p.evaluate(() => document.activeElement.id), "main"); // from a view to its content
});

await check("a key is sent, and is kept in its tab only unless it is to be remembered", async () => {
    await go(p, "settings");
    const save = async (remember) => {
        await p.getByLabel("API key").fill("sk-nobody");
        await p.getByLabel("Remember").setChecked(remember);
        const [r] = await Promise.all([p.waitForRequest(/models/), p.getByRole("button", { name: "Save" }).click()]);
        assert.equal(r.headers().authorization, "Bearer sk-nobody");
        return p.evaluate(() => [sessionStorage.getItem("shoal.key"), localStorage.getItem("shoal.key")]);
    };
    assert.deepEqual(await save(false), ["sk-nobody", null]);
    assert.deepEqual(await save(true), [null, "sk-nobody"]);
    await p.getByLabel("API key").fill("");
    await p.getByRole("button", { name: "Save" }).click();
    await p.getByText("The server accepts the key.").waitFor();
    assert.deepEqual(await p.evaluate(() => [sessionStorage.getItem("shoal.key"), localStorage.getItem("shoal.key")]), [null, null]);
    await p.getByLabel("API key").fill(token); // the next checks need it
    await p.getByRole("button", { name: "Save" }).click();
    await p.getByText("The server accepts the key.").waitFor();
});

await check("backups are made, checked, restored at the next start, deleted", async () => {
    await go(p, "settings");
    const part = p.locator(".backups"), rows = part.locator("tbody tr");
    await part.getByText("No backups yet.").waitFor();
    await part.getByRole("button", { name: "Back up now" }).click();
    await part.getByText(/^Backup created: .* of which/).waitFor();
    assert.equal(await rows.count(), 1);
    await part.getByRole("button", { name: "Back up now" }).click();
    await rows.nth(1).waitFor();
    assert.match(await rows.nth(0).locator("td").nth(0).textContent(), /\d/);
    await part.getByText(/^Backup created: /).waitFor();
    await rows.nth(0).getByRole("button", { name: /^Verify/ }).click();
    await part.getByText(/are intact/).waitFor();

    await rows.nth(0).getByRole("button", { name: /^Restore/ }).click();
    await p.locator("dialog[open]").getByText("next start of the server").waitFor();
    await p.keyboard.press("Enter"); // cancel has the focus
    await p.locator("dialog[open]").waitFor({ state: "detached" });
    assert.equal((await api("/v1/backups")).restore, null);
    await rows.nth(0).getByRole("button", { name: /^Restore/ }).click();
    await p.locator("dialog[open]").getByRole("button", { name: "Restore" }).click();
    await part.locator(".notice").getByText("next start of the server").waitFor();
    const { restore, backups } = await api("/v1/backups");
    assert.equal(restore.id, backups[0].id);
    await p.screenshot({ path: join(shots, "backups.png") });
    await p.setViewportSize({ width: 375, height: 720 });
    assert.deepEqual(await p.evaluate(faults), []);
    await p.screenshot({ path: join(shots, "backups-375.png") });
    await p.setViewportSize({ width: 1280, height: 800 });
    await part.locator(".notice button").click();
    await part.locator(".notice").waitFor({ state: "detached" });

    for (const left of [1, 0]) {
        await rows.nth(0).getByRole("button", { name: /^Delete/ }).click();
        await p.locator("dialog[open]").getByRole("button", { name: "Delete" }).click();
        await rows.nth(left).waitFor({ state: "detached" });
        await part.getByText(/^Backup deleted/).waitFor();
        assert.equal(await rows.count(), left);
    }
});

await check("a key that is refused leads to the settings", async () => {
    await p.route("**/v1/teams", (r) => r.fulfill({ status: 401, json: { error: { message: "no such key" } } }));
    await provoke(/teams/, async () => {
        await go(p, "agents");
        await p.locator(".notice", { hasText: "no such key" }).waitFor();
    });
    await p.locator(".notice a").click();
    await p.getByLabel("API key").waitFor();
    assert.equal(await p.locator(".notice").count(), 0);
    await p.unroute("**/v1/teams");
});

await check("the token in the address is removed from it and gives access", async () => {
    const c = await context(), q = await c.newPage();
    await q.goto(`${url}/#token=${token}`);
    await q.locator("nav a[aria-current=page]").waitFor();
    assert.equal(await q.evaluate(() => location.href), `${url}/`);
    await q.goBack().catch(() => {});
    assert.ok(!q.url().includes("token"), q.url());
    await q.goto(`${url}/#/settings`);
    assert.equal(await q.getByLabel("API key").inputValue(), token);
    assert.equal(await q.evaluate(() => localStorage.length), 0);
    await c.close();
});

await check("a server with keys: the page is served and asks for one", async () => {
    const q = await desk.newPage();
    await provoke(/v1/, async () => {
        await q.goto(locked + "/");
        await q.locator(".notice", { hasText: "key" }).locator("a").click();
        await q.getByLabel("API key").fill("sk-of-the-test");
        await q.getByRole("button", { name: "Save" }).click();
        await q.getByText("The server accepts the key.").waitFor();
    });
    await go(q, "chat");
    await q.locator('.picker option[value="fry-1"]').waitFor({ state: "attached" });
    await chat(q, "3 + 4");
    await ended(reply(q));
    assert.match(await reply(q).locator("footer").textContent(), /tokens/);
    await q.waitForTimeout(300);
    assert.equal(await q.locator(".rating").count(), 0, "a server that keeps no replies is offered ratings");
    await q.close();
});

await check("language and theme are switched and remembered", async () => {
    await p.getByLabel("Language").selectOption("ja");
    await p.getByLabel("テーマ").selectOption("dark");
    await p.reload();
    assert.equal(await p.locator("nav a[aria-current=page]").textContent(), "設定");
    assert.equal(await p.evaluate(() => document.documentElement.dataset.theme), "dark");
    await p.getByLabel("言語").selectOption("");
    await p.getByLabel("Theme").selectOption("");
    assert.equal(await p.locator("html").getAttribute("lang"), "en");
});

await check("a server that is down is reported, once", async () => {
    await go(p, "system");
    await provoke(/metrics/, async () => {
        await p.route("**/v1/metrics", (r) => r.abort());
        await p.locator(".notice", { hasText: "does not answer" }).waitFor();
        await p.waitForTimeout(4500);
        assert.equal(await p.locator(".notice").count(), 1);
        await p.unroute("**/v1/metrics");
        await p.locator(".notice").waitFor({ state: "detached" }); // the server runs again
    });
});

await check("nothing was written to the console", async () => assert.deepEqual(said, []));
await check("no request went to another host", async () => assert.deepEqual(strangers, []));
await browser.close();
process.exit(failed ? 1 : 0);
