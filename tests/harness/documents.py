"""Read code blocks out of documents, so that what is shown is what is tested."""

import re


def section(document: str, heading: str) -> str:
    """Return what stands under a heading, up to the next one of its level or above."""
    (start,) = re.finditer(rf"^(#+) {re.escape(heading)}$", document, flags=re.MULTILINE)
    rest = document[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, flags=re.MULTILINE)
    return rest if end is None else rest[: end.start()]


def blocks(document: str, language: str) -> list[str]:
    """Return the document's fenced blocks of a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL)


def before(diff: str) -> str:
    """Return what a diff starts from: its lines without a sign, and those with a minus."""
    return _without(diff, "+")


def after(diff: str) -> str:
    """Return what a diff leads to: its lines without a sign, and those with a plus."""
    return _without(diff, "-")


def patched(source: str, diff: str) -> str:
    """Apply a diff to a source with its lines, of which ``...`` leaves some out."""
    lines, place, waiting, follows = source.splitlines(), 0, list[str](), False
    for line in diff.splitlines():
        if line.strip() == "...":
            lines[place:place] = waiting
            place += len(waiting)
            waiting, follows = [], False
        elif line.startswith("+") and not follows:
            waiting.append(line[1:])
        elif line.startswith("+"):
            lines.insert(place, line[1:])
            place += 1
        else:
            place = lines.index(line[1:], place)
            lines[place : place + line.startswith("-")] = waiting
            place += len(waiting) + (not line.startswith("-"))
            waiting, follows = [], True
    return "\n".join(lines)


def _without(diff: str, sign: str) -> str:
    return "".join(
        line[1:] or "\n" for line in diff.splitlines(keepends=True) if not line.startswith(sign)
    )
