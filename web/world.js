// World: a life of minds, tick by tick as it was or is lived, and any agent of it from the inside.
import { json, models } from "./api.js";
import { bars, complain, every, fill, h, labelled, load, mover, number, option, save } from "./dom.js";
import { t } from "./words.js";

const PIECE = 100, KEPT = 5000; // frames that are asked for at once, that are kept
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789@&";
const FOOD = 1, MATERIAL = 2; // what an agent holds
const speeds = [1, 2, 5, 10, 30, 100]; // ticks a second

/* which lives there are */

const name_of = (out) => out.slice(out.lastIndexOf("/") + 1);

/** [{id, state, job}]: what jobs of this server have written, and runs of the command line. Newest first. */
async function lives(signal) {
    const [jobs, runs] = await Promise.all([
        // A key that may chat only still sees the runs.
        json("/v1/jobs", { signal }).then((v) => v.jobs, (e) => (e.status === 403 || e.status === 404 ? [] : Promise.reject(e))),
        json("/v1/runs", { signal }).then((v) => v.runs),
    ]);
    const of_jobs = jobs.filter((j) => j.kind === "world" && j.options?.out)
        .map((job) => ({ id: name_of(job.options.out), state: job.state, job, at: job.created }));
    const of_runs = runs.filter((r) => r.kind === "world").map((r) => ({ id: r.id, state: r.status, at: r.created }));
    return [...of_jobs, ...of_runs].sort((a, b) => (a.at < b.at ? 1 : -1))
        .filter((l, i, all) => all.findIndex((o) => o.id === l.id) === i); // a job that went on is the same life
}

/** Whether it has frames: of a run that nobody but its command knows, only the server can say. */
const has_begun = (life) => !life.job || life.state === "done" || life.job.progress?.done > 0;

/**
 * The last generation that has frames. A job counts ticks over all generations, `planned` of them
 * each; a run says each generation that it has measured, and lives one more while it goes on.
 */
async function generations_of(life, planned, signal) {
    if (life.job) return Math.max(1, Math.ceil((life.job.progress?.done ?? 0) / Math.max(1, planned)));
    const { curve } = await json("/v1/runs/" + encodeURIComponent(life.id), { signal });
    const last = Math.max(0, ...curve.map((row) => row.generation ?? 0));
    return Math.max(1, last);
}

/* frames */

/** Frames of one generation by tick. head: what the server last said of all of it. */
class Tape {
    constructor(run, generation, signal) {
        this.path = `/v1/worlds/frames?run=${encodeURIComponent(run)}&generation=${generation}`;
        this.signal = signal;
        this.frames = new Map();
    }
    async ask(from) {
        const v = await json(`${this.path}&from=${from}&n=${PIECE}`, { signal: this.signal });
        for (const f of v.frames) this.frames.set(f.tick, f);
        for (const tick of this.frames.keys()) {
            if (this.frames.size <= KEPT) break;
            this.frames.delete(tick); // the oldest of what was asked for
        }
        this.head = v;
        // What they are born with is the most they have.
        this.full ??= Math.max(1, ...(v.frames[0]?.agents ?? []).map((a) => a?.[2] ?? 0));
    }
    /** null: it has not been lived. */
    async frame(tick) {
        if (!this.frames.has(tick)) await this.ask(tick - (tick % PIECE));
        return this.frames.get(tick) ?? null;
    }
    /** Asks for what is to be shown soon, so that playing does not wait. */
    ahead(tick) {
        const next = tick - (tick % PIECE) + PIECE;
        if (tick % PIECE !== PIECE / 2 || next > this.head.ticks || this.frames.has(next)) return;
        this.ask(next).catch(() => {}); // it is asked for again when its turn comes
    }
}

/* the picture */

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** How an agent with that share of energy looks: from full to none. */
const colour_of = (share) => `color-mix(in oklab, ${colour("--accent")} ${Math.round(100 * Math.max(0, Math.min(1, share)))}%, ${colour("--bad")})`;

