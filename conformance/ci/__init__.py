"""The steps of the GitHub action, `python -P -m attest.conformance.ci STEP`: docs/how-to/github.md.

The steps `prepare` and `comment` use the standard library alone, so that they also run where attest is
installed without its dependencies.
"""
