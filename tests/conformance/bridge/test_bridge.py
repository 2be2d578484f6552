"""A function of another interpreter is one of JAX arrays here: results, gradients, errors, its end."""

import ast
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.bridge import BridgeError, bridged, client, server, version_there
from attest.conformance.cases.case import Case
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Subject
from attest.conformance.text import exception_text
from attest.reference.semantics import Semantics
from tests.conformance.bridge import kernel_in_jax

HERE = Path(__file__).parent
NUMPY = f"{HERE / 'kernel_in_numpy.py'}:kernel"
JAX = f"{HERE / 'kernel_in_jax.py'}"

in_numpy = bridged(sys.executable, NUMPY, name="my.kernel", variables={"OF_THE_TEST": "set"})
in_jax = bridged(sys.executable, f"{JAX}:attention", framework="jax", returns_lse=True)
alone = bridged(sys.executable, f"{JAX}:out_alone", framework="jax")

Function = Callable[..., Any]
FORWARD = Semantics(gradients=frozenset())


def arrays(dtype: Any = jnp.float32, batch: int = 2) -> tuple[Any, Any, Any]:
    drawn = np.random.default_rng(3).standard_normal((3, batch, 5, 2, 4))
    return tuple(jnp.asarray(each, dtype) for each in drawn)  # pyright: ignore[reportReturnType]


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    shape=st.tuples(*(st.integers(0, 4),) * 4),
    seed=st.integers(0, 2**32 - 1),
    compiled=st.booleans(),
)
def test_arrays_pass_bit_for_bit(dtype: str, shape: tuple[int, ...], seed: int, compiled: bool) -> None:
    """Infinities, subnormals and the payloads of NaN, too."""
    size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    given = jnp.asarray(bits.view(jnp.dtype(dtype)).reshape(shape))
    got = (jax.jit(in_numpy) if compiled else in_numpy)(given, given, given)
    assert (got.dtype, got.shape) == (given.dtype, given.shape)
    assert np.asarray(got).tobytes() == bits.tobytes()


OPTIONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(OPTIONS)
def test_options_pass_as_they_are(option: Any) -> None:
    assert server.decoded(json.loads(json.dumps(server.encoded(option)))) == option


def test_the_function_gets_what_the_call_has() -> None:
    options = {"sliding_window": (3, None), "softmax_scale": 0.1, "dropout_seed": 2**64 - 1, "causal": True}
    with pytest.raises(ValueError, match="raised ValueError") as raised:
        in_numpy(*arrays(), do="options", bias=jnp.float32([1, 2]), **options)
    expected = {"bias": np.float32([1, 2])} | options
    assert f"raised ValueError: {expected!r} (at " in str(raised.value)


def test_it_imports_from_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    client.stop_servers()
    with pytest.raises(ValueError, match="ValueError") as raised:
        in_numpy(*arrays(), do="path")
    assert "'/ours'" not in str(raised.value)
    assert f"'{Path(server.__file__).parent}'" not in str(raised.value)
    assert "None, 'set')" in str(raised.value)


def weighted(function: Function) -> Function:
    def loss(query: Any, key: Any, value: Any, bias: Any) -> Any:
        out, lse = function(query, key, value, causal=True, bias=bias)
        return (out.astype(jnp.float32) ** 2).sum() + lse.sum()

    return loss


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "compiled"])
def test_results_and_gradients_are_those_of_the_function(transform: Any, dtype: Any) -> None:
    given = (*arrays(dtype), jnp.ones((1, 1, 5, 5)))
    got = transform(jax.value_and_grad(weighted(in_jax), argnums=(0, 2, 3)))(*given)
    expected = jax.value_and_grad(weighted(kernel_in_jax.attention), argnums=(0, 2, 3))(*given)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=1e-6, atol=1e-6)


def test_vmap_calls_it_for_each_element() -> None:
    given = tuple(jnp.stack([each, each + 1]) for each in arrays())
    gradient = jax.grad(lambda *each: in_jax(*each)[0].sum())
    expected = jnp.stack([gradient(*(each[i] for each in given)) for i in range(2)])
    np.testing.assert_array_equal(jax.vmap(gradient)(*given), expected)