/** Draws a frame; y grows to the north. */
function draw(canvas, tape, frame, chosen) {
    const side = Math.round(canvas.clientWidth * devicePixelRatio), { size, walls, homes } = tape.head, cell = side / size;
    if (!side) return;
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const g = canvas.getContext("2d");
    const corner = ([x, y]) => [x * cell, (size - 1 - y) * cell];
    const middle = (at) => corner(at).map((v) => v + cell / 2);
    const box = (at, part, fill) => {
        const [x, y] = corner(at), gap = (cell * (1 - part)) / 2;
        g.fillStyle = fill;
        g.fillRect(x + gap, y + gap, cell - 2 * gap, cell - 2 * gap);
    };
    const disc = (x, y, r, fill) => {
        g.fillStyle = fill;
        g.beginPath();
        g.arc(x, y, r, 0, 2 * Math.PI);
        g.fill();
    };
    g.fillStyle = colour("--back");
    g.fillRect(0, 0, side, side);
    walls.forEach((at) => box(at, 1, colour("--line")));
    homes.forEach((at) => {
        box(at, 1, colour("--soft"));
        g.strokeStyle = colour("--accent");
        g.lineWidth = Math.max(1, cell / 10);
        g.strokeRect(...corner(at).map((v) => v + cell * 0.08), cell * 0.84, cell * 0.84);
    });
    frame.food.forEach((at) => disc(...middle(at), cell * 0.22, colour("--series-2")));
    frame.material.forEach((at) => box(at, 0.45, colour("--series-1")));
    const predator = (at, part) => {
        const [x, y] = corner(at), tall = cell * part;
        g.fillStyle = colour("--bad");
        g.beginPath();
        g.moveTo(x + tall / 2, y + tall * 0.1);
        g.lineTo(x + tall * 0.92, y + tall * 0.9);
        g.lineTo(x + tall * 0.08, y + tall * 0.9);
        g.fill();
    };
    frame.predators.forEach((at) => predator(at, 1));
    g.textAlign = "center";
    g.textBaseline = "middle";
    g.font = `600 ${cell * 0.62}px system-ui, sans-serif`;
    // Whoever was chosen is on top of others of its cell.
    const order = frame.agents.map((_, i) => i).sort((a, b) => (a === chosen) - (b === chosen));
    for (const i of order) {
        const a = frame.agents[i];
        if (!a) continue;
        const [x, y] = middle(a);
        disc(x, y, cell * 0.46, colour_of(a[2] / tape.full));
        if (i === chosen) {
            g.strokeStyle = colour("--text");
            g.lineWidth = Math.max(2, cell / 8);
            g.stroke();
        }
        g.fillStyle = colour("--on-accent");
        g.fillText(LETTERS[i], x, y + cell * 0.04);
        if (frame.predators.some((at) => at[0] === a[0] && at[1] === a[1])) predator(a, 0.5);
        if (a[3]) disc(x + cell * 0.34, y - cell * 0.34, cell * 0.2, colour(a[3] === FOOD ? "--series-2" : "--series-1"));
    }
}

const legend = () => h("p", { class: "legend quiet" }, ["agent", "home", "food", "material", "predator", "wall"].map((id) =>
    h("span", null, h("i", { class: "mark " + id }), t("world_" + id))));

/* an agent from the inside */

const holds = (n) => t(n === FOOD ? "world_food" : n === MATERIAL ? "world_material" : "nothing");

function agent_node(v, model) {
    const facts = [
        ["energy", number(v.energy)], ["holds", holds(v.holds)], ["did", v.action ?? "–"], ["reward", number(v.reward)],
        ["total", number(v.total)], ["fitness", number(v.fitness)], ["collected", number(v.collected)],
        ["delivered", number(v.delivered)], ["bumped", number(v.blocked)],
    ];
    return [
        h("h2", null, t("agent_n", LETTERS[v.agent]), " ", h("small", null, `${t("tick")} ${number(v.tick)}`)),
        !v.alive && h("p", { class: "error" }, t("dead")),
        h("dl", { class: "facts" }, facts.map(([id, text]) => h("div", null, h("dt", null, t(id)), h("dd", null, text)))),
        v.alive && [h("h3", null, t("sees")), h("pre", null, v.observation),
            v.prompt !== v.observation && [h("h3", null, t("is_asked")), h("pre", null, v.prompt)]],
        v.probabilities && [h("h3", null, t("would_do", model)),
            bars(Object.entries(v.probabilities).map(([action, p]) => ({ text: action, p, own: action === v.action })))],
    ];
}

