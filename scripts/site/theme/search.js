/* search: the results on search.html, and the menu of narrow windows.
 *
 * A section must contain every term of the query. A word of a language with blanks is a term that begins a word of the text.
 * Japanese and Chinese have no blanks, so their terms are the pairs of neighbouring characters of one script; hiragana, which
 * is mostly grammar, counts only in a query without other terms. The score is like BM25. A section that contains the query as
 * it was typed gets more.
 */
const CJK = /[\p{sc=Han}々]+|[\p{sc=Katakana}ー]+|[\p{sc=Hiragana}]+/gu;

function normalize(text) {
    return text.normalize("NFKC").toLowerCase();
}

function pairs(run) {
    if (run.length < 3) return [run];
    return Array.from({ length: run.length - 1 }, (_, i) => run.slice(i, i + 2));
}

function queryTerms(query) {
    const runs = query.match(CJK) || [];
    const words = query.replace(CJK, " ").split(/[\s"'`,;:()]+/).filter((word) => word);
    const kana = runs.filter((run) => /\p{sc=Hiragana}/u.test(run));
    const others = runs.filter((run) => !kana.includes(run));
    const chosen = others.length || words.length ? others : kana;
    return [...new Set([...words, ...chosen.flatMap(pairs)])];
}

function occurrences(text, term) {
    let n = 0;
    for (let at = text.indexOf(term); at >= 0; at = text.indexOf(term, at + term.length))
        n += !/[a-z0-9]/.test(term[0]) || !/[a-z0-9]/.test(text[at - 1] || " ");
    return n;
}

/* Returns the best 50 sections. The entry of a whole page (without "#") is left out if one of its sections matches. */
function searchDocs(docs, text) {
    const query = normalize(text).trim();
    const terms = queryTerms(query);
    if (!terms.length) return [];
    const entries = docs.map((doc) => {
        const title = normalize(doc.title), body = normalize(doc.text);
        return { doc, title, body, counts: terms.map((term) => 5 * occurrences(title, term) + occurrences(body, term)) };
    });
    const weights = terms.map((_, i) => Math.log(1 + docs.length / (1 + entries.filter(({ counts }) => counts[i]).length)));
    const found = entries.filter(({ counts }) => counts.every((n) => n));
    for (const entry of found) {
        const length = 1 + entry.body.length / 1000;
        entry.score = entry.title.includes(query) ? 5 : entry.body.includes(query) ? 2 : 0;
        entry.counts.forEach((n, i) => (entry.score += (weights[i] * n) / (n + length)));
    }
    const pages = new Set(found.map(({ doc }) => doc.location.split("#")).filter(([, section]) => section).map(([page]) => page));
    return found
        .filter(({ doc }) => doc.location.includes("#") || !pages.has(doc.location))
        .sort((a, b) => b.score - a.score)
        .slice(0, 50)
        .map(({ doc }) => doc);
}

function excerpt(doc, text) {
    const body = normalize(doc.text);
    const first = [normalize(text).trim(), ...queryTerms(normalize(text))].map((term) => body.indexOf(term)).find((at) => at >= 0);
    const start = Math.max(0, (first || 0) - 60);
    return (start ? "…" : "") + doc.text.slice(start, start + 240);
}

function showResults(docs, text) {
    const list = document.getElementById("mkdocs-search-results");
    list.replaceChildren();
    for (const doc of docs) {
        const item = document.createElement("article"), heading = document.createElement("h3");
        const link = document.createElement("a"), summary = document.createElement("p");
        link.href = doc.location;
        link.textContent = doc.title;
        summary.textContent = excerpt(doc, text);
        heading.append(link);
        item.append(heading, summary);
        list.append(item);
    }
    if (!docs.length) list.textContent = list.dataset.noResultsText;
}

function startSearch() {
    const input = document.getElementById("mkdocs-search-query");
    if (!input) return;
    const update = () => showResults(searchDocs(searchIndex.docs, input.value), input.value);
    input.value = new URLSearchParams(location.search).get("q") || "";
    input.addEventListener("input", update);
    const script = document.createElement("script");
    script.src = "search/search_index.js";
    script.onload = update;
    document.head.append(script);
}

/* The button that opens the list of pages on narrow windows. */
function startMenu() {
    const toggle = () => document.querySelectorAll("[data-toggle=wy-nav-shift]").forEach((part) => part.classList.toggle("shift"));
    document.querySelector("[data-toggle=wy-nav-top]").addEventListener("click", toggle);
}

if (typeof document !== "undefined") {
    startMenu();
    startSearch();
}
