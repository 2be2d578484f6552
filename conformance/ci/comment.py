"""The comment on a pull request: one, which every run updates.

A workflow of its own posts it, which has a token and runs nothing of the pull request. The artifact of the
pull request is text from anybody: it is checked, cut to a length, and can mention nobody.
"""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attest.conformance.ci.inputs import NUMBER
from attest.conformance.ci.workflow import StepError

# GitHub refuses more than 65,536 characters.
BODY_CHARACTERS = 60_000
_NUMBER_BYTES = 32
_SECONDS = 30
_PAGE, _PAGES = 100, 30
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MENTION = re.compile("@(?=[A-Za-z0-9])")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SHA = re.compile("[0-9a-f]{40}")


def post(folder: Path, title: str) -> str:
    """Post or update the comment that an artifact holds; return its address. Raises StepError.

    title: the name of the comment; a comment of another title is another comment.
    """
    number = _read(folder / "pull-request.txt", _NUMBER_BYTES).strip()
    if not NUMBER.fullmatch(number):
        raise StepError(f"pull-request.txt: got {number!r}, expected the number of a pull request")
    text = _read(folder / "comment.md", 4 * BODY_CHARACTERS)
    repository = _variable("GITHUB_REPOSITORY", _REPOSITORY)
    head = _variable("ATTEST_HEAD_SHA", _SHA)
    pull = _call("GET", f"repos/{repository}/pulls/{number}")
    if pull["head"]["sha"] != head:
        raise StepError(f"pull request {number}: its head is not {head}, which was tested: nothing is posted")
    marker = f"<!-- attest comment: {re.sub('[^A-Za-z0-9 ._-]', '', title)} -->"
    body = {"body": f"{marker}\n## {_safe(title)}\n\n{_safe(text)}"}
    for comment in _comments(repository, number):
        by_us = comment["user"]["type"] == "Bot"
        if by_us and comment["body"].startswith(marker):
            return _call("PATCH", f"repos/{repository}/issues/comments/{comment['id']}", body)["html_url"]
    return _call("POST", f"repos/{repository}/issues/{number}/comments", body)["html_url"]


def _safe(text: str) -> str:
    """Return Markdown of limited length without control characters, hidden text and mentions of people."""
    clean = _CONTROL.sub("", text.replace("\r\n", "\n"))
    clean = _MENTION.sub("@\N{ZERO WIDTH SPACE}", clean.replace("<!--", "&lt;!--"))
    return clean if len(clean) <= BODY_CHARACTERS else f"{clean[:BODY_CHARACTERS]}\n\n[cut]"


def _read(path: Path, most: int) -> str:
    """Return the text of a file of the artifact. Raises StepError."""
    try:
        if path.is_symlink() or not path.is_file():
            raise StepError(f"{path.name}: not a file of the artifact")
        size = path.stat().st_size
        if size > most:
            raise StepError(f"{path.name}: got {size} bytes, expected at most {most}")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise StepError(f"{path.name}: {error.strerror}") from error


def _comments(repository: str, number: str) -> Iterator[dict[str, Any]]:
    for page in range(1, _PAGES + 1):
        found = _call("GET", f"repos/{repository}/issues/{number}/comments?per_page={_PAGE}&page={page}")
        yield from found
        if len(found) < _PAGE:
            return


def _call(method: str, path: str, body: dict[str, str] | None = None) -> Any:
    """Call GitHub's API. Raises StepError."""
    root = os.environ.get("GITHUB_API_URL", "https://api.github.com")
    request = urllib.request.Request(
        f"{root}/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {os.environ.get('GITHUB_TOKEN', '')}",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise StepError(f"{method} {path}: GitHub answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise StepError(f"{method} {path}: {error}") from error


def _variable(name: str, form: re.Pattern[str]) -> str:
    value = os.environ.get(name, "")
    if not form.fullmatch(value):
        raise StepError(f"{name}: got {value!r}, expected {form.pattern}")
    return value
