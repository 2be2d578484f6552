"""The refusal of a kernel by name where a program is lowered for a device that it cannot run on.

Only the lowering has the target of a program: a process without a device may compile for one, or export. So a
call carries an operation that does nothing else.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import mlir

from attest.kernels.guards import guard


def requirement(
    name: str, platform: str, refuse: Callable[[str], Any], check: Callable[[], None] = lambda: None
) -> Callable[[jax.Array], jax.Array]:
    """Return a function that returns its array; lowering it for another platform is refused.

    refuse: raises, from the names of the platforms that the program is for. check: raises if the program is
    for `platform`, and the devices of that kind that are here will not do.
    """

    def there(_context: Any, x: Any) -> list[Any]:
        check()
        return [x]

    def elsewhere(context: Any, _x: Any) -> list[Any]:
        return refuse(", ".join(context.module_context.platforms))

    primitive = guard(name, lower=elsewhere)
    mlir.register_lowering(primitive, there, platform=platform)
    return primitive.bind
