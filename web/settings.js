// Settings: the key, the language, light or dark; all of this browser.
import { json, key } from "./api.js";
import { complain, fill, h, labelled, load, option, save } from "./dom.js";
import { choose, languages, t } from "./words.js";

function theme_set(theme) {
    save("theme", theme || null);
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    dispatchEvent(new Event("shoal:theme"));
}

function key_node() {
    const secret = h("input", { type: "password", autocomplete: "off", value: key.get(), "data-focus": true, spellcheck: "false" });
    const remember = h("input", { type: "checkbox", checked: key.remembered() });
    const said = h("small", { role: "status" });
    return h("form", {
        class: "panel", onsubmit: async (e) => {
            e.preventDefault();
            key.set(secret.value.trim(), remember.checked);
            said.textContent = "";
            try {
                await json("/v1/models");
                said.textContent = t("key_fine");
            } catch (problem) {
                complain(problem);
            }
        },
    }, h("h2", null, t("api_key")), labelled(t("api_key"), secret, t("key_hint")),
    h("div", { class: "row" }, h("label", { class: "check" }, remember, t("remember")), said,
        h("span", { class: "space" }), h("button", { type: "submit" }, t("save"))));
}

export function open(root) {
    const language = h("select", { onchange: () => (save("language", language.value || null), choose(language.value)) },
        option("", t("by_browser"), load("language", "")),
        Object.entries(languages).map(([id, name]) => option(id, name, load("language", ""))));
    const theme = h("select", { onchange: () => theme_set(theme.value) },
        ["", "light", "dark"].map((id) => option(id, t("theme_" + (id || "system")), load("theme", null) ?? "")));
    const version = h("p", { class: "quiet" });
    fill(root, h("h1", null, t("view_settings")), key_node(),
        h("section", { class: "panel" }, h("h2", null, t("look")),
            h("div", { class: "grid" }, labelled(t("language"), language), labelled(t("theme"), theme))),
        version);
    json("/version").then((v) => (version.textContent = `Shoal ${v.version}`)).catch(complain);
}