@pytest.mark.parametrize(
    ("wrong", "expected"), [(False, Verdict.PASS), (True, Verdict.FAIL)], ids=["right", "wrong"]
)
def test_it_is_judged_like_any_kernel(wrong: bool, expected: Verdict) -> None:
    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return alone(query, key, value, wrong=wrong, **options)

    gradients = frozenset({"query", "key", "value"})
    subject = Subject("elsewhere.jax", call, frozenset({"scale"}), semantics=Semantics(gradients=gradients))
    results = judge(subject, Case(batch=2, q_len=4, kv_len=4, head_dim=4), ("forward", "gradients"))
    assert {result.check: result.verdict for result in results} == {
        "forward": Verdict.PASS,
        "gradients": expected,
    }


def test_exceptions_keep_their_type_and_name_kernel_and_line() -> None:
    with pytest.raises(NotImplementedError) as raised:
        in_numpy(*arrays(), do="fail")
    where = r"kernel_in_numpy.py:\d+ in kernel\)"
    assert str(raised.value).startswith("my.kernel: raised OwnError: of this type (at ")
    assert __import__("re").search(where, str(raised.value))
    with pytest.raises(RuntimeError, match=r"my\.kernel: raised SystemExit: no more"):
        in_numpy(*arrays(), do="quit")


def test_exceptions_of_a_compiled_call_are_named_first_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(jax.jit(lambda *each: in_numpy(*each, do="fail"))(*arrays()))
    first = exception_text(raised.value).splitlines()[0]
    assert first.startswith("NotImplementedError: my.kernel: raised OwnError: of this type")
    assert not caplog.records


def test_exceptions_of_other_callbacks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_array: Any) -> Any:
        raise ValueError

    array = jnp.ones(1)
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(jax.jit(lambda given: jax.pure_callback(fail, array, given))(array))
    assert [record.name for record in caplog.records] == ["jax._src.callback"]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "compiled"])
def test_results_of_a_differentiated_call_are_those_of_its_differentiated_function(transform: Any) -> None:
    """A function with a derivative of its own has a second forward pass, which may be wrong (S22)."""
    call = bridged(sys.executable, f"{JAX}:negative_if_differentiated", framework="jax")
    query, key, value = arrays()
    out, gradient = transform(jax.value_and_grad(lambda value: call(query, key, value).sum()))(value)
    np.testing.assert_allclose(out, -value.sum(), rtol=1e-5)
    np.testing.assert_array_equal(gradient, np.full(value.shape, np.float32(-1)))
    np.testing.assert_array_equal(transform(call)(query, key, value), value)


def test_gradients_may_be_wide() -> None:
    call = bridged(sys.executable, f"{JAX}:wide", framework="jax", gradient_dtype="float32")
    query, key, value = arrays(jnp.bfloat16)
    for transform in (lambda function: function, jax.jit):
        got = transform(jax.grad(lambda value: call(query, key, value).astype(jnp.float32).sum()))(value)
        np.testing.assert_array_equal(got, np.full(value.shape, np.float32(1 / 3)), strict=True)
    narrow = bridged(sys.executable, f"{JAX}:wide", framework="jax", name="my.kernel")
    with pytest.raises(BridgeError, match="the gradient of value of dtype float32, expected bfloat16"):
        jax.grad(lambda value: narrow(query, key, value).astype(jnp.float32).sum())(value)


@pytest.mark.parametrize(("do", "how"), [("exit", "ended with exit status 7"), ("signal", "died of SIGSEGV")])
def test_a_death_is_one_sentence_and_the_next_call_starts_anew(do: str, how: str) -> None:
    with pytest.raises(BridgeError) as raised:
        in_numpy(*arrays(), do=do)
    expected = f"my.kernel: its process {how} during a call; the next call starts a new one"
    assert str(raised.value) == expected
    np.testing.assert_array_equal(in_numpy(*arrays()), arrays()[2])


