"""Profiles, clusters and plans are kept as JSON files."""

import json
import os
from pathlib import Path
from typing import Any


def read_document(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; ``OSError`` if it cannot be read, ``ValueError`` if it is no JSON."""
    try:
        return json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(
            f"expected JSON in {os.fspath(path)}, got something else ({error}); mend the file"
        ) from error


def write_document(path: str | os.PathLike[str], document: Any) -> None:
    """Write a JSON file."""
    Path(path).write_text(json.dumps(document, indent=1) + "\n")
