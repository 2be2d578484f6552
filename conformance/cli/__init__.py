"""The command `attest`."""
