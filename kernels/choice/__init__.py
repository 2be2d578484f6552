"""The choice of the implementation that runs a call: by what it supports, and by measured times."""
