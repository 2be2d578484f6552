"""The devices that kernels are compiled for: their limits and peaks, of devices.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_DEVICES = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True)
class Peaks:
    """The most that a device can do, as its vendor publishes it.

    of: which part, and how much of it. flops_per_second: by dtype, where a number is published.
    bytes_per_second: of its main memory.
    """

    of: str
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    source: str


@dataclass(frozen=True)
class Device:
    """A device to compile for, of conformance/compiling/devices.toml.

    target: the options of its compiler. limits, sources: the limits and where they are published, by name.
    """

    name: str
    target: Mapping[str, Any]
    limits: Mapping[str, int]
    sources: Mapping[str, str]
    peaks: Peaks


@cache
def all_devices() -> dict[str, Device]:
    """Return the devices of devices.toml by name."""
    found: dict[str, Device] = {}
    table = tomllib.loads(_DEVICES.read_text())
    for name, written in table.items():
        row = written if "each" not in written else _several(written, table[written["each"]])
        limits = {key: x for key, x in row.items() if "limit" in x}
        found[name] = Device(
            name,
            row["target"],
            limits={key: x["limit"] for key, x in limits.items()},
            sources={key: x["source"] for key, x in limits.items()},
            peaks=Peaks(**row["peaks"]),
        )
    return found


def _several(row: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """Return devices that are alike: the limits are those of each, the peaks of all together."""
    devices, peaks = row["target"]["devices"], one["peaks"]
    together = {
        "of": f"{devices} times {peaks['of']}",
        "flops_per_second": {dtype: devices * x for dtype, x in peaks["flops_per_second"].items()},
        "bytes_per_second": devices * peaks["bytes_per_second"],
    }
    return {**one, **row, "peaks": {**peaks, **together}}
