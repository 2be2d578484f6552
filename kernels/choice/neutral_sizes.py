"""Neutral block sizes: each implementation translates them to its own, or refuses a field by name."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from attest.kernels.arguments import AttentionArguments
from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse
from attest.kernels.configs.fields import check_fields
from attest.kernels.configs.tunable import Neutral, Tunable
from attest.kernels.contract import Implementation


@dataclass(frozen=True)
class FwdParams:
    """Neutral sizes of the forward pass; the implementation chooses those that are None.

    q_blocksize: query rows of a block. kv_blocksize: keys of a block. num_warps: of a program on a GPU.
    num_stages: of the pipeline that loads keys. The others are refused: they are for
    kernels that attest does not have.
    """

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class BwdParams:
    """Neutral sizes of the backward pass, of all its kernels; see `FwdParams`."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def neutral(params: FwdParams | BwdParams | None) -> Neutral:
    """Return the sizes that are given, by name."""
    return {} if params is None else {name: x for name, x in asdict(params).items() if x is not None}


def understood(argument: str, sizes: Neutral, tunable: Tunable, name: str, unused: list[str]) -> Neutral:
    """Return the sizes that an implementation has; the others are added to `unused`, each with the reason."""
    unused += [f"{argument}.{x}: {name} has no such size" for x in sizes if x not in tunable.understood]
    return {x: size for x, size in sizes.items() if x in tunable.understood}


def split_sizes[T: AttentionArguments](arguments: T) -> tuple[T, dict[str, Neutral]]:
    """Return a call without neutral sizes, and those by the name of the argument.

    Raises: ValueError for neutral sizes beside a configuration, and for those of the other pass.
    """
    sizes: dict[str, Neutral] = {}
    for name, given, kind in (
        ("fwd_params", arguments.fwd_params, FwdParams),
        ("bwd_params", arguments.bwd_params, BwdParams),
    ):
        if not isinstance(given, FwdParams | BwdParams):
            continue
        if type(given) is not kind:
            refuse(name, f"a {type(given).__name__}", kind.__name__, f"Build it as {kind.__name__}.")
        if arguments.config is not None:
            refuse(
                name, f"a {kind.__name__} and a config", "one of them", "Put the block sizes into the config."
            )
        sizes[name] = neutral(given)
    return (replace(arguments, **dict.fromkeys(sizes)) if sizes else arguments), sizes


def with_sizes[T: AttentionArguments](
    arguments: T, sizes: Mapping[str, Neutral], implementation: Implementation, call: Call, named: bool
) -> T:
    """Return a call with block sizes of the implementation in place of neutral ones.

    The tables choose the sizes that are left out. named: whether the call names the implementation; a
    size that it does not have is then refused, and left out else.

    Raises: ValueError naming the size.
    """
    if not any(sizes.values()):
        return arguments
    tunable = implementation.tunable()
    if tunable is None:
        if named:
            name = next(name for name, given in sizes.items() if given)
            advice = "Leave it out."
            refuse(name, "block sizes", f"none, as {implementation.name!r} has no block sizes", advice)
        return arguments
    forward, backward = sizes.get("fwd_params", {}), sizes.get("bwd_params", {})
    if not named:
        name = implementation.name
        forward = understood("fwd_params", forward, tunable, name, [])
        backward = understood("bwd_params", backward, tunable, name, [])
    config = tunable.translated(call, forward, backward)
    return replace(
        arguments,
        fwd_params=config.forward if arguments.fwd_params is None else arguments.fwd_params,
        bwd_params=config.backward if arguments.bwd_params is None else arguments.bwd_params,
    )
