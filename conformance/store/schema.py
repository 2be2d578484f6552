"""The schema of a store, which a file in its folder names."""

import json
from pathlib import Path

from attest.conformance.files import read_bytes
from attest.conformance.records.schema import schema_of
from attest.conformance.sizes import sizes

STORE = "attest.store/1"

_FILE = "schema.json"


class StoreError(ValueError):
    """A store cannot be read, or a query is wrong; the message is one sentence."""


def refuse_other_schemas(store: Path) -> None:
    """Raise StoreError for a store that another version of attest has made, in another form."""
    path = store / _FILE
    if not path.exists():
        return
    try:
        found = schema_of(read_bytes(path, sizes().request_bytes, "schema of a store"), str(path))
    except ValueError as error:
        raise StoreError(str(error)) from error
    if found != STORE:
        raise StoreError(f"{store}: its schema is {found!r}, and this version of attest reads {STORE!r}")


def write_schema(store: Path) -> None:
    """Name the schema in a store's folder, if that is not done. Raises OSError."""
    path = store / _FILE
    if not path.exists():
        path.write_text(json.dumps({"schema": STORE}) + "\n", encoding="utf-8")
