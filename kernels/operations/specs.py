"""Checks of mesh, in_specs and out_specs, which describe how a call is sharded."""

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from attest.kernels.call.options import refuse, shown

_NAMES = ("mesh", "in_specs", "out_specs")


def checked_specs(mesh: Any, in_specs: Any, out_specs: Any, *, needed: bool = False) -> tuple[Any, Any, Any]:
    """Return mesh, in_specs as a tuple, and out_specs: all three or none of them.

    needed: whether the three must be there.

    Raises: ValueError naming the argument, for a part of the three, and for what is no mesh or no spec.
    """
    given = dict(zip(_NAMES, (mesh, in_specs, out_specs), strict=True))
    missing = [name for name, x in given.items() if x is None]
    if missing and (needed or len(missing) < len(given)):
        there = ", ".join(name for name in given if name not in missing)
        got = f"none beside {there}" if there else "none"
        refuse(missing[0], got, "mesh, in_specs and out_specs together", "Give all three.")
    if mesh is None:
        return None, None, None
    if not isinstance(mesh, Mesh | AbstractMesh):
        refuse("mesh", f"a {type(mesh).__name__}", "a jax.sharding.Mesh", "Build it with jax.make_mesh.")
    if not isinstance(in_specs, tuple | list):
        refuse("in_specs", f"a {type(in_specs).__name__}", "a tuple of specs", "Give one for each operand.")
    for i, spec in enumerate(in_specs):
        _check_can_be_spec(f"in_specs[{i}]", spec)
    _check_can_be_spec("out_specs", out_specs)
    return mesh, tuple(in_specs), out_specs


def _check_can_be_spec(place: str, spec: Any) -> None:
    """Refuse what has no hash, as no spec has none; what it may be else, the operation checks."""
    try:
        hash(spec)
    except TypeError:
        expected = "a jax.sharding.PartitionSpec"
        refuse(place, f"a {type(spec).__name__}, {shown(spec)}", expected, "Give one, or None.")
