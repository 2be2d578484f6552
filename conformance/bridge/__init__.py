"""The bridge to kernels of other environments: a Subject's `call` runs a function in another interpreter.

`bridged` makes the `call`. It starts the other interpreter with the first call of a process, one for each
function, and keeps it until the process ends. docs/how-to/another-environment.md shows its use.
"""

from attest.conformance.bridge.call import bridged
from attest.conformance.bridge.client import BridgeError
from attest.conformance.bridge.versions import version_there

__all__ = ["BridgeError", "bridged", "version_there"]