/* beginning one */

const worlds = ["repaired", "seed", "worlds/homes.yaml", "worlds/predators.yaml", "worlds/builders.yaml", "worlds/maze.yaml", "worlds/talk.yaml"];

/** A form for a small life; all that can be set is a job's. */
function starter(begun) {
    const out = h("input", { required: true, spellcheck: "false", pattern: "[A-Za-z0-9_][A-Za-z0-9._\\-]*", maxlength: 64, value: "life" });
    const world = h("input", { list: "worlds", spellcheck: "false", value: "repaired" });
    const count = (name, value) => h("input", { type: "number", min: 1, step: 1, required: true, name, value });
    const counts = [["generations", count("generations", 2)], ["steps", count("steps", 100)], ["agents", count("agents", 8)]];
    const form = h("form", { class: "panel", onsubmit: async (e) => {
        e.preventDefault();
        try {
            const { base } = await models();
            const options = { out: out.value.trim(), "held-out": 1, ...Object.fromEntries(counts.map(([id, f]) => [id, Number(f.value)])) };
            if (world.value.trim()) options.world = world.value.trim();
            await json("/v1/jobs", { body: { kind: "world", args: [base[0].root], options } });
            begun(out.value.trim());
        } catch (problem) {
            complain(problem);
        }
    } }, h("div", { class: "grid" }, labelled(t("name"), out), labelled(t("rules"), world), counts.map(([id, f]) => labelled(t(id), f))),
    h("datalist", { id: "worlds" }, worlds.map((w) => h("option", { value: w }))),
    h("div", { class: "row" }, h("a", { href: "#/jobs" }, t("all_options")), h("span", { class: "space" }), h("button", { type: "submit", class: "main" }, t("start"))));
    return h("details", { class: "starter", open: load("world_open", false), ontoggle: (e) => save("world_open", e.target.open) },
        h("summary", null, t("new_life")), form);
}

/* the view */

