"""Finds the patterns of English that this project avoids, in docstrings, comments and messages.

``python -m tests.rules.words [-v] PATH...`` prints how often each stands in 10,000 words, and with
``-v`` each place. [Note: words] CONTRIBUTING.md explains the patterns.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PATTERNS = {
    "persons": re.compile(r"\b(?:nobody|somebody|everybody|whoever)\b", re.IGNORECASE),
    "a clause with what": re.compile(
        r"\bwhat (?:\w+ )?(?:is|are|was|were|has|have|had|it|they|he|we|does|did|do|can|will|would|"
        r"travels?|comes?|came|makes?|made|waits?|takes?|took|needs?|arrives?|belongs?|ends?|raises?|"
        r"follows?|goes|stands?|the|a|an|its|this|that|another|other|all|each|owners?|ranks?|torch|DDP)\b"
    ),
    "tell, say, hear": re.compile(r"\b(?:tells?|told|says?|said|hears?|heard)\b", re.IGNORECASE),
    "a sentence that begins with Of": re.compile(r"(?:^|[.:;] +)Of (?!course)\w+"),
    "a sentence that begins with What or Who": re.compile(
        r"(?:^|[.:;] +)(?:What|Who)\b(?![^.]*\?)"
    ),
    "too, anew, by now": re.compile(r", too\b|\banew\b|\bby now\b|\bfor good\b|\bso many\b"),
    "go on": re.compile(r"\b(?:go|goes|went|going|gone) on\b"),
    "who as a subject": re.compile(r"(?:^|[,.;:] *|\bor |\band |\bfor |\bby )who\b(?![^.]*\?)"),
}


class Passage(NamedTuple):
    path: Path
    line: int
    text: str


def passages(path: Path) -> Iterator[Passage]:
    """Yield docstrings, runs of comments, and strings of at least four words."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and len(node.value.split()) >= 4
        ):
            yield Passage(path, node.lineno, " ".join(node.value.split()))
    run: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if run and token.start[0] != last + 1:
            yield Passage(path, first, " ".join(run))
            run = []
        if not run:
            first = token.start[0]
        run.append(token.string.lstrip("# "))
        last = token.start[0]
    if run:
        yield Passage(path, first, " ".join(run))


def places(path: Path) -> Iterator[tuple[str, Passage, str]]:
    """Yield each place where a pattern stands: its name, the passage, the words around it."""
    for passage in passages(path):
        for name, pattern in PATTERNS.items():
            for match in pattern.finditer(passage.text):
                begin, end = max(0, match.start() - 40), match.end() + 40
                yield name, passage, passage.text[begin:end]


def main() -> None:
    arguments = [each for each in sys.argv[1:] if each != "-v"]
    roots = [Path(each) for each in arguments]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*.py"))]
    words = sum(len(passage.text.split()) for path in paths for passage in passages(path))
    found = [place for path in paths for place in places(path)]
    if "-v" in sys.argv:
        for name, passage, around in found:
            print(f"{passage.path}:{passage.line}: {name}: …{around}…")
    counts = Counter(name for name, *_ in found)
    for name in PATTERNS:
        print(f"{name}: {counts[name]} ({counts[name] * 1e4 / max(words, 1):.1f} in 10,000 words)")


if __name__ == "__main__":
    main()
