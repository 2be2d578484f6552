"""The script of a failing case fails with the kernel, and passes once it is corrected, without attest."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.judging.script.kernel import kernel_of
from attest.conformance.judging.script.literals import ScriptError, array, limit
from attest.conformance.judging.script.reproducer import reproducer
from attest.conformance.judging.trial import Trial
from attest.conformance.peers import jax_nn
from attest.conformance.subject import Limits, Subject, Tiling
from tests import toys
from tests.wrong_kernels.subjects import MISTAKES

# The simplest failing case of each mistake, and the check that fails.
SIMPLEST = {
    "causal_edge": ("forward", Case(q_len=2, causal=True)),
    "cap_derivative": ("gradients", Case(soft_cap=0.25)),
    "bfloat16_accumulator": ("gradients", Case()),
    "window_at_block_edge": ("forward", Case(kv_len=32, window=(0, 0))),
    "head_not_summed": ("gradients", Case(q_heads=2)),
    "lse_without_maximum": ("lse", Case()),
}
SOURCE = Path(__file__).parents[3] / "wrong_kernels" / "attention.py"
# A user's module as docs/how-to/your-own-kernel.md has it: the kernel is imported from another one.
ADAPTER = """
from typing import Any

from attest import Subject, validate_call
from {kernel} import attention


def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
    \"\"\"Call the kernel.\"\"\"
    validate_call(query, key, value, supports=subject, **options)
    return attention(query, key, value, **options)


subject = Subject("mine", call, frozenset({{"causal", "window", "soft_cap", "gqa"}}), returns_lse=True)
"""
# Runs scripts, each with the kernel of a folder, where attest cannot be imported; prints the exit statuses.
RUNNER = """
import json, runpy, sys
sys.modules["attest"] = None
statuses = []
for script, folder in json.loads(sys.argv[1]):
    sys.path.insert(0, folder)
    before = set(sys.modules)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        statuses.append(end.code)
    for name in set(sys.modules) - before:
        if name.startswith("kernel_"):
            del sys.modules[name]
    sys.path.remove(folder)
