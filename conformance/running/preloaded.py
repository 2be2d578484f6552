"""Everything that a worker imports before its first job, without the code of external subjects.

A server imports this module and forks the workers, so it must start no thread and no backend of JAX.
"""

from contextlib import suppress

from attest.conformance.checks import all_checks
from attest.conformance.process.settings import hush
from attest.conformance.running import runner as runner
from attest.conformance.subject import discover

hush()
with suppress(Exception):  # a worker meets the same error, and reports it
    all_checks()
    discover()
