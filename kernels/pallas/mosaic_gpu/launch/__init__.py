"""What a launch of a Hopper kernel is made of: warpgroups, operands, results, shared memory, copies."""
