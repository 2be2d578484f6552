"""A suite like a peer's, for the tests of its judge."""
