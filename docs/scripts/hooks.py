"""What mkdocs does besides: bring figures from results/ in, and show notebooks as pages.

Pages name figures by where they lie in the repository (`../results/figures/codes.png`), so that
they show there too; on the site they lie in `results/`. The gallery, the command line and
CONTRIBUTING are pages that are made at every build. The files of
`fissile play` join the presets that were computed for them in `still/`.
"""

import base64
import json
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
FIGURE = re.compile(r"(?:\.\./)+(results/figures/[\w.-]+)")
MADE = {}


def on_config(config):
    """Make the pages that follow from results/ and from the source, and list them."""
    sys.path.append(str(Path(__file__).parent))  # where the other scripts are
    import gallery

    MADE.update(gallery.pages())
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    MADE["contributing.md"] = text.replace("](docs/", "](")
    fill(config.nav, gallery.nav(MADE))
    return config


def fill(nav, sections):
    """Put a section's pages where the navigation has its name with an empty list."""
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if below == [] and title in sections:
                entry[title] = sections[title]
            elif isinstance(below, list):
                fill(below, sections)


def on_files(files, config):
    """Add every figure that a page names, a page for every notebook, and the still copy of play."""
    texts = [Path(file.abs_src_path).read_text("utf-8") for file in files.documentation_pages()]
    named = {name for text in [*texts, *MADE.values()] for name in FIGURE.findall(text)}
    for name, text in MADE.items():
        files.append(File.generated(config, name, content=text))
    for name in sorted(named):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        text, pictures = page_of(json.loads(path.read_text("utf-8")), path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for path in sorted((ROOT / "src/fissile/play/page").iterdir()):
        files.append(File.generated(config, f"still/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Point at the figures where the site has them, and let tables inside of HTML be tables."""
    up = "../" * page.file.src_uri.count("/")
    return FIGURE.sub(rf"{up}\1", markdown).replace("<details", '<details markdown="1"')


def page_of(notebook, stem):
    """Return a notebook as Markdown and the pictures it shows, by file name."""
    parts, pictures, heading = [], {}, stem
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            heading = next(iter(re.findall(r"^#+ (.+)$", source, re.M)[-1:]), heading)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Figure of the section “{heading}”]({name})")
            else:
                printed = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{printed.rstrip()}\n```")
    link = f"[The notebook itself]({stem}.ipynb), to run it."
    return "\n\n".join([*parts, link, ""]), pictures
