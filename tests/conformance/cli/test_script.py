"""`attest replay --script`: a file or stdout, and nothing is run."""

import pytest

CASE = '{"q_len": 2, "causal": true}'


@pytest.fixture
def subject(tmp_path, monkeypatch) -> str:
    """A subject whose kernel says when it runs."""
    kernel = "def attention(query, key, value, *, causal=False):\n    raise SystemExit('it ran')\n"
    (tmp_path / "own_kernel.py").write_text(kernel)
    (tmp_path / "own_subject.py").write_text(
        "from attest import Subject\nfrom own_kernel import attention\n"
        "subject = Subject('own', attention, frozenset({'causal'}))\n"
        "def numerics(dtype, tiling):\n    raise ZeroDivisionError('no')\n"
        "vague = Subject('vague', attention, frozenset({'causal'}), numerics=numerics)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_subject:subject"


def test_a_script_is_printed(attest, subject):
    done = attest("replay", CASE, "--subject", subject, "--check", "forward", "--script", "-")
    assert (done.status, done.err) == (0, "")
    compile(done.out, "script", "exec")
    assert "from own_kernel import attention\n" in done.out
    line = """With attest: attest replay '{"case":{"causal":true,"q_len":2},"check":"forward"}'"""
    assert f"{line} --subject=own_subject:subject\n" in done.out
    assert "dquery" not in done.out


def test_a_script_is_written_for_all_outputs_if_no_check_is_named(attest, subject, tmp_path):
    path = tmp_path / "script.py"
    done = attest("replay", CASE, "--subject", subject, "--script", path)
    assert (done.status, done.out, done.err) == (0, "", "")
    text = path.read_text()
    assert "expected = {'out': out, 'dquery': dquery, 'dkey': dkey, 'dvalue': dvalue}" in text
    assert '"check"' not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--check", "purity"), "--script: a script compares one call with attention in float64"),
        (("--subject", "own_subject:vague"), "--script: vague cannot be read: ZeroDivisionError: no"),
        (("--subject", "tests.toys:raves"), "--script: call: "),
    ],
)
def test_a_script_that_there_is_not_is_refused_in_one_sentence(attest, subject, options, said):
    done = attest("replay", CASE, "--subject", subject, "--script", "-", *options)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"attest: {said}")
    assert done.err.count("\n") == 1


def test_a_script_that_cannot_be_written_is_a_failure(attest, subject, tmp_path):
    done = attest("replay", CASE, "--subject", subject, "--script", tmp_path / "none" / "script.py")
    assert done.status == 1
    assert "No such file" in done.err
