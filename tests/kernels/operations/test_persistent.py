"""The persistent cache: readable files, safe under broken ones and concurrent writers."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels import xla
from attest.kernels.operations import AttentionConfig, FlashAttentionConfig, PersistentCache
from tests.examples import examples

KEY = ("environment", "flash_attention@1", "call")
CONFIG = FlashAttentionConfig(config=xla.Config(xla.ChunkSizes(128, 64)))
OTHER = FlashAttentionConfig(platform="xla")


@pytest.fixture
def cache(tmp_path) -> PersistentCache[FlashAttentionConfig]:
    return PersistentCache("flash-attention", FlashAttentionConfig, tmp_path)


def test_a_configuration_is_written_and_read(cache):
    assert cache.get(*KEY) is None
    path = cache.put(*KEY, CONFIG, {"why": "fastest"})
    assert cache.get(*KEY) == CONFIG
    content = json.loads(path.read_text())
    assert content["record"] == {"why": "fastest"}
    assert content["config"]["config"]["forward"] == {"q": 128, "k": 64}
    assert cache.get("another", *KEY[1:]) is None
    cache.put(*KEY, OTHER)
    assert cache.get(*KEY) == OTHER
    assert list(cache.folder.iterdir()) == [path]
    assert cache.clear() == 1
    assert cache.get(*KEY) is None


def test_the_folder_is_the_variable_or_the_user_s(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTEST_CACHE_DIR", str(tmp_path / "mine"))
    assert PersistentCache("x").folder == tmp_path / "mine" / "x"
    monkeypatch.delenv("ATTEST_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert PersistentCache("x").folder.name == "x"
    assert "attest" in PersistentCache("x").folder.parts


def test_a_name_is_one_folder():
    for name in ("", "..", "a/b"):
        with pytest.raises(ValueError, match="expected the name of one folder"):
            PersistentCache(name)


@pytest.mark.found_outside
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": 3}, "name: got 3; expected the name of one folder"),
        ({"name": None}, "name: got None; expected the name of one folder"),
        ({"name": b"x"}, "name: got b'x'; expected the name of one folder"),
        ({"name": "x", "cfg_type": "/tmp/x.json"}, "cfg_type: got '/tmp/x.json'; expected a class with to_j"),
        ({"name": "x", "cfg_type": int}, "cfg_type: got <class 'int'>; expected a class with to_json and"),
        ({"name": "x", "cfg_type": OTHER}, "cfg_type: got FlashAttentionConfig("),
        ({"name": "x", "folder": 3}, "folder: got 3; expected a path"),
    ],
)
def test_malformed_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        PersistentCache(**arguments)


@pytest.mark.found_outside
def test_the_operation_of_the_key_says_which_class_its_configurations_have(tmp_path):
    cache = PersistentCache("x", folder=tmp_path)
    own = {
        "flash_attention@1": CONFIG,
        "ring_attention@1": OTHER,
        "attention@1": AttentionConfig(block_q=64),
        "somebody's@3": {"a": [1, None]},
    }
    for op_id, config in own.items():
        cache.put("environment", op_id, "call", config)
        found = cache.get("environment", op_id, "call")
        assert type(found) is type(config)
        assert found == config


@pytest.mark.found_outside
@pytest.mark.parametrize(
    ("op_id", "config", "message"),
    [
        (
            "flash_attention@1",
            AttentionConfig(),
            "config: got a AttentionConfig; expected FlashAttentionConfi",
        ),
        ("somebody's@1", CONFIG, "config: got a FlashAttentionConfig; expected a JSON value"),
        ("somebody's@1", {1, 2}, "config: got a set; expected a JSON value"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, op_id, config, message):
    cache = PersistentCache("x", folder=tmp_path)
    with pytest.raises(ValueError, match=f"^{message}"):
        cache.put("environment", op_id, "call", config)
    assert not list(tmp_path.rglob("*.json"))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _terminal(path: Path) -> None:
    path.symlink_to("/dev/ptmx")


def _folder(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    # Its name is short: a longer path is no address.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as beside:
        beside.bind(f"{folder}/s")
        Path(f"{folder}/s").rename(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.found_outside
@pytest.mark.parametrize("make", [_pipe, _device, _terminal, _folder, _socket, _huge])
def test_what_is_no_file_blocks_no_call(cache, make):
    path = cache.path(*KEY)
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.warns(UserWarning, match="skipped"):
        assert cache.get(*KEY) is None
    if make is _folder:
        with pytest.raises(ValueError, match=r"got a folder; expected a file, or nothing there\. Remove it"):
            cache.put(*KEY, CONFIG)
        assert cache.clear() == 0
        return
    cache.put(*KEY, CONFIG)
    assert cache.get(*KEY) == CONFIG
    assert cache.clear() == 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"schema": 1}', "\ud83d", '{"schema": 1, "key": ["a", "b", "c"], "config": {}}'],
    ids=["empty", "cut", "list", "null", "no key", "no text", "another key"],
)
def test_a_broken_file_is_skipped_with_one_warning_and_rewritten(cache, text):
    path = cache.put(*KEY, CONFIG)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.warns(UserWarning, match="skipped"):
        assert cache.get(*KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(*KEY) is None
    cache.put(*KEY, CONFIG)
    assert cache.get(*KEY) == CONFIG


@examples(200)
@given(data=st.data())
def test_no_file_makes_a_call_crash(tmp_path_factory, data):
    """Random bytes, and JSON that resembles a file."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4) | st.sampled_from(KEY),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["schema", "key", "config", "platform", "forward"]), x, max_size=4
            )
        ),
        max_leaves=10,
    )
    right = st.fixed_dictionaries({"schema": st.just(1), "key": st.just(list(KEY)), "config": values})
    content = data.draw(st.binary(max_size=50) | (values | right).map(lambda x: json.dumps(x).encode()))
    cache = PersistentCache("x", FlashAttentionConfig, tmp_path_factory.getbasetemp())
    path = cache.path(*KEY)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = cache.get(*KEY)
    assert found is None or isinstance(found, FlashAttentionConfig)


def test_a_file_of_a_newer_schema_is_neither_read_nor_overwritten(cache):
    path = cache.put(*KEY, CONFIG)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    with pytest.warns(UserWarning, match="its schema is 2"):
        assert cache.get(*KEY) is None
    with pytest.raises(ValueError, match="got schema 2; expected schema 1 or older"):
        cache.put(*KEY, OTHER)
    assert json.loads(path.read_text())["schema"] == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    cache = PersistentCache("x", FlashAttentionConfig, tmp_path / "file")
    with pytest.raises(ValueError, match=r"ATTEST_CACHE_DIR: got .*; expected a folder that can be written"):
        cache.put(*KEY, CONFIG)


_WRITER = """
import sys
from attest.kernels import xla
from attest.kernels.operations import FlashAttentionConfig, PersistentCache
cache = PersistentCache("x", FlashAttentionConfig, sys.argv[1])
own = FlashAttentionConfig(config=xla.Config(xla.ChunkSizes(int(sys.argv[2]), 1 << 20)))
for _ in range(200):
    cache.put("e", "o", "c", own)
    found = cache.get("e", "o", "c")
    assert found is not None and found.config.forward.k == 1 << 20, found
"""


def test_concurrent_writers_leave_one_whole_file(tmp_path):
    root = Path(__file__).parents[3]
    writers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", _WRITER, str(tmp_path), str(n)], cwd=root)
        for n in (1, 22)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    (path,) = (tmp_path / "x").iterdir()
    assert json.loads(path.read_text())["config"]["config"]["forward"]["q"] in (1, 22)