def test_an_interrupted_call_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_connection: Any) -> Any:
        raise KeyboardInterrupt

    in_numpy(*arrays())
    with monkeypatch.context() as patch:
        patch.setattr(server, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            in_numpy(*(2 * each for each in arrays()))
    np.testing.assert_array_equal(in_numpy(*arrays()), arrays()[2])


def test_threads_get_their_own_answers() -> None:
    given = [arrays()[2] + number for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda value: in_numpy(value, value, value), given))
    np.testing.assert_array_equal(np.stack(got), np.stack(given))


def test_it_is_in_the_process_group_of_its_client_and_there_is_one() -> None:
    first, second = (np.asarray(in_numpy(*(each[..., :2] for each in arrays()), do="ids")) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first[0, 0, 0, 1] == os.getpgrp() % 2**16


HANGS = """
import sys
import numpy as np
from attest.conformance.bridge import bridged
array = np.ones((1, 1, 1, 1), np.float32)
bridged(sys.executable, sys.argv[1])(array, array, array, do="hang")
"""


def test_it_ends_when_its_parent_is_killed_during_a_call() -> None:
    command = [sys.executable, "-c", HANGS, NUMPY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        number = int(next(line for line in parent.stderr if line.strip().isdigit()))
        os.kill(number, 0)
        parent.kill()
        for _ in range(600):
            try:
                os.kill(number, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
    os.kill(number, signal.SIGKILL)
    raise AssertionError("it outlived its parent")


FORKS = """
import os, sys
import numpy as np
from attest.conformance.bridge import bridged
array = np.ones((1, 1, 1, 2), np.float32)
call = bridged(sys.executable, sys.argv[1])
def server():
    return np.asarray(call(array, array, array, do="ids"))[0, 0, 0, 0]
before = server()
reading, writing = os.pipe()
if os.fork() == 0:
    os.write(writing, str(server()).encode())
    sys.exit()
forked = float(os.read(reading, 100))
os.wait()
print(before == server(), before == forked)
"""


def test_a_forked_process_has_a_server_of_its_own() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, NUMPY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "True False\n", done.stderr


def test_prints_do_not_reach_our_output(capfd: pytest.CaptureFixture[str]) -> None:
    client.stop_servers()  # so that the next one writes where this test reads
    in_numpy(*arrays(), do="print")
    client.stop_servers()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "printed there\n")


def test_another_process_can_be_given_the_call() -> None:
    again = pickle.loads(pickle.dumps(in_numpy))
    np.testing.assert_array_equal(again(*arrays()), arrays()[2])


NO_MODULE = "install it there, or name a file, such as /path/kernel.py:function"


@pytest.mark.parametrize(
    ("python", "function", "framework", "expected"),
    [
        ("/no/python", NUMPY, "numpy", "cannot start '/no/python' (No such file or directory): name the"),
        ("/usr/bin/false", NUMPY, "numpy", "'/usr/bin/false' ended with exit status 1 before it answered"),
        (
            sys.executable,
            "no_such.module:f",
            "numpy",
            f"no module 'no_such' in the environment of {sys.executable}",
        ),
        (sys.executable, "/no/file.py:f", "numpy", "no file /no/file.py: check the path before the colon"),
        (sys.executable, "json:f", "numpy", "json has no function 'f': check the name after the colon"),
        (
            sys.executable,
            "json:dumps",
            "torch",
            f"cannot import torch in the environment of {sys.executable}",
        ),
    ],
)
def test_what_cannot_be_started_is_one_sentence(
    python: str, function: str, framework: Any, expected: str
) -> None:
    with pytest.raises(BridgeError) as raised:
        bridged(python, function, framework=framework, name="my.kernel")(*arrays())
    assert str(raised.value).startswith(f"my.kernel: {expected}")
    assert "\n" not in str(raised.value)


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(RuntimeError, match="importing it raised ZeroDivisionError: division by zero"):
        bridged(sys.executable, f"{tmp_path / 'broken.py'}:f")(*arrays())


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("twice", "my.kernel: returned 2 results, expected 1: out"),
        (
            "short",
            f"my.kernel: {NUMPY} returned out of shape (2, 4, 2, 4), expected (2, 5, 2, 4): "
            "make it that shape there",
        ),
        (
            "double",
            f"my.kernel: {NUMPY} returned out of dtype float64, expected float32: make it that dtype there",
        ),
    ],
)
def test_wrong_results_are_one_sentence(do: str, expected: str) -> None:
    with pytest.raises(BridgeError) as raised:
        in_numpy(*arrays(), do=do)
    assert str(raised.value) == expected


