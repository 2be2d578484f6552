"""The laws: equations between several calls of one kernel, which need no oracle's answer.

A law changes a call into other calls, and states an equation between the outputs of all: a call with a window
past the ends of the keys equals the call without it. Each law is one entry of `table.LAWS`, with

- a name, the clauses that it follows from, and a sentence,
- the features that a subject must declare, and those that are taken from a case first,
- a function from a trial to the calls and the equations, or to the reason why a case does not show the law.

One check runs every law (`run`). It makes the case that the law applies to, runs the calls if the subject
takes all of them, and compares both sides of each equation. They may differ by the sum of their bounds in the
error model, each predicted for its own call. So the oracle sets the tolerance, and never the answer. Only
repeated calls of a subject that declares to be deterministic are compared bit for bit.
"""

from attest.conformance.checks.laws.run import check_of
from attest.conformance.checks.laws.table import LAWS

CHECKS = tuple(check_of(law) for law in LAWS)
