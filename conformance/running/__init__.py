"""The checks of many Cases: plans, verdicts, shrinking, expectations and the gate."""
