"""Read code blocks out of documents, so that tests run the code that readers see."""

import re


def section(document: str, heading: str) -> str:
    """Return the text under a heading, up to the next heading of the same level or above."""
    (start,) = re.finditer(rf"^(#+) {re.escape(heading)}$", document, flags=re.MULTILINE)
    rest = document[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, flags=re.MULTILINE)
    return rest if end is None else rest[: end.start()]


def blocks(document: str, language: str) -> list[str]:
    """Return the document's fenced blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL)


def before(diff: str) -> str:
    """Return the text before a diff: its lines without a sign, and those with a minus."""
    return _without(diff, "+")


def after(diff: str) -> str:
    """Return the text after a diff: its lines without a sign, and those with a plus."""
    return _without(diff, "-")


def patched(source: str, diff: str) -> str:
    """Apply a diff to a source. A line ``...`` of the diff stands for any lines of the source."""
    lines = source.splitlines()
    position = 0  # behind the last line of the source that the diff has mentioned
    waiting: list[str] = []  # added lines that go before the next line that the diff mentions
    follows = False  # whether the diff has mentioned a line since the last ``...``
    for line in diff.splitlines():
        if line.strip() == "...":
            lines[position:position] = waiting
            position += len(waiting)
            waiting = []
            follows = False
        elif line.startswith("+") and not follows:
            waiting.append(line[1:])
        elif line.startswith("+"):
            lines.insert(position, line[1:])
            position += 1
        else:
            position = lines.index(line[1:], position)
            lines[position : position + line.startswith("-")] = waiting
            position += len(waiting) + (not line.startswith("-"))
            waiting = []
            follows = True
    return "\n".join(lines)


def _without(diff: str, sign: str) -> str:
    return "".join(
        line[1:] or "\n" for line in diff.splitlines(keepends=True) if not line.startswith(sign)
    )
