"""Says what a run found and what a kernel change did to it: for terminals, pull requests, pages and CI."""
