"""Runs the suite of a peer, in an environment that has the peer: `python -m tests.peer_suites NAME`.

Options after the name are pytest's.
"""

import os
import sys

from tests.peer_suites.table import HERE, load_suites, test_files

name, *options = sys.argv[1:]
suite = load_suites()[name]
judged = ["-c", f"{HERE}/suites.ini", "--rootdir", ".", "-p", f"tests.peer_suites.{name}.in_place"]
judged += ["--expected", f"{HERE}/{name}/expected.toml", *(f"--select={each}" for each in suite.select)]
command = [sys.executable, "-m", "pytest", *judged, *map(str, test_files(suite)), *options]
os.execve(sys.executable, command, os.environ | suite.environment)
