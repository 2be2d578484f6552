"""Reports of runs and of kernel changes: for terminals, pull requests, pages and CI."""

if __name__ == "reports":
    raise ImportError(
        "import attest.reports: reports alone is a second copy of it, or another project's package"
    )
