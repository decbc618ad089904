"""Saves profiles, clusters and plans as JSON files."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

Self = TypeVar("Self", bound="Document")  # typing.Self exists only from Python 3.11 on


class Document:
    """An object that can be saved as a JSON file."""

    def to_json(self) -> Any:
        """Return the object as a JSON document."""
        raise NotImplementedError

    @classmethod
    def from_json(cls: type[Self], document: Any) -> Self:
        """Create the object from the output of `to_json`.

        Raises ``ValueError`` for any other document.
        """
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the output of `to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` has written.

        Raises ``OSError`` if the file cannot be read, and ``ValueError`` if its content is wrong.
        """
        try:
            document = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(
                f"expected JSON in {os.fspath(path)}, got something else ({error}); fix the file"
            ) from error
        return cls.from_json(document)
