"""Tuned configurations on disk: one readable JSON file for each key, in the user's cache folder.

A file is written whole and renamed into place, so that readers and writers of several processes never see a
part of one. What cannot be read is treated as absent. Nothing in a file is executed.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from attest.kernels.options import refuse, shown

SCHEMA = 1
_VARIABLE = "ATTEST_CACHE_DIR"
_ADVICE = f"Set {_VARIABLE} to a folder that can be written."


class PersistentCache[Config]:
    """Configurations of one operation on disk, by environment, operation and call.

    name: a folder below the cache folder, such as "flash-attention". cfg_type: the class of the
    configurations, with `to_json` and `from_json`. folder: in place of ATTEST_CACHE_DIR, or of the user's
    cache folder.
    """

    def __init__(self, name: str, cfg_type: type[Config] | None = None, folder: Path | str | None = None):
        """Open a cache; no file is read or written yet.

        Raises: ValueError for a name that is no plain folder name.
        """
        if not name or name in (".", "..") or any(x in name for x in "/\\\0"):
            refuse("name", shown(name), "the name of one folder", "Use the name of the operation.")
        self.name = name
        self._type = cfg_type
        self._folder = None if folder is None else Path(folder)
        self._warned: set[Path] = set()

    @property
    def folder(self) -> Path:
        """Where the files are."""
        given = self._folder or os.environ.get(_VARIABLE)
        return Path(given or user_cache_path("attest", appauthor=False)) / self.name

    def path(self, environment: str, op_id: str, call_key: str) -> Path:
        """Return the file of a key."""
        return self.folder / f"{op_id}-{call_key}-{environment}.json"

    def get(self, environment: str, op_id: str, call_key: str) -> Config | None:
        """Return a configuration, or None where there is no file that can be read.

        A file that is broken, of another key or of a newer schema gives one warning and None.
        """
        path = self.path(environment, op_id, call_key)
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            return self._skip(path, str(error))
        try:
            return self._read(text, [environment, op_id, call_key])
        except (ValueError, TypeError, RecursionError) as error:
            return self._skip(path, str(error))

    def put(
        self,
        environment: str,
        op_id: str,
        call_key: str,
        config: Config,
        record: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a configuration in place of the one before, and return its file.

        record: what else is worth reading, such as the record of a tuning run.

        Raises: ValueError naming the folder if it cannot be written, or a file of a newer schema, which is
        left as it is.
        """
        path = self.path(environment, op_id, call_key)
        if (found := _schema(path)) > SCHEMA:
            expected = f"schema {SCHEMA} or older"
            refuse(str(path), f"schema {found}", expected, f"Upgrade attest. {_ADVICE}")
        content = {
            "schema": SCHEMA,
            "key": [environment, op_id, call_key],
            "config": json.loads(self.to_json(config)),
            "record": dict(record or {}),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(content, indent=1, sort_keys=True))
        except OSError as error:
            refuse(_VARIABLE, f"{path.parent} ({error.strerror})", "a folder that can be written", _ADVICE)
        return path

    def clear(self) -> int:
        """Remove the files of this cache, and return how many there were."""
        files = list(self.folder.glob("*.json")) if self.folder.is_dir() else []
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def _read(self, text: str, key: list[str]) -> Config:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        if content.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {shown(content.get('schema'))}, and {SCHEMA} is read")
        if content.get("key") != key:
            raise ValueError("it belongs to another key")
        return self.from_json(json.dumps(content.get("config")))

    def to_json(self, config: Any) -> str:
        """Return a configuration as JSON."""
        return json.dumps(config) if self._type is None else config.to_json()

    def from_json(self, text: str) -> Any:
        """Return the configuration that `to_json` wrote."""
        read: Callable[[str], Any] = json.loads if self._type is None else self._type.from_json  # pyright: ignore[reportAttributeAccessIssue]
        return read(text)

    def _skip(self, path: Path, why: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(
                f"{path}: skipped, since it is no configuration that attest reads: {why}. "
                "It is rewritten when the call is tuned again.",
                stacklevel=4,
            )


def _schema(path: Path) -> int:
    """The schema of the file that is there, 0 for none or a broken one."""
    try:
        found = json.loads(path.read_text("utf-8")).get("schema")
    except (OSError, ValueError, AttributeError, RecursionError):
        return 0
    return found if isinstance(found, int) else 0


def _write(path: Path, text: str) -> None:
    """Write a file beside its place and rename it."""
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
