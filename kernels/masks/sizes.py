"""The sizes of the call that a MaskInfo is for: what its arrays tell, and what the caller adds."""

from dataclasses import dataclass

from attest.kernels.call.options import check_integer, refuse
from attest.kernels.call.sequences import check_lengths
from attest.kernels.masks.conditions import Conditions

# The axes of each array. One with a question mark may be 1, and is then shared.
AXES = {
    "attention_mask": ("batch?", "heads?", "q_length?", "kv_length?"),
    "q_segment_ids": ("batch?", "q_length"),
    "kv_segment_ids": ("batch?", "kv_length"),
    "q_positions": ("batch?", "q_length"),
    "kv_positions": ("batch?", "kv_length"),
    "kv_lengths": ("batch?",),
    "kv_start": ("batch?", "q_length"),
    "kv_end": ("batch?", "q_length"),
}


@dataclass(frozen=True)
class Sizes:
    """Batch, query heads and lengths; None where nothing tells."""

    batch: int | None = None
    heads: int | None = None
    q_length: int | None = None
    kv_length: int | None = None

    def queries(self) -> int:
        """Return Sq, or refuse a conversion that needs it."""
        return _needed("q_length", self.q_length)

    def keys(self) -> int:
        """Return Sk, or refuse a conversion that needs it."""
        return _needed("kv_length", self.kv_length)


def sizes_of(
    info: Conditions,
    *,
    batch: int | None = None,
    heads: int | None = None,
    q_length: int | None = None,
    kv_length: int | None = None,
) -> Sizes:
    """Return the sizes that are given or that the arrays of `info` have.

    Raises: ValueError naming the first array whose size is another.
    """
    known: dict[str, int | None] = {"batch": batch, "heads": heads}
    for name, length in (("q_length", q_length), ("kv_length", kv_length)):
        known[name] = None if length is None else check_integer(name, length)

    def meet(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
        for size, axis in zip(shape, axes, strict=True):
            what = axis.rstrip("?")
            if size == 1 and what != axis:
                continue
            if known[what] is None:
                known[what] = size
            elif known[what] != size:
                refuse(
                    f"mask_info.{name}",
                    f"shape {shape}",
                    f"{what} {known[what]}{' or 1' if what != axis else ''}",
                    "Build the MaskInfo for the arrays of this call; name the axes of a mask with axes=.",
                )

    for name, axes in AXES.items():
        array = getattr(info, name)
        if array is not None:
            meet(name, array.shape, axes)
    if info.cum_seqlens_q is None or info.cum_seqlens_k is None:
        if info.q_offset is not None:
            meet("q_offset", info.q_offset.shape, ("batch?",))
        return Sizes(**known)
    sequences = info.cum_seqlens_q.shape[0] - 1
    if (known["batch"] or 1) != (1 if info.packed else sequences) and known["batch"] is not None:
        refuse(
            "mask_info.cum_seqlens_q",
            f"{sequences} {'packed' if info.packed else 'padded'} sequences and batch {known['batch']}",
            "batch 1 where sequences are packed, and one batch entry each where they are padded",
            "MaskInfo.from_cu_seqlens(..., padded=True) is for a batch of padded sequences.",
        )
    known["batch"] = 1 if info.packed else sequences
    if info.q_offset is not None and info.q_offset.shape[0] not in (1, sequences):
        refuse(
            "mask_info.q_offset",
            f"shape {info.q_offset.shape}",
            f"[1] or [{sequences}]",
            "Give one offset for each sequence.",
        )
    # Eager lengths are compared with the arrays that hold the tokens.
    for_q, for_k = known["q_length"], known["kv_length"]
    if for_q is not None and for_k is not None:
        check_lengths(info.cum_seqlens_q, info.cum_seqlens_k, known["batch"], for_q, for_k)
    return Sizes(**known)


def _needed(name: str, length: int | None) -> int:
    if length is None:
        refuse(name, None, "the length, which no array of the MaskInfo tells", f"Pass {name}=.")
    return length
