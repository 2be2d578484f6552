"""The judge of a tuner's candidates, installed as the entry point `attest.judges`."""
