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

from attest.kernels.call.options import refuse, shown
from attest.kernels.operations.configs import AttentionConfig, FlashAttentionConfig
from attest.kernels.operations.regular_files import read_regular

SCHEMA = 1
# Of one file. The record of a tuning run has some kilobytes for each candidate.
_MOST_BYTES = 1 << 24
# The class of the configurations of each of our operations, by the first part of `op_id`.
_TYPES: dict[str, type[Any]] = {
    "attention": AttentionConfig,
    "flash_attention": FlashAttentionConfig,
    "ring_attention": FlashAttentionConfig,
}
_VARIABLE = "ATTEST_CACHE_DIR"
_ADVICE = f"Set {_VARIABLE} to a folder that can be written."


class PersistentCache[Config]:
    """Configurations of one operation on disk, by environment, operation and call.

    name: a folder below the cache folder, such as "flash-attention". cfg_type: the class of the
    configurations, with `to_json` and `from_json`, where the operation of a key names none. Without either,
    configurations are plain JSON values. folder: in place of ATTEST_CACHE_DIR, or of the user's cache folder.
    """

    def __init__(self, name: str, cfg_type: type[Config] | None = None, folder: Path | str | None = None):
        """Open a cache; no file is read or written yet.

        Raises: ValueError for a name that is no plain folder name, and for a class that does not write and
        read configurations.
        """
        _check_arguments(name, cfg_type, folder)
        self.name = name
        self._type = cfg_type
        self._folder = None if folder is None else Path(folder)
        self._warned: set[Path] = set()

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        given = self._folder or os.environ.get(_VARIABLE)
        return Path(given or user_cache_path("attest", appauthor=False)) / self.name

    def path(self, environment: str, op_id: str, call_key: str) -> Path:
        """Return the file of a key."""
        return self.folder / f"{op_id}-{call_key}-{environment}.json"

    def get(
        self,
        environment: str,
        op_id: str,
        call_key: str,
        *,
        cfg_type: type[Any] | None = None,
        check: Callable[[Config], Any] | None = None,
    ) -> Config | None:
        """Return a configuration, or None where there is no file that can be read.

        cfg_type: the class that the operation names. check: raises ValueError or
        NotImplementedError for a configuration that does not fit the call.

        What is broken, of another key, of a newer schema, no regular file or very large gives one warning and
        None, and so does a configuration that does not fit.
        """
        path = self.path(environment, op_id, call_key)
        try:
            config = self._read(path, [environment, op_id, call_key], cfg_type)
            if check is not None:
                check(config)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError, NotImplementedError) as error:
            return self._skip(path, str(error))
        return config

    def put(
        self,
        environment: str,
        op_id: str,
        call_key: str,
        config: Config,
        record: Mapping[str, Any] | None = None,
        *,
        cfg_type: type[Any] | None = None,
    ) -> Path:
        """Write a configuration in place of the one before, and return its file.

        record: what else is worth reading, such as the record of a tuning run. cfg_type: as in `get`.

        Raises: ValueError naming the folder if it cannot be written, a file of a newer schema, which is left
        as it is, or a configuration that cannot be written as JSON.
        """
        path = self.path(environment, op_id, call_key)
        if (found := _schema(path)) > SCHEMA:
            expected = f"schema {SCHEMA} or older"
            refuse(str(path), f"schema {found}", expected, f"Upgrade attest. {_ADVICE}")
        content = {
            "schema": SCHEMA,
            "key": [environment, op_id, call_key],
            "config": json.loads(self.to_json(config, op_id, cfg_type)),
            "record": dict(record or {}),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(content, indent=1, sort_keys=True))
        except OSError as error:
            if path.is_dir():
                refuse(str(path), "a folder", "a file, or nothing there", "Remove it.")
            refuse(_VARIABLE, f"{path.parent} ({error.strerror})", "a folder that can be written", _ADVICE)
        return path

    def clear(self) -> int:
        """Remove the files of this cache, and return how many there were."""
        files = [path for path in self.folder.glob("*.json") if not path.is_dir()]
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def _read(self, path: Path, key: list[str], cfg_type: type[Any] | None) -> Config:
        content = json.loads(read_regular(path, _MOST_BYTES).decode())
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        if content.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {shown(content.get('schema'))}, and {SCHEMA} is read")
        if content.get("key") != key:
            raise ValueError("it belongs to another key")
        return self.from_json(json.dumps(content.get("config")), key[1], cfg_type)

    def to_json(self, config: Any, op_id: str, cfg_type: type[Any] | None = None) -> str:
        """Return a configuration of an operation as JSON.

        Raises: ValueError for one of another class, or that JSON does not have.
        """
        kind = self._type_of(op_id, cfg_type)
        if kind is not None and not isinstance(config, kind):
            refuse("config", f"a {type(config).__name__}", kind.__name__, f"It is that of {op_id}.")
        try:
            return json.dumps(config) if kind is None else config.to_json()
        except (TypeError, RecursionError):
            expected = f"a JSON value, as PersistentCache has no cfg_type and {op_id} no config_type"
            refuse("config", f"a {type(config).__name__}", expected, "Give one of the two.")

    def from_json(self, text: str, op_id: str, cfg_type: type[Any] | None = None) -> Any:
        """Return the configuration that `to_json` wrote."""
        kind: Any = self._type_of(op_id, cfg_type)
        return json.loads(text) if kind is None else kind.from_json(text)

    def _type_of(self, op_id: str, cfg_type: type[Any] | None) -> type[Any] | None:
        if cfg_type is not None and _reads_and_writes(cfg_type):
            return cfg_type
        return self._type or _TYPES.get(op_id.partition("@")[0])

    def _skip(self, path: Path, why: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(
                f"{path}: skipped, since it is no configuration that attest reads: {why}. "
                "It is rewritten when the call is tuned again.",
                stacklevel=4,
            )


def _check_arguments(name: Any, cfg_type: Any, folder: Any) -> None:
    if not isinstance(name, str) or not name.strip(".") or any(x in name for x in "/\\\0"):
        refuse("name", shown(name), "the name of one folder", "Use the name of the operation.")
    if cfg_type is not None and not _reads_and_writes(cfg_type):
        advice = "A folder is given as folder=..., the class of FlashAttention is FlashAttentionConfig."
        refuse("cfg_type", shown(cfg_type), "a class with to_json and from_json", advice)
    if folder is not None and not isinstance(folder, str | os.PathLike):
        refuse("folder", shown(folder), "a path", "Leave it out for the user's cache folder.")


def _reads_and_writes(kind: Any) -> bool:
    return isinstance(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("to_json", "from_json")
    )


def _schema(path: Path) -> int:
    """Return the schema of the file that is there, 0 for none or a broken one."""
    try:
        found = json.loads(read_regular(path, _MOST_BYTES).decode()).get("schema")
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