/** Shows a generation of a life until it is closed. ended(): it is over, and is followed. */
class Player {
    constructor(root, life, generation, { model, signal, ended }) {
        Object.assign(this, { life, generation, model, signal, ended, tick: 0, chosen: null, playing: false });
        this.follow = h("input", { type: "checkbox", checked: load("world_follow", false), onchange: () => {
            save("world_follow", this.follow.checked);
            this.watch();
        } });
        this.tape = new Tape(life.id, generation, signal);
        this.canvas = h("canvas", { class: "world", tabindex: 0, role: "img", onclick: (e) => this.point(e), onkeydown: (e) => this.key(e) });
        this.slider = h("input", { type: "range", min: 0, value: 0, "aria-label": t("tick"), oninput: () => this.go(Number(this.slider.value), true) });
        this.said = h("output");
        this.button = h("button", { type: "button", class: "main", onclick: () => this.play(!this.playing) });
        this.speed = h("select", { "aria-label": t("speed"), onchange: () => save("world_speed", Number(this.speed.value)) },
            speeds.map((n) => option(n, t("ticks_a_second", n), load("world_speed", 5))));
        this.list = h("div", { class: "chips", role: "group", "aria-label": t("agents_of") });
        this.mind = h("section", { class: "mind", "aria-live": "off" }, h("p", { class: "quiet" }, t("choose_agent")));
        const step = (by, label) => h("button", { type: "button", "aria-label": label, title: label, onclick: () => this.go(this.tick + by, true) }, by < 0 ? "‹" : "›");
        fill(root, h("div", { class: "stage" }, this.canvas,
            h("div", { class: "row" }, this.button, step(-1, t("step_back")), step(1, t("step_on")), this.speed,
                h("label", { class: "check" }, this.follow, t("follow")), h("span", { class: "space" }), this.said),
            this.slider, this.list, legend()), this.mind);
        this.size = new ResizeObserver(() => this.paint());
        this.size.observe(this.canvas);
        signal.addEventListener("abort", () => this.close());
        this.play(false);
    }
    async open() {
        await this.tape.ask(0);
        if (this.signal.aborted) return;
        this.stop = every(1000, () => this.watch());
        await this.go(0);
    }
    close() {
        this.playing = false;
        clearTimeout(this.timer);
        this.size.disconnect();
        this.stop?.();
    }
    /** Asks on from the next tick while more is to come. */
    async watch() {
        const { head } = this.tape;
        if (!head) return;
        if (!head.closed) await this.tape.ask(head.ticks + 1);
        if (this.signal.aborted) return;
        if (this.follow.checked && this.tick < this.tape.head.ticks && !this.playing) await this.go(this.tape.head.ticks);
        else this.paint();
        if (this.follow.checked && this.tape.head.closed && this.tick === this.tape.head.ticks) this.ended(this.generation);
    }
    /** by_hand: somebody looks at this one, and does not want to be led away. */
    async go(tick, by_hand) {
        if (by_hand) {
            this.play(false);
            this.follow.checked = false;
        }
        this.tick = Math.max(0, Math.min(this.tape.head?.ticks ?? 0, tick));
        const frame = await this.tape.frame(this.tick).catch(complain);
        if (this.signal.aborted || frame?.tick !== this.tick) return; // another was asked for meanwhile
        this.frame = frame;
        this.paint();
        this.look();
    }
    play(on) {
        this.playing = on;
        this.button.textContent = t(on ? "pause" : "play");
        clearTimeout(this.timer);
        if (on) this.turn();
    }
    async turn() {
        const began = performance.now();
        if (this.tick >= this.tape.head.ticks) {
            if (this.tape.head.closed) return this.play(false);
        } else {
            this.tape.ahead(this.tick + 1);
            await this.go(this.tick + 1);
        }
        const wait = 1000 / Number(this.speed.value) - (performance.now() - began);
        if (this.playing) this.timer = setTimeout(() => this.turn(), Math.max(0, wait));
        return undefined;
    }
    paint() {
        if (!this.frame) return;
        const { head, full } = this.tape;
        this.slider.max = head.ticks;
        this.slider.value = this.tick;
        this.said.textContent = `${number(this.tick)} / ${number(head.ticks)}${head.closed ? "" : ` (${number(head.planned)})`}`;
        const living = this.frame.agents.filter(Boolean).length;
        this.canvas.setAttribute("aria-label", t("world_told", number(this.tick), number(living), number(this.frame.food.length)));
        draw(this.canvas, this.tape, this.frame, this.chosen);
        this.chips(full);
    }
    chips(full) {
        const { agents } = this.frame;
        while (this.list.children.length < agents.length) {
            const i = this.list.children.length;
            this.list.append(h("button", { type: "button", class: "chip", onclick: () => this.choose(i) }, h("b", null, LETTERS[i]), h("span")));
        }
        agents.forEach((a, i) => {
            const chip = this.list.children[i];
            chip.lastChild.textContent = a ? number(a[2]) : "†";
            chip.setAttribute("aria-pressed", String(i === this.chosen));
            chip.setAttribute("aria-label", `${t("agent_n", LETTERS[i])}: ${a ? `${t("energy")} ${a[2]}` : t("dead")}`);
            chip.firstChild.style.color = a ? colour_of(a[2] / full) : "";
            chip.classList.toggle("gone", !a);
        });
    }
    choose(i) {
        this.chosen = i;
        this.paint();
        this.look();
    }
    /** Who stands where one points; pointing again is the next one there. */
    point(e) {
        if (!this.frame) return;
        const r = this.canvas.getBoundingClientRect(), { size } = this.tape.head;
        const x = Math.floor(((e.clientX - r.left) / r.width) * size), y = size - 1 - Math.floor(((e.clientY - r.top) / r.height) * size);
        const here = this.frame.agents.flatMap((a, i) => (a && a[0] === x && a[1] === y ? [i] : []));
        if (here.length) this.choose(here[(here.indexOf(this.chosen) + 1) % here.length]);
    }
    key(e) {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
        if (step) this.go(this.tick + step, true);
        else if (e.key === " ") this.play(!this.playing);
        else return;
        e.preventDefault();
    }
    /** One question at a time: the model reads for each; the last tick that was shown wins. */
    async look() {
        const wanted = `${this.tick} ${this.chosen} ${this.model()}`;
        if (this.chosen === null || this.looking || wanted === this.looked || this.signal.aborted) return;
        this.looking = true;
        const model = this.model();
        try {
            const v = await json(`/v1/worlds/agent?run=${encodeURIComponent(this.life.id)}&generation=${this.generation}&tick=${this.tick}` +
                `&agent=${this.chosen}&model=${encodeURIComponent(model)}`, { signal: this.signal });
            fill(this.mind, agent_node(v, model).flat(9));
        } catch (e) {
            complain(e);
        }
        this.looked = wanted; // also what failed: it would fail again
        this.looking = false;
        this.look();
    }
}

