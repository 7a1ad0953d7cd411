// Agents: the base model, adapters, teams and agents with tools of the server, with their metrics.
import { call, json, metrics, models } from "./api.js";
import { fill, h, labelled, number, poll, seconds, show_error } from "./dom.js";
import { t } from "./words.js";

const columns = [
    ["requests", (f, label) => number(f.value("shoal_requests_total", "adapter", label) ?? 0)],
    ["prompt_tokens", (f, label) => number(f.value("shoal_prompt_tokens_total", "adapter", label) ?? 0)],
    ["generated_tokens", (f, label) => number(f.value("shoal_generation_tokens_total", "adapter", label) ?? 0)],
    ["first_token", (f, label) => seconds(f.series("shoal_time_to_first_token_seconds")
        .find((s) => s.labels.adapter === label)?.p50)],
    ["errors", (f, label) => number(f.value("shoal_request_errors_total", "adapter", label) ?? 0)],
];

function row(f, { name, label, kind, root, chat_name, unload }) {
    return h("tr", null,
        h("th", { scope: "row" }, chat_name ? h("a", { href: "#/chat/" + encodeURIComponent(chat_name), title: t("chat_with") }, name) : name,
            h("small", null, kind)),
        columns.map(([id, of]) => h("td", { class: "num", "data-label": t(id) }, label ? of(f, label) : "–")),
        h("td", { class: "path", "data-label": t("path") }, root),
        h("td", null, unload && h("button", { type: "button", onclick: unload, "aria-label": `${t("unload")}: ${name}` }, t("unload"))));
}

const table = (rows) => h("div", { class: "scroll-x" }, h("table", { class: "list cards" },
    h("thead", null, h("tr", null, h("th", null, t("name")), columns.map(([id]) => h("th", { class: "num" }, t(id))),
        h("th", null, t("path")), h("th", null))),
    h("tbody", null, rows)));

const team_node = (team) => h("details", { class: "panel" },
    h("summary", null, h("b", null, team.name), " ", h("small", null, `${team.protocol} · ${team.agents.map((a) => a.name).join(", ")}`)),
    team.about && h("p", null, team.about),
    h("dl", null, team.agents.map((a) => [
        h("dt", null, a.name, a.role && h("small", null, " " + a.role)), h("dd", null, a.system ?? "–")])));

const tool_agent_node = (agent) => h("details", { class: "panel" },
    h("summary", null, h("b", null, agent.name), " ", h("small", null, agent.tools.join(", "))),
    h("p", null, agent.system ?? "–"));

export function open(root) {
    const list = h("div"), teams = h("div", { class: "teams" }), agents = h("div", { class: "teams" });
    let closed = false;
    const refresh = async () => {
        const [m, f] = await Promise.all([models(), metrics()]);
        if (closed || list.contains(document.activeElement)) return; // a redraw would take the focus from the user
        const sums = ["mix", "team", "agent"].filter((label) => f.value("shoal_requests_total", "adapter", label) !== null);
        fill(list, table([
            ...m.base.map((b) => row(f, { name: b.id, label: "base", kind: `${t("base")} · ${t("context_length", number(b.max_model_len))}`, root: b.root, chat_name: b.id })),
            ...m.adapters.map((a) => row(f, {
                name: a.id, label: a.id, kind: t("adapter"), root: a.root, chat_name: a.id,
                unload: () => change("/v1/unload_lora_adapter", { lora_name: a.id }),
            })),
            ...sums.map((label) => row(f, { name: t("all_" + label), label, kind: "", root: "" })),
        ]));
    };
    const change = async (path, body) => {
        try {
            await call(path, { body });
            document.activeElement?.blur();
            await refresh();
            return true;
        } catch (e) {
            show_error(e);
            return false;
        }
    };
    const name = h("input", { required: true, "data-focus": true, spellcheck: "false", placeholder: "critic" });
    const path = h("input", { required: true, spellcheck: "false", placeholder: "adapters/critic" });
    const inplace = h("input", { type: "checkbox" });
    const form = h("form", {
        class: "panel", onsubmit: async (e) => {
            e.preventDefault();
            const body = { lora_name: name.value.trim(), lora_path: path.value.trim(), load_inplace: inplace.checked };
            if (await change("/v1/load_lora_adapter", body)) form.reset();
        },
    }, h("h2", null, t("load_adapter")), h("div", { class: "grid" }, labelled(t("name"), name), labelled(t("path"), path)),
    h("div", { class: "row" }, h("label", { class: "check" }, inplace, t("replace")), h("span", { class: "space" }),
        h("button", { type: "submit" }, t("load"))));
    fill(root, h("h1", null, t("view_agents")), list, teams, agents, form);
    json("/v1/teams").then((v) => fill(teams, v.teams.length > 0 && h("h2", null, t("teams")), v.teams.map(team_node))).catch(show_error);
    json("/v1/agents").then((v) => fill(agents, v.agents.length > 0 && h("h2", null, t("tool_agents")), v.agents.map(tool_agent_node))).catch(show_error);
    const stop = poll(2000, refresh);
    return () => {
        closed = true;
        stop();
    };
}
