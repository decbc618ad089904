"""Pages of the site that are no files of docs/: those of the root, and a reference. `mkdocs.yml` names this file."""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "LICENSE": "license.md",
}
MODULES = (
    *("auto_hooks", "comm_hooks", "decoupled_hooks", "owner_hooks", "codecs"),
    *("averaging_hooks", "muon_hooks", "kfac_hooks"),
    *("gpu_mutex", "metrics", "pipeline", "errors"),
)


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
        text = f"# crossover_ddp.{module}\n\n::: crossover_ddp.{module}\n    options: {{members: {_offered(module)}}}\n"
        files.append(File.generated(config, f"reference/{module}.md", content=text))
    return files


def _offered(module: str) -> list[str]:
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
    """Let links to pages of the root lead to them."""
    return re.sub(
        r"\]\((?:\.\./)?(README\.md|CONTRIBUTING\.md|CHANGELOG\.md|LICENSE)(#[^)]*)?\)",
        lambda found: f"]({PAGES[found[1]]}{found[2] or ''})",
        markdown,
    )
