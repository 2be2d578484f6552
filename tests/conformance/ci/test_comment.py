"""The comment of a pull request, of an artifact that anybody may have written."""

import os
from pathlib import Path

import pytest

from attest.conformance.ci import comment
from attest.conformance.ci.workflow import StepError
from tests.api_of_github import Api

HEAD = "ab" * 20


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pull-request.txt").write_text("7\n")
    (tmp_path / "comment.md").write_text("**1 check fails**\n")
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/my-attention")
    monkeypatch.setenv("ATTEST_HEAD_SHA", HEAD)
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    return tmp_path


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch):
    with Api(HEAD, others=150) as api:
        monkeypatch.setenv("GITHUB_API_URL", api.address)
        yield api


def test_a_comment_is_updated_behind_those_of_others(artifact, api):
    """A comment of somebody else with our marker is theirs, and ours is on the second page."""
    assert comment.post(artifact, "attest").endswith("/pull/7#issuecomment-1")
    (artifact / "comment.md").write_text("all pass")
    assert comment.post(artifact, "attest").endswith("/pull/7#issuecomment-1")
    assert api.comments == {1: "<!-- attest comment: attest -->\n## attest\n\nall pass"}
    comment.post(artifact, "other")
    assert len(api.comments) == 2


def test_the_text_can_mention_nobody_hide_nothing_and_is_cut(artifact, api):
    (artifact / "comment.md").write_text("@all <!-- attest comment: x -->\u202e\x1b[31m a@b" + "x" * 100_000)
    comment.post(artifact, "attest")
    body = api.comments[1]
    assert "@all" not in body
    assert "a@b" not in body
    assert body.count("<!--") == 1
    assert not set("\u202e\x1b") & set(body)
    assert len(body) < 65_536
    assert body.endswith("[cut]")


NUMBERS = ["", "0", "7 8", "-7", "7/../8", "99999999999", "٧"]


@pytest.mark.parametrize("number", NUMBERS)
def test_only_a_number_is_a_pull_request(artifact, api, number):
    (artifact / "pull-request.txt").write_text(number)
    with pytest.raises(StepError, match=r"pull-request\.txt: got .*, expected the number"):
        comment.post(artifact, "attest")
    assert not api.calls


def test_another_pull_request_gets_no_comment(artifact, api, monkeypatch):
    (artifact / "pull-request.txt").write_text("8")
    with pytest.raises(StepError, match="pulls/8: GitHub answers 404 Not Found"):
        comment.post(artifact, "attest")
    (artifact / "pull-request.txt").write_text("7")
    monkeypatch.setenv("ATTEST_HEAD_SHA", "cd" * 20)
    with pytest.raises(StepError, match=r"its head is not cdcd.*: nothing is posted"):
        comment.post(artifact, "attest")
    assert not api.comments


@pytest.mark.parametrize(("name", "value"), [("GITHUB_REPOSITORY", "a/b/../c"), ("ATTEST_HEAD_SHA", "main")])
def test_a_variable_that_is_not_what_it_should_be(artifact, api, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(StepError, match=f"{name}: got '{value}', expected"):
        comment.post(artifact, "attest")
    assert not api.calls


def test_files_are_plain_and_small(artifact, api):
    report = artifact / "comment.md"
    report.write_bytes(b"x" * 1_000_000)
    with pytest.raises(StepError, match=r"comment\.md: got 1000000 bytes, expected at most 240000"):
        comment.post(artifact, "attest")
    report.unlink()
    with pytest.raises(StepError, match=r"comment\.md: not a file of the artifact"):
        comment.post(artifact, "attest")
    os.symlink("/etc/passwd", report)
    with pytest.raises(StepError, match=r"comment\.md: not a file of the artifact"):
        comment.post(artifact, "attest")
    report.unlink()
    report.write_bytes(b"\xff\xfe")
    comment.post(artifact, "attest")
    assert api.comments[1].endswith("\ufffd\ufffd")


def test_a_server_that_is_not_there_is_one_sentence(artifact, monkeypatch):
    monkeypatch.setenv("GITHUB_API_URL", "http://127.0.0.1:9")
    with pytest.raises(StepError, match=r"^GET repos/somebody/my-attention/pulls/7: .*refused"):
        comment.post(artifact, "attest")
