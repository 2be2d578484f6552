"""Subjects of the small kernel: `correct`, and one for each mistake of mistakes.toml, by its name.

`attest check tests.wrong_kernels.subjects:causal_edge` tests the first of them.
"""

import linecache
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

from attest import Semantics, Subject, validate_call

_FOLDER = Path(__file__).parent
MISTAKES: dict[str, dict[str, Any]] = tomllib.loads((_FOLDER / "mistakes.toml").read_text())


def module_with(mistake: str | None) -> ModuleType:
    """The kernel as a module, with a mistake planted. Raises ValueError if its text is not there once."""
    source = (_FOLDER / "attention.py").read_text()
    if mistake is not None:
        edit = MISTAKES[mistake]
        if source.count(edit["correct"]) != 1:
            raise ValueError(
                f"{mistake}: {edit['correct']!r} occurs {source.count(edit['correct'])} times, not once"
            )
        source = source.replace(edit["correct"], edit["planted"])
    file = str(_FOLDER / f"attention[{mistake}].py")
    # So that a traceback shows the planted line.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(f"attention_{mistake}")
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def _subject(mistake: str | None) -> Subject:
    module = module_with(mistake)

    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        validate_call(query, key, value, supports=subject, **options)
        return module.attention(query, key, value, **options)

    subject = Subject(
        name=mistake or "correct",
        call=call,
        features=frozenset({"causal", "window", "soft_cap", "scale", "gqa", "value_dim"}),
        dtypes=("float32", "bfloat16"),
        # Hidden values are multiplied by 0.
        semantics=Semantics(hidden_nonfinite="leaks"),
        returns_lse=True,
    )
    return subject


correct = _subject(None)


def __getattr__(name: str) -> Subject:
    if name not in MISTAKES:
        raise AttributeError(name)
    return _subject(name)