def test_a_function_of_numpy_arrays_has_no_gradient() -> None:
    with pytest.raises(NotImplementedError, match=r"no gradient of key, query, value: pass framework='jax'"):
        jax.grad(lambda query, value: in_numpy(query, query, value).sum(), (0, 1))(*arrays()[:2])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mapping": {1, 2}}, "mapping: got a set, expected an array, or a number, string"),
        (
            {"dropout_seed": jax.random.key(0)},
            r"dropout_seed: got key<fry>, expected an array of one of bool",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        in_numpy(*arrays(), **options)


def test_arrays_without_heads_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"key: got shape \(2, 5\), expected \[..., length, heads"):
        in_numpy(arrays()[0], arrays()[1][..., 0, 0], arrays()[2])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"function": "module"}, "function: got 'module', expected module:function or file.py:function"),
        (
            {"framework": "tensorflow"},
            r"framework: got 'tensorflow', expected one of \('numpy', 'jax', 'torch'\)",
        ),
    ],
)
def test_declarations_are_checked_at_once(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        bridged(**({"python": sys.executable, "function": "json:dumps"} | arguments))


ANSWERS = {
    "other protocol": ('{"protocol": 0, "arrays": []}', "protocol 0, expected 1: install attest again"),
    "no protocol": ('{"arrays": []}', "protocol None, expected 1"),
    "no JSON": ("\x80\x04.", "before it answered"),
    "no object": ("[]", "before it answered"),
    "unknown dtype": (
        '{"protocol": 1, "arrays": [{"name": "a", "dtype": "O", "shape": [1]}]}',
        "before it answered",
    ),
}
SENDS = """
import socket, struct, sys
text = {text!r}.encode()
socket.socket(fileno=int(sys.argv[1])).sendall(struct.pack("<Q", len(text)) + text)
"""


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_checked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, expected = ANSWERS[name]
    fake = tmp_path / "server.py"
    fake.write_text(SENDS.format(text=text))
    monkeypatch.setattr(server, "__file__", str(fake))
    with pytest.raises(BridgeError, match=expected):
        bridged(sys.executable, NUMPY, variables={"TEST": name})(*arrays())


def test_the_judge_sees_refusals_of_the_function_with_their_type() -> None:
    """S20 asks for the type of the exception, which a callback of compiled code would lose."""
    subject = Subject("elsewhere", partial(in_numpy, do="refuse"), semantics=FORWARD)
    (result,) = judge(subject, Case(batch=2, q_len=4, kv_len=4), ("refusal.undeclared_bias",))
    assert (result.verdict, result.message.partition(" (at")[0]) == (
        Verdict.UNSUPPORTED,
        "NotImplementedError: my.kernel: raised NotImplementedError: bias: not here",
    )


def test_the_server_needs_an_old_python_and_its_standard_library_only() -> None:
    source = Path(server.__file__).read_text()
    tree = ast.parse(source, feature_version=server.OLDEST)
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
    assert not re.search(r"\b(pickle|marshal|eval|exec)\b", source)


def test_the_version_of_a_distribution_is_that_of_the_other_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = there ] && echo "4.5.6" && [ -z "$PYTHONPATH" ]\n')
    python.chmod(0o755)
    assert version_there(str(python), "there") == "4.5.6"
    assert version_there(str(python), "not_there") == ""
    assert version_there(sys.executable, "numpy") == np.__version__
    assert version_there(str(tmp_path / "missing"), "there") == ""
