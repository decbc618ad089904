"""Pages of the site that are no files of docs/: those of the root, and a reference. `mkdocs.yml` names this file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
MODULES = (
    *("auto_hooks", "comm_hooks", "decoupled_hooks", "owner_hooks", "codecs"),
    *("averaging_hooks", "muon_hooks", "kfac_hooks"),
    *("virtual_ranks", "gpu_mutex", "metrics", "fsdp", "pipeline", "errors"),
)
# Modules whose names are imported from themselves.
OWN_PATHS = ("fsdp", "pipeline")

PRIVATE_NAMES = "<!-- torch's private names -->"


def on_config(config: Any) -> Any:
    """Fill in the reference's pages."""
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = [{module: f"reference/{module}.md"} for module in MODULES]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add pages that stand elsewhere, or nowhere."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for module in MODULES:
        path = f"crossover_ddp.{module}" if module in OWN_PATHS else "crossover_ddp"
        text = f"# {module}\n\nImport these names from `{path}`.\n\n"
        text += f"::: crossover_ddp.{module}\n    options: {{members: {_offered(module)}}}\n"
        files.append(File.generated(config, f"reference/{module}.md", content=text))
    return files


def _offered(module: str) -> list[str]:
    """Return the names that a page describes: those that the package offers, each on one page."""
    names = _public(module)
    if module in OWN_PATHS:
        return names
    elsewhere = _public("decoupled_hooks") if module == "comm_hooks" else []
    return [name for name in names if name in _public("") and name not in elsewhere]


def _public(module: str) -> list[str]:
    """Return the names of ``__all__``, else of all public classes and functions."""
    path = ROOT / "crossover_ddp" / module
    tree = ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [*ast.literal_eval(node.value)]
    made = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return [name for name in made if not name.startswith("_")]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to pages of the root lead to them, and list torch's private names where a page asks for it."""
    if PRIVATE_NAMES in markdown:
        markdown = markdown.replace(PRIVATE_NAMES, _private_names())
    return re.sub(
        r"\]\((?:\.\./)?(README\.md|CONTRIBUTING\.md|CHANGELOG\.md|SECURITY\.md|LICENSE)(#[^)]*)?\)",
        lambda found: f"]({PAGES[found[1]]}{found[2] or ''})",
        markdown,
    )


def _private_names() -> str:
    """Return a table of torch's private names, with the comments on them in `torch_private.py`.

    A comment is about all statements up to the next one, except functions whose docstring names a guard.
    """
    source = (ROOT / "crossover_ddp/_system/torch_private.py").read_text()
    lines = source.splitlines()
    names_by_text: dict[str, dict[str, None]] = {}
    comment, line = "", 0
    for node in ast.parse(source).body:
        above = [each[2:] for each in lines[line : node.lineno - 1] if re.match("# (?!---)", each)]
        comment, line = " ".join(above) or comment, node.end_lineno or 0
        own = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        text = " ".join((own if own and "Guard" in own else comment).split())
        names_by_text.setdefault(text, {}).update(dict.fromkeys(_names_of_torch(node)))
    rows = ["| name | purpose, and the effect if it is missing |", "|---|---|"]
    for text, names in names_by_text.items():
        if text and names:
            listed = ", ".join(f"`{name}`" for name in names)
            text = re.sub(" Guards?:.*", "", text)
            text = re.sub(r"\b__\w+", r"`\g<0>`", text)  # else Markdown reads it as bold
            rows.append(f"| {listed} | {text} |")
    return "\n".join(rows)


def _names_of_torch(node: ast.AST) -> Iterator[str]:
    """Yield private names of torch in a statement: attributes, parts of modules, strings given to getattr."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and each.attr.startswith("_"):
            yield each.attr
        elif isinstance(each, ast.ImportFrom):
            imported = [f"{each.module}.{alias.name}" for alias in each.names]
            yield from [name for name in imported if "._" in name]
        elif isinstance(each, ast.Constant) and re.fullmatch(r"[a-z_]+", str(each.value)):
            yield each.value
