"""The parts of a launch of a Hopper kernel: warpgroups, operands, results, shared memory, copies."""
