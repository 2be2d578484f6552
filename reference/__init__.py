"""The float64 oracle and the error model, in NumPy alone."""

if __name__ == "reference":
    raise ImportError(
        "import attest.reference: reference alone is a second copy of it, or another project's package"
    )
