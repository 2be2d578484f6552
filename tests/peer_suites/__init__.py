"""The test suites of peers, run unmodified on our adapters by `nox -s peer-tests`, and what judges them.

A suite is a table in `suites.toml` and a folder of its name. The folder has `in_place.py`, a pytest plugin
that puts our function in the place of the peer's, and `expected.toml`, which says how the tests end.
"""