export function open(root, path) {
    const leaving = new AbortController(), [wanted, wanted_generation] = path.split("/");
    let all = [], life = null, player = null, playing = null, last = 1;
    const move = mover();
    const runs = h("select", { "data-focus": true, onchange: () => (location.hash = "#/world/" + encodeURIComponent(runs.value)) });
    const generations = h("select", { onchange: () => show(Number(generations.value)) });
    const model = h("select", { onchange: () => player?.look() });
    const status = h("p", { class: "quiet", role: "status" }), stage = h("div", { class: "theatre" });

    const offer = () => {
        const text = (l) => `${l.id} · ${l.job ? t("job") : t("run")} · ${t("state_" + l.state)}`;
        fill(runs, !life && option("", t(all.length ? "choose_life" : "no_lives"), ""), all.map((l) => option(l.id, text(l), life?.id)));
        fill(generations, Array.from({ length: last }, (_, i) => option(i + 1, number(i + 1), player?.generation)));
        fill(status, life?.job && [h("a", { href: "#/jobs/" + life.job.id }, life.job.id), " · ", t("state_" + life.state), life.job.note && `: ${life.job.note}`]);
    };
    const show = async (generation) => {
        if (!move(`#/world/${encodeURIComponent(life.id)}/${generation}`, { silent: true })) return;
        playing?.abort();
        const own = (playing = new AbortController());
        leaving.signal.addEventListener("abort", () => own.abort());
        const before = player?.chosen ?? null;
        player = new Player(stage, life, generation, { model: () => model.value, signal: own.signal, ended: (g) => g < last && show(g + 1) });
        player.chosen = before;
        try {
            await player.open();
            last = Math.max(generation, await generations_of(life, player.tape.head.planned, own.signal));
            offer();
        } catch (e) {
            if (e.name === "AbortError") return;
            playing.abort();
            fill(stage, h("p", { class: "error", role: "alert" }, e.message));
        }
    };
    const refresh = async () => {
        all = await lives(leaving.signal);
        const now = all.find((l) => l.id === (wanted || life?.id)) ?? (wanted ? { id: wanted, state: "done" } : all.find((l) => l.job && has_begun(l)));
        const first = !player;
        life = now ?? null;
        if (life && player) {
            player.life = life;
            if (player.tape.head && (life.job || life.state === "running")) last = Math.max(last, await generations_of(life, player.tape.head.planned, leaving.signal).catch(() => last));
        }
        if (document.activeElement !== runs && document.activeElement !== generations) offer(); // not under somebody's fingers
        if (first && life && has_begun(life)) await show(Math.max(1, parseInt(wanted_generation, 10) || 1));
        else if (first && life) fill(stage, h("p", { class: "quiet" }, t("not_begun")));
    };
    fill(root, h("h1", null, t("view_world")), starter((id) => move("#/world/" + encodeURIComponent(id))),
        h("div", { class: "grid" }, labelled(t("life"), runs), labelled(t("generation"), generations), labelled(t("model_asked"), model)), status, stage);
    models(leaving.signal).then((m) => {
        fill(model, [...m.base, ...m.adapters].map((o) => option(o.id, o.id, "")));
        player?.look();
    }).catch(complain);
    const stop = every(2000, refresh);
    const recolour = () => player?.paint();
    addEventListener("shoal:theme", recolour);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", recolour);
    return () => {
        leaving.abort();
        stop();
        removeEventListener("shoal:theme", recolour);
        dark.removeEventListener("change", recolour);
    };
}
