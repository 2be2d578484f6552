"""The test suites of peers, run unmodified on our adapters by `nox -s peer-tests`, and what judges them."""
