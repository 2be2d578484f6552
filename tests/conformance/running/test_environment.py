"""Where a run took place is known without git, too."""

from attest.conformance.running.environment import environment


def test_the_commit_is_told_where_there_is_no_checkout(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("ATTEST_COMMIT", raising=False)
    assert environment()["commit"] == ""
    monkeypatch.setenv("ATTEST_COMMIT", "0123abcd")
    assert environment()["commit"] == "0123abcd"


def test_the_commit_of_copied_files_may_be_named_inside_another_checkout(monkeypatch) -> None:
    monkeypatch.setenv("ATTEST_COMMIT", "0123abcd")
    assert environment()["commit"] == "0123abcd"
