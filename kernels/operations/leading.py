"""A call over a mesh with no batch dimension, or several: the call with one, and its specs (S27)."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from attest.kernels.call.axes import behind_batch
from attest.kernels.call.leading_axes import Leading, merged_arrays
from attest.kernels.call.options import refuse


def with_one_batch(
    arguments: Mapping[str, Any], operands: Sequence[str], in_specs: Any, out_specs: Any
) -> tuple[dict[str, Any], Any, Any, Leading | None]:
    """Return a call, in_specs and out_specs with one batch dimension, and the batch dimensions of query.

    operands: the names that in_specs pair with. The batch dimensions are None where query has one, or is
    malformed. Of several the first may be split, as its parts follow each other in the merged one.

    Raises: ValueError naming the argument, also for a spec that splits another batch dimension.
    """
    merged_arguments, leading = merged_arrays(arguments)
    if leading is None:
        return merged_arguments, in_specs, out_specs, None
    specs = [
        _one_batch(f"in_specs of {name}", spec, getattr(arguments.get(name), "ndim", 0), behind_batch(name))
        for name, spec in zip(operands, in_specs, strict=False)
    ]
    out_specs = _one_batch("out_specs", out_specs, len(leading) + 3, 3)
    return merged_arguments, (*specs, *in_specs[len(specs) :]), out_specs, leading


def _one_batch(place: str, spec: Any, ndim: int, behind: int | None) -> Any:
    """Return the spec of an array with one batch dimension in place of those in front of its last axes."""
    if behind is None or not isinstance(spec, PartitionSpec) or len(spec) > ndim or ndim < behind:
        return spec
    entries = (*spec, *(None,) * (ndim - len(spec)))
    batch = entries[: ndim - behind]
    if any(entry is not None for entry in batch[1:]):
        expected = "the first batch dimension split alone"
        refuse(place, str(spec), expected, "Reshape the arrays to one batch dimension.")
    return PartitionSpec(batch[0] if batch else None, *entries[ndim - behind :])
