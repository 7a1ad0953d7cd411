#!/bin/sh
# test_site: the site of `make docs`: no warning, no request to another host, no broken link or anchor, and a search that finds
# English, Japanese and Chinese. Without mkdocs (Debian: mkdocs) or node it skips that part.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v mkdocs >/dev/null || { echo "skip site: mkdocs is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

if PYTHONDONTWRITEBYTECODE=1 mkdocs build --strict --quiet --site-dir "$tmp/site" >"$tmp/log" 2>&1 && [ ! -s "$tmp/log" ]; then
    echo "ok it builds without warnings"
else
    echo "not ok it builds without warnings: $(head -c 500 "$tmp/log")"
    exit 1
fi

# The check uses the standard library only.
python3 - "$tmp/site" <<'PYTHON'
import glob, html.parser, os, sys, urllib.parse
site = sys.argv[1]
pages, ids, remote, broken = {}, {}, [], []

class Page(html.parser.HTMLParser):
    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        if "id" in a: ids[self.name].add(a["id"])
        for key in ("href", "src", "action"):
            if a.get(key): pages[self.name].append((tag, a[key]))

for path in glob.glob(site + "/**/*.html", recursive=True):
    parser = Page()
    parser.name = os.path.relpath(path, site)
    pages[parser.name], ids[parser.name] = [], set()
    parser.feed(open(path, encoding="utf-8").read())
for name, links in pages.items():
    for tag, link in links:
        url = urllib.parse.urlsplit(link)
        if url.scheme or url.netloc:
            if tag != "a": remote.append(f"{name}: {link}")
            continue
        if name == "404.html": continue # its links are absolute, for servers
        target = os.path.normpath(os.path.join(os.path.dirname(name), urllib.parse.unquote(url.path))) if url.path else name
        if not os.path.exists(os.path.join(site, target)): broken.append(f"{name}: {link}")
        elif url.fragment and target in ids and urllib.parse.unquote(url.fragment) not in ids[target]: broken.append(f"{name}: {link}")
for style in glob.glob(site + "/**/*.css", recursive=True):
    text = open(style, encoding="utf-8").read()
    if "url(http" in text or "url(//" in text or "@import" in text: remote.append(style)
print(f"not ok no request to other hosts: {remote[:5]}" if remote else "ok no request to other hosts")
print(f"not ok links and anchors: {broken[:8]}" if broken else f"ok links and anchors of {len(pages)} pages")
PYTHON

command -v node >/dev/null || { echo "skip search: node is not installed"; exit 0; }
# finds QUERY PAGE: the first five results contain the page.
finds() {
    found=$(cat "$tmp/site/search/search_index.js" "$tmp/site/search.js" - <<JS | node -
console.log(searchDocs(searchIndex.docs, "$1").slice(0, 5).map((doc) => decodeURI(doc.location)).join(" "));
JS
    )
    case $found in *"$2"*) echo "ok search for '$1'" ;; *) echo "not ok search for '$1': '$found' has no '$2'" ;; esac
}
finds "address already in use" TROUBLESHOOTING.html
finds "killed run" TROUBLESHOOTING.html
finds "huge pages" FAQ.html
finds "prefix cache" GLOSSARY.html
finds "tournament selection" EVOLUTION.html
finds "ヒュージページ" FAQ.ja.html
finds "学習データの形式" FAQ.ja.html
finds "ﾄｰｸﾝ" .ja.html
finds "大页内存" FAQ.zh.html
finds "内存不足" TROUBLESHOOTING.zh.html
finds "密钥" TROUBLESHOOTING.zh.html
