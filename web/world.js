// World: a simulation of the grid world tick by tick, and the observation and action probabilities of each agent.
import { json, models } from "./api.js";
import { bar_table, fill, h, labelled, load, number, option, poll, save, show_error, view_navigation } from "./dom.js";
import { t } from "./words.js";

const FRAMES_PER_REQUEST = 100, MAX_FRAMES = 5000;
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789@&";
const FOOD = 1, MATERIAL = 2; // objects that an agent carries
const speeds = [1, 2, 5, 10, 30, 100]; // ticks per second

/* the list of simulations */

const name_of = (out) => out.slice(out.lastIndexOf("/") + 1);

/** [{id, state, job}]: simulations by jobs of this server, and runs of the command line. The newest is first. */
async function load_simulations(signal) {
    const [jobs, runs] = await Promise.all([
        // A key without the scope jobs can still read the runs.
        json("/v1/jobs", { signal }).then((v) => v.jobs, (e) => (e.status === 403 || e.status === 404 ? [] : Promise.reject(e))),
        json("/v1/runs", { signal }).then((v) => v.runs),
    ]);
    const by_jobs = jobs.filter((j) => j.kind === "world" && j.options?.out)
        .map((job) => ({ id: name_of(job.options.out), state: job.state, job, at: job.created }));
    const by_runs = runs.filter((r) => r.kind === "world").map((r) => ({ id: r.id, state: r.status, at: r.created }));
    return [...by_jobs, ...by_runs].sort((a, b) => (a.at < b.at ? 1 : -1))
        .filter((l, i, all) => all.findIndex((o) => o.id === l.id) === i); // a resumed job continues the same simulation
}

/** Whether a simulation has frames. For a run without a job only a request for its frames shows that, so this returns true. */
const has_frames = (simulation) => !simulation.job || simulation.state === "done" || simulation.job.progress?.done > 0;

/**
 * The last generation that has frames. A job counts ticks over all generations of `planned` ticks
 * each. A run lists the generations that it has measured.
 */
async function last_generation(simulation, planned, signal) {
    if (simulation.job) return Math.max(1, Math.ceil((simulation.job.progress?.done ?? 0) / Math.max(1, planned)));
    const { curve } = await json("/v1/runs/" + encodeURIComponent(simulation.id), { signal });
    const last = Math.max(0, ...curve.map((row) => row.generation ?? 0));
    return Math.max(1, last);
}

/* frames */

/** The frames of one generation by tick. `info` has the rest of the server's last reply: number of ticks, map, whether the trace is closed. */
class FrameCache {
    constructor(run, generation, signal) {
        this.path = `/v1/worlds/frames?run=${encodeURIComponent(run)}&generation=${generation}`;
        this.signal = signal;
        this.frames = new Map();
    }
    async fetch(from) {
        const v = await json(`${this.path}&from=${from}&n=${FRAMES_PER_REQUEST}`, { signal: this.signal });
        for (const f of v.frames) this.frames.set(f.tick, f);
        for (const tick of this.frames.keys()) {
            if (this.frames.size <= MAX_FRAMES) break;
            this.frames.delete(tick); // the frame that was loaded first
        }
        this.info = v;
        // Agents begin with the maximum energy.
        this.max_energy ??= Math.max(1, ...(v.frames[0]?.agents ?? []).map((a) => a?.[2] ?? 0));
    }
    /** The frame of a tick; null if the tick has not been computed. */
    async frame(tick) {
        if (!this.frames.has(tick)) await this.fetch(tick - (tick % FRAMES_PER_REQUEST));
        return this.frames.get(tick) ?? null;
    }
    /** Loads the next frames before they are shown, so that playing does not wait. */
    prefetch(tick) {
        const next = tick - (tick % FRAMES_PER_REQUEST) + FRAMES_PER_REQUEST;
        if (tick % FRAMES_PER_REQUEST !== FRAMES_PER_REQUEST / 2 || next > this.info.ticks || this.frames.has(next)) return;
        this.fetch(next).catch(() => {}); // frame() loads them later
    }
}

