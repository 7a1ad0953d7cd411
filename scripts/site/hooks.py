"""hooks: the parts of the site that mkdocs.yml cannot express.

Markdown files outside docs/ become pages of the site. Links between them and docs/ are rewritten. A link to any other
file of the repository becomes its text, because the site does not contain that file.
"""
import os
import posixpath
import re

from mkdocs.structure.files import File

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# path in the repository: name of the page
OUTSIDE = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "models/fry/README.md": "fry.md"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files, config):
    for path, name in OUTSIDE.items():
        page = File(name, config["docs_dir"], config["site_dir"], config["use_directory_urls"])
        page.abs_src_path = os.path.join(ROOT, path)
        files.append(page)
    return files


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.dirname(os.path.relpath(page.file.abs_src_path, ROOT))
    place = posixpath.dirname(page.file.src_path) or "."  # of the page in the site

    def rewrite(match):
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in OUTSIDE:
            return f"[{text}]({posixpath.relpath(OUTSIDE[path], place)}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({posixpath.relpath(path[len('docs/'):], place)}{anchor})"
        return text if "`" in text else f"`{text}`"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    # Python-Markdown expects four spaces before an item of an inner list.
    parts[::2] = [re.sub("^  - ", "    - ", LINK.sub(rewrite, part), flags=re.M) for part in parts[::2]]
    return "".join(parts)


def on_post_page(output, page, config):
    """The language decides which form of a Han character a browser draws."""
    match = re.search(r"\.(ja|zh)\.md$", page.file.src_path)
    return output.replace('lang="en"', f'lang="{match.group(1)}"', 1) if match else output


def on_post_build(config):
    """The index as a script: pages that were opened as files may not request JSON."""
    folder = os.path.join(config["site_dir"], "search")
    with open(os.path.join(folder, "search_index.json"), encoding="utf-8") as source:
        index = source.read()
    with open(os.path.join(folder, "search_index.js"), "w", encoding="utf-8") as out:
        out.write(f"const searchIndex = {index};\n")
