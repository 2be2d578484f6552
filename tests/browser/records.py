"""Makes the records of the pages anew: `python -m tests.browser.records`, then `nox -s browser -- --refresh`.

Both are runs of the small kernel of tests/wrong_kernels: correct, and with a mistake. They have one subject's
name, as before and after a change of a kernel.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from attest.conformance.records.baseline_file import baseline_text
from attest.conformance.records.record_file import read_record

HERE = Path(__file__).parent
SUBJECTS = "tests.wrong_kernels.subjects:"
MISTAKE = "window_at_block_edge"
FILES = {"correct": HERE / "base.jsonl", MISTAKE: HERE / "record.jsonl"}


def main() -> None:
    """Judge both kernels, and write their records."""
    for kernel, file in FILES.items():
        with TemporaryDirectory() as folder:
            written = Path(folder) / "run.json"
            asked = ["attest", "check", f"{SUBJECTS}{kernel}", "--json", str(written)]
            subprocess.run([sys.executable, "-m", *asked], check=kernel == "correct")
            record = read_record(written)
        results = tuple(replace(result, subject=f"{SUBJECTS}{MISTAKE}") for result in record.results)
        environment = {"backend": "cpu", "device": "cpu"}
        file.write_text(baseline_text(replace(record, results=results, environment=environment)))


if __name__ == "__main__":
    main()
