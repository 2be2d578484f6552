"""Many Cases on many processes: plans, workers, shrinking, expectations and the gate."""