print(json.dumps(statuses))
"""


def run(scripts: list[tuple[str, str]]) -> tuple[list[int], str]:
    """The exit statuses of scripts, each in a folder with its kernel, and what they printed."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(scripts)],
        env={"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_a_script_fails_with_the_kernel_and_passes_once_it_is_corrected(tmp_path, monkeypatch):
    wrong, right, adapters = (tmp_path / name for name in ("wrong", "right", "adapters"))
    for folder in (wrong, right, adapters):
        folder.mkdir()
    monkeypatch.syspath_prepend(str(wrong))
    monkeypatch.syspath_prepend(str(adapters))
    correct = SOURCE.read_text()
    scripts: list[tuple[str, str]] = []
    for name, (check, case) in SIMPLEST.items():
        mistake = MISTAKES[name]
        (right / f"kernel_{name}.py").write_text(correct)
        (wrong / f"kernel_{name}.py").write_text(correct.replace(mistake["correct"], mistake["planted"]))
        (adapters / f"adapter_{name}.py").write_text(ADAPTER.format(kernel=f"kernel_{name}"))
        subject: Subject = import_module(f"adapter_{name}").subject
        script = tmp_path / f"{name}.py"
        script.write_text(reproducer(Trial(subject, case), (check,), "attest replay"))
        scripts += [(str(script), str(wrong)), (str(script), str(right))]
    assert set(SIMPLEST) == set(MISTAKES)
    statuses, printed = run(scripts)
    assert statuses == [1, 0] * len(SIMPLEST), printed
    assert "out: largest difference 0.2303, 1 of 2 beyond a limit" in printed


def test_a_function_of_a_module_without_attest_is_imported(tmp_path, monkeypatch):
    (tmp_path / "plain_kernel.py").write_text(SOURCE.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    attention = import_module("plain_kernel").attention
    subject = toys.toy(partial(attention, logits_soft_cap=2.0), returns_lse=True, name="mine")
    kernel = kernel_of(subject.call)
    assert (kernel.imports, kernel.expression) == ({"from plain_kernel import attention"}, "attention")
    assert kernel.definitions == []
    assert kernel.keywords == {"logits_soft_cap": "2.0"}


def test_the_options_of_a_tiling_are_passed(tmp_path, monkeypatch):
    (tmp_path / "tiled_kernel.py").write_text("def attention(query, key, value, *, block): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    call = import_module("tiled_kernel").attention
    subject = toys.toy(call, tilings=(Tiling({"block": 16}), Tiling({"block": 32})))
    text = reproducer(Trial(subject, Case(tiling=-1)), ("forward",), "")
    assert "attention(query, key, value, block=32)" in text


def test_an_adapter_of_attest_itself_is_copied():
    """It is a function of a module that imports attest, and uses JAX alone."""
    case = Case(q_len=3, kv_len=5, batch=2, causal=True, window=(1, None), bias="1hq", scale=0.5)
    text = reproducer(Trial(jax_nn.XLA, case), ("forward", "gradients"), "")
    assert "import attest" not in text
    assert "from attest" not in text
    with pytest.raises(SystemExit) as end:
        exec(compile(text, "script", "exec"), {"__name__": "__main__"})
    assert end.value.code == 0


HELPER = """
from functools import partial
import jax
from attest import Subject
import jax.numpy as jnp

SCALE = 0.5

@partial(jax.jit, static_argnames="causal")
def inner(query, key, value, causal: bool = False):
    return SCALE * query

def call(query, key, value, **options):
    return inner(query, key, value, **options)

@jax.custom_vjp
def rule(query):
    return query

def in_vain(query, key, value):
    return rule(query)

def itself(query, key, value):
    import attest
    return query

anonymous = lambda query, key, value: query
table = {"a": 1}

def of_a_table(query, key, value):
    return table["a"] * query

def run(query, key, value):
    return query

def unknown(query, key, value):
    return nowhere

class Kernel:
    def __call__(self, query, key, value):
        return query

instance = Kernel()
"""


@pytest.fixture
def helper(tmp_path, monkeypatch):
    (tmp_path / "with_helpers.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module("with_helpers")
    del sys.modules["with_helpers"]


def test_what_an_adapter_uses_is_copied_with_it(helper):
    text = "\n".join(kernel_of(helper.call).definitions)
    assert "SCALE = 0.5" in text
    assert "@partial(jax.jit, static_argnames='causal')\ndef inner(query, key, value, causal=False):" in text
    assert text.index("def inner") < text.index("def call")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "anonymous",
            "call: it is a lambda, which a script cannot import; give the Subject a `call` that is",
        ),
        ("instance", "call: it is an object of Kernel"),
        ("in_vain", "call: it needs 'rule', which a script cannot import without attest"),
        ("itself", "call: it imports attest itself"),
        ("of_a_table", "call: its argument table: an object of dict is no number"),
        ("unknown", "call: unknown uses 'nowhere', which is not defined"),
    ],
)
def test_a_call_that_cannot_be_written_is_refused_in_one_sentence(helper, name, said):
    with pytest.raises(ScriptError, match=said):
        kernel_of(getattr(helper, name))


def test_a_name_of_the_script_is_refused(helper):
    with pytest.raises(ScriptError, match="uses the name 'run', which the script needs itself: rename it"):
        reproducer(Trial(toys.toy(helper.run), Case()), ("forward",), "")


@pytest.mark.parametrize(
    ("case", "check", "said"),
    [
        (Case(dropout=0.5), "forward", "does not compute dropout"),
        (Case(alibi="heads"), "forward", "does not compute alibi"),
        (Case(q_offset=2), "forward", "does not compute q_offset"),
        (Case(normalized=False), "forward", "does not compute an output that is not normalized"),
        (Case(q_len=1025), "forward", "have 1026 numbers, and a script shows at most 1024: use the simplest"),
        (Case(q_len=1 << 24, kv_len=1 << 24), "forward", "a script shows at most 1024"),
        (Case(), "purity", "as forward, lse, gradients do; got purity"),
        (Case(poison=True, mask="11"), "forward", "the case has poison"),
        (Case(q_len=0), "forward", "returns nothing to compare"),
        (Case(head_dim=3), "forward", "takes head dims 1 to 2"),
        (Case(sinks=1, q_len=3, kv_len=3, segments=2), "lse", "do not compute lse"),
    ],
)
def test_what_a_script_cannot_show_is_refused_in_one_sentence(case, check, said):
    every = frozenset({"dropout", "alibi", "q_offset", "unnormalized", "mask", "sinks", "segments"})
    limits = Limits(longest=1 << 24)
    subject = toys.toy(features=every, head_dims=(1, 2), returns_lse=True, limits=limits)
    with pytest.raises(ScriptError, match=said) as raised:
        reproducer(Trial(subject, case), (check,), "")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_are_rebuilt_bit_for_bit(dtype):
    trial = Trial(toys.right, Case(dtype=dtype, q_len=60, kv_len=1, head_dim=4, seed=9))
    special = np.array([-0.0, np.inf, -np.inf, 1e-7, 0.1]).astype(trial.built.problem.query.dtype)
    for values in (trial.built.problem.query, special, special[:0].reshape(0, 1)):
        again = eval(array(values, "jnp"), {"jnp": jax.numpy, "np": np, "bool": bool})
        assert again.dtype == values.dtype
        assert again.shape == values.shape
        assert np.asarray(again).tobytes() == values.tobytes()


def test_limits_are_rounded_up():
    values = np.array([1.23456789e-7, 1.0, 0.0, 9.9999999])
    again = eval(limit(values), {"np": np})
    assert (again >= values).all()
    assert (again <= values * (1 + 1e-5)).all()
    assert limit(np.full(3, 2.5)) == "2.5"