/* the map */

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The colour of an agent with this share of the maximum energy. */
const energy_colour = (share) => `color-mix(in oklab, ${colour("--accent")} ${Math.round(100 * Math.max(0, Math.min(1, share)))}%, ${colour("--bad")})`;

/** Draws a frame. North is up: y = 0 is the lowest row. */
function draw_map(canvas, cache, frame, chosen) {
    const side = Math.round(canvas.clientWidth * devicePixelRatio), { size, walls, homes } = cache.info, cell = side / size;
    if (!side) return;
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const g = canvas.getContext("2d");
    const corner = ([x, y]) => [x * cell, (size - 1 - y) * cell];
    const centre = (at) => corner(at).map((v) => v + cell / 2);
    const box = (at, share, fill) => {
        const [x, y] = corner(at), gap = (cell * (1 - share)) / 2;
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
    frame.food.forEach((at) => disc(...centre(at), cell * 0.22, colour("--series-2")));
    frame.material.forEach((at) => box(at, 0.45, colour("--series-1")));
    const predator = (at, share) => {
        const [x, y] = corner(at), length = cell * share;
        g.fillStyle = colour("--bad");
        g.beginPath();
        g.moveTo(x + length / 2, y + length * 0.1);
        g.lineTo(x + length * 0.92, y + length * 0.9);
        g.lineTo(x + length * 0.08, y + length * 0.9);
        g.fill();
    };
    frame.predators.forEach((at) => predator(at, 1));
    g.textAlign = "center";
    g.textBaseline = "middle";
    g.font = `600 ${cell * 0.62}px system-ui, sans-serif`;
    // The selected agent is drawn last, above other agents in its cell.
    const order = frame.agents.map((_, i) => i).sort((a, b) => (a === chosen) - (b === chosen));
    for (const i of order) {
        const a = frame.agents[i];
        if (!a) continue;
        const [x, y] = centre(a);
        disc(x, y, cell * 0.46, energy_colour(a[2] / cache.max_energy));
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

const legend = () => h("p", { class: "legend muted" }, ["agent", "home", "food", "material", "predator", "wall"].map((id) =>
    h("span", null, h("i", { class: "mark " + id }), t("world_" + id))));

/* the details of an agent */

const object_name = (n) => t(n === FOOD ? "world_food" : n === MATERIAL ? "world_material" : "nothing");

function agent_node(v, model) {
    const facts = [
        ["energy", number(v.energy)], ["holds", object_name(v.holds)], ["next_action", v.action ?? "–"], ["reward", number(v.reward)],
        ["total_reward", number(v.total)], ["fitness", number(v.fitness)], ["collected", number(v.collected)],
        ["delivered", number(v.delivered)], ["blocked", number(v.blocked)],
    ];
    return [
        h("h2", null, t("agent_n", LETTERS[v.agent]), " ", h("small", null, `${t("tick")} ${number(v.tick)}`)),
        !v.alive && h("p", { class: "error" }, t("dead")),
        h("dl", { class: "facts" }, facts.map(([id, text]) => h("div", null, h("dt", null, t(id)), h("dd", null, text)))),
        v.alive && [h("h3", null, t("observation")), h("pre", null, v.observation),
            v.prompt !== v.observation && [h("h3", null, t("policy_prompt")), h("pre", null, v.prompt)]],
        v.probabilities && [h("h3", null, t("action_probabilities", model)),
            bar_table(Object.entries(v.probabilities).map(([action, p]) => ({ text: action, p, selected: action === v.action })))],
    ];
}

/* the form of a new simulation */

const worlds = ["repaired", "legacy", "worlds/homes.yaml", "worlds/predators.yaml", "worlds/builders.yaml", "worlds/maze.yaml", "worlds/talk.yaml"];

/** A form for a small simulation. The form of a job has all options. */
function new_form(on_start) {
    const out = h("input", { required: true, spellcheck: "false", pattern: "[A-Za-z0-9_][A-Za-z0-9._\\-]*", maxlength: 64, value: "simulation" });
    const world = h("input", { list: "worlds", spellcheck: "false", value: "repaired" });
    const count = (name, value) => h("input", { type: "number", min: 1, step: 1, required: true, name, value });
    const counts = [["generations", count("generations", 2)], ["steps", count("steps", 100)], ["agents", count("agents", 8)]];
    const form = h("form", { class: "panel", onsubmit: async (e) => {
        e.preventDefault();
        try {
            const { base } = await models();
            const options = { out: out.value.trim(), "eval-maps": 1, ...Object.fromEntries(counts.map(([id, f]) => [id, Number(f.value)])) };
            if (world.value.trim()) options.world = world.value.trim();
            await json("/v1/jobs", { body: { kind: "world", args: [base[0].root], options } });
            on_start(out.value.trim());
        } catch (error) {
            show_error(error);
        }
    } }, h("div", { class: "grid" }, labelled(t("name"), out), labelled(t("rules"), world), counts.map(([id, f]) => labelled(t(id), f))),
    h("datalist", { id: "worlds" }, worlds.map((w) => h("option", { value: w }))),
    h("div", { class: "row" }, h("a", { href: "#/jobs" }, t("all_options")), h("span", { class: "space" }), h("button", { type: "submit", class: "main" }, t("start"))));
    return h("details", { class: "new-form", open: load("world_open", false), ontoggle: (e) => save("world_open", e.target.open) },
        h("summary", null, t("new_simulation")), form);
}

/* the view */

/** Shows a generation of a simulation. on_end(generation) is called when the last tick of a complete generation is followed. */
class Player {
    constructor(root, simulation, generation, { model, signal, on_end }) {
        Object.assign(this, { simulation, generation, model, signal, on_end, tick: 0, chosen: null, playing: false });
        this.follow = h("input", { type: "checkbox", checked: load("world_follow", false), onchange: () => {
            save("world_follow", this.follow.checked);
            this.refresh();
        } });
        this.cache = new FrameCache(simulation.id, generation, signal);
        this.canvas = h("canvas", { class: "world", tabindex: 0, role: "img", onclick: (e) => this.on_click(e), onkeydown: (e) => this.on_key(e) });
        this.slider = h("input", { type: "range", min: 0, value: 0, "aria-label": t("tick"), oninput: () => this.seek(Number(this.slider.value), true) });
        this.position = h("output");
        this.button = h("button", { type: "button", class: "main", onclick: () => this.play(!this.playing) });
        this.speed = h("select", { "aria-label": t("speed"), onchange: () => save("world_speed", Number(this.speed.value)) },
            speeds.map((n) => option(n, t("ticks_per_second", n), load("world_speed", 5))));
        this.list = h("div", { class: "chips", role: "group", "aria-label": t("agents_energy") });
        this.agent_details = h("section", { class: "agent-details", "aria-live": "off" }, h("p", { class: "muted" }, t("choose_agent")));
        const step = (by, label) => h("button", { type: "button", "aria-label": label, title: label, onclick: () => this.seek(this.tick + by, true) }, by < 0 ? "‹" : "›");
        fill(root, h("div", { class: "stage" }, this.canvas,
            h("div", { class: "row" }, this.button, step(-1, t("step_back")), step(1, t("step_on")), this.speed,
                h("label", { class: "check" }, this.follow, t("follow")), h("span", { class: "space" }), this.position),
            this.slider, this.list, legend()), this.agent_details);
        this.resize_observer = new ResizeObserver(() => this.paint());
        this.resize_observer.observe(this.canvas);
        signal.addEventListener("abort", () => this.close());
        this.play(false);
    }
    async open() {
        await this.cache.fetch(0);
        if (this.signal.aborted) return;
        this.stop = poll(1000, () => this.refresh());
        await this.seek(0);
    }
    close() {
        this.playing = false;
        clearTimeout(this.timer);
        this.resize_observer.disconnect();
        this.stop?.();
    }
    /** Loads new ticks while the trace is not closed. */
    async refresh() {
        const { info } = this.cache;
        if (!info) return;
        if (!info.closed) await this.cache.fetch(info.ticks + 1);
        if (this.signal.aborted) return;
        if (this.follow.checked && this.tick < this.cache.info.ticks && !this.playing) await this.seek(this.cache.info.ticks);
        else this.paint();
        if (this.follow.checked && this.cache.info.closed && this.tick === this.cache.info.ticks) this.on_end(this.generation);
    }
    /** Shows a tick. `by_user`: the user chose the tick, so playing and following end. */
    async seek(tick, by_user) {
        if (by_user) {
            this.play(false);
            this.follow.checked = false;
        }
        this.tick = Math.max(0, Math.min(this.cache.info?.ticks ?? 0, tick));
        const frame = await this.cache.frame(this.tick).catch(show_error);
        if (this.signal.aborted || frame?.tick !== this.tick) return; // another tick was selected meanwhile
        this.frame = frame;
        this.paint();
        this.load_agent();
    }
    play(on) {
        this.playing = on;
        this.button.textContent = t(on ? "pause" : "play");
        clearTimeout(this.timer);
        if (on) this.play_next();
    }
    async play_next() {
        const start = performance.now();
        if (this.tick >= this.cache.info.ticks) {
            if (this.cache.info.closed) return this.play(false);
        } else {
            this.cache.prefetch(this.tick + 1);
            await this.seek(this.tick + 1);
        }
        const wait = 1000 / Number(this.speed.value) - (performance.now() - start);
        if (this.playing) this.timer = setTimeout(() => this.play_next(), Math.max(0, wait));
        return undefined;
    }
    paint() {
        if (!this.frame) return;
        const { info, max_energy } = this.cache;
        this.slider.max = info.ticks;
        this.slider.value = this.tick;
        this.position.textContent = `${number(this.tick)} / ${number(info.ticks)}${info.closed ? "" : ` (${number(info.planned)})`}`;
        const living = this.frame.agents.filter(Boolean).length;
        this.canvas.setAttribute("aria-label", t("world_summary", number(this.tick), number(living), number(this.frame.food.length)));
        draw_map(this.canvas, this.cache, this.frame, this.chosen);
        this.draw_chips(max_energy);
    }
    draw_chips(max_energy) {
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
            chip.firstChild.style.color = a ? energy_colour(a[2] / max_energy) : "";
            chip.classList.toggle("dead", !a);
        });
    }
    choose(i) {
        this.chosen = i;
        this.paint();
        this.load_agent();
    }
    /** Selects the agent in the clicked cell; another click selects the next agent in the cell. */
    on_click(e) {
        if (!this.frame) return;
        const r = this.canvas.getBoundingClientRect(), { size } = this.cache.info;
        const x = Math.floor(((e.clientX - r.left) / r.width) * size), y = size - 1 - Math.floor(((e.clientY - r.top) / r.height) * size);
        const here = this.frame.agents.flatMap((a, i) => (a && a[0] === x && a[1] === y ? [i] : []));
        if (here.length) this.choose(here[(here.indexOf(this.chosen) + 1) % here.length]);
    }
    on_key(e) {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
        if (step) this.seek(this.tick + step, true);
        else if (e.key === " ") this.play(!this.playing);
        else return;
        e.preventDefault();
    }
    /** Loads the details of the selected agent. One request runs at a time, because each costs a forward pass; it is repeated if the tick or agent has changed. */
    async load_agent() {
        const wanted = `${this.tick} ${this.chosen} ${this.model()}`;
        if (this.chosen === null || this.loading || wanted === this.loaded || this.signal.aborted) return;
        this.loading = true;
        const model = this.model();
        try {
            const v = await json(`/v1/worlds/agent?run=${encodeURIComponent(this.simulation.id)}&generation=${this.generation}&tick=${this.tick}` +
                `&agent=${this.chosen}&model=${encodeURIComponent(model)}`, { signal: this.signal });
            fill(this.agent_details, agent_node(v, model).flat(9));
        } catch (e) {
            show_error(e);
        }
        this.loaded = wanted; // also after an error, because the same request would fail again
        this.loading = false;
        this.load_agent();
    }
}

export function open(root, path) {
    const closing = new AbortController(), [wanted, wanted_generation] = path.split("/");
    let all = [], simulation = null, player = null, player_abort = null, last = 1;
    const navigate = view_navigation();
    const runs = h("select", { "data-focus": true, onchange: () => (location.hash = "#/world/" + encodeURIComponent(runs.value)) });
    const generations = h("select", { onchange: () => show(Number(generations.value)) });
    const model = h("select", { onchange: () => player?.load_agent() });
    const status = h("p", { class: "muted", role: "status" }), stage = h("div", { class: "player" });

    const draw_choices = () => {
        const text = (l) => `${l.id} · ${l.job ? t("job") : t("run")} · ${t("state_" + l.state)}`;
        fill(runs, !simulation && option("", t(all.length ? "choose_simulation" : "no_simulations"), ""), all.map((l) => option(l.id, text(l), simulation?.id)));
        fill(generations, Array.from({ length: last }, (_, i) => option(i + 1, number(i + 1), player?.generation)));
        fill(status, simulation?.job && [h("a", { href: "#/jobs/" + simulation.job.id }, simulation.job.id), " · ", t("state_" + simulation.state), simulation.job.note && `: ${simulation.job.note}`]);
    };
    const show = async (generation) => {
        if (!navigate(`#/world/${encodeURIComponent(simulation.id)}/${generation}`, { silent: true })) return;
        player_abort?.abort();
        const controller = (player_abort = new AbortController());
        closing.signal.addEventListener("abort", () => controller.abort());
        const chosen = player?.chosen ?? null;
        player = new Player(stage, simulation, generation, { model: () => model.value, signal: controller.signal, on_end: (g) => g < last && show(g + 1) });
        player.chosen = chosen;
        try {
            await player.open();
            last = Math.max(generation, await last_generation(simulation, player.cache.info.planned, controller.signal));
            draw_choices();
        } catch (e) {
            if (e.name === "AbortError") return;
            player_abort.abort();
            fill(stage, h("p", { class: "error", role: "alert" }, e.message));
        }
    };
    const refresh = async () => {
        all = await load_simulations(closing.signal);
        const current = all.find((l) => l.id === (wanted || simulation?.id)) ?? (wanted ? { id: wanted, state: "done" } : all.find((l) => l.job && has_frames(l)));
        const first = !player;
        simulation = current ?? null;
        if (simulation && player) {
            player.simulation = simulation;
            if (player.cache.info && (simulation.job || simulation.state === "running")) last = Math.max(last, await last_generation(simulation, player.cache.info.planned, closing.signal).catch(() => last));
        }
        if (document.activeElement !== runs && document.activeElement !== generations) draw_choices(); // a redraw would close an open list
        if (first && simulation && has_frames(simulation)) await show(Math.max(1, parseInt(wanted_generation, 10) || 1));
        else if (first && simulation) fill(stage, h("p", { class: "muted" }, t("not_started")));
    };
    fill(root, h("h1", null, t("view_world")), new_form((id) => navigate("#/world/" + encodeURIComponent(id))),
        h("div", { class: "grid" }, labelled(t("simulation"), runs), labelled(t("generation"), generations), labelled(t("action_model"), model)), status, stage);
    models(closing.signal).then((m) => {
        fill(model, [...m.base, ...m.adapters].map((o) => option(o.id, o.id, "")));
        player?.load_agent();
    }).catch(show_error);
    const stop = poll(2000, refresh);
    const recolour = () => player?.paint();
    addEventListener("shoal:theme", recolour);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", recolour);
    return () => {
        closing.abort();
        stop();
        removeEventListener("shoal:theme", recolour);
        dark.removeEventListener("change", recolour);
    };
}
