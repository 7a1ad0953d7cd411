// The steps of an agent's reply as a tree: each step unfolds to its thought, its call or answer, the result, and the probabilities of the choice.
import { bar_table, fill, h, number, percent, seconds } from "./dom.js";
import { t } from "./words.js";

const SHOWN = 5; // alternatives of a choice

const choice_of = (step) => step.tool ?? "answer";

/** The most probable choices and the one that was made. */
function choices_node(step) {
    const rows = Object.entries(step.probabilities).map(([name, p]) => ({ text: name === "answer" ? t("step_answer") : name, p, selected: name === choice_of(step) }));
    rows.sort((a, b) => b.p - a.p);
    return rows.length > 1 && [h("dt", null, t("choices_of_step")), h("dd", null, bar_table(rows.filter((row, i) => i < SHOWN || row.selected)))];
}

function step_node(step) {
    const part = (label, text, failed) => text && [h("dt", null, label), h("dd", null, h("pre", { class: failed && "error", tabindex: 0 }, text))];
    const name = step.tool ? h("code", null, step.tool) : t("step_answer");
    return h("li", null, h("details", null,
        h("summary", null, h("b", null, name), step.failed && h("span", { class: "tag" }, t("step_failed")),
            h("small", null, ` ${percent(step.probabilities[choice_of(step)])} · ${seconds(step.seconds)}`)),
        h("dl", null, part(t("thought"), step.thought), step.tool && part(t("arguments"), JSON.stringify(step.arguments, null, 1)),
            part(t("result_of_call"), step.observation, step.failed), choices_node(step))));
}

/** The tree of a reply; paint(m) adds the steps of m.steps that it does not show yet, so that unfolded ones stay unfolded. */
export class Steps {
    constructor() {
        this.summary = h("summary");
        this.list = h("ol");
        this.element = h("details", { class: "steps" }, this.summary, this.list);
    }
    paint(m) {
        const steps = m.steps ?? [];
        this.element.hidden = steps.length === 0;
        fill(this.summary, t("n_steps", number(steps.length)), m.confidence !== undefined && h("small", null, ` · ${t("confidence")} ${percent(m.confidence)}`));
        this.list.append(...steps.slice(this.list.childElementCount).map(step_node));
    }
}
