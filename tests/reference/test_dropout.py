"""S12 and S29: the generator, its counters, and what the mask looks like to a statistician."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attest.reference.dropout import keep_mask, philox4x32
from attest.reference.oracle import Cotangents, attention
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import STANDARD, Semantics
from tests.reference import second_pairs

DIALECTS = ["philox_tile", "linear_offset", "shared_heads", "chunk_keys"]
SEEDS = st.integers(0, 2**64 - 1)


def mask(
    semantics: Semantics, seed: int, rate: float, batch: int, head: int, shape: tuple[int, int, int, int]
) -> np.ndarray:
    return keep_mask(semantics, seed, rate, batch, head, np.arange(shape[2]), shape)


class TestGenerator:
    @pytest.mark.parametrize(("counter", "key", "output"), second_pairs.KNOWN_ANSWERS)
    def test_known_answers(self, counter: Any, key: Any, output: Any) -> None:
        c0, c1, c2, c3 = (np.array([word], np.uint32) for word in counter)
        assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), key)) == output
        assert second_pairs.philox(counter, key) == output

    @pytest.mark.skipif(sys.platform != "linux", reason="Triton is only there on Linux")
    def test_triton_draws_the_same_words(self, tmp_path: Path) -> None:
        seed, columns = 0xFEDCBA9876543210, 64
        rng = np.random.default_rng(0)
        counters = rng.integers(0, 2**32, (4, columns), dtype=np.uint32)
        np.save(tmp_path / "counters.npy", counters)
        np.save(tmp_path / "seed.npy", np.array([seed], np.uint64).view(np.int64))
        script = Path(__file__).with_name("triton_philox.py")
        subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)
        ours = philox4x32(
            (counters[0], counters[1], counters[2], counters[3]), (seed & 0xFFFFFFFF, seed >> 32)
        )
        np.testing.assert_array_equal(np.load(tmp_path / "words.npy"), np.stack(ours))


class TestCounters:
    def test_the_standard_word_by_word(self) -> None:
        seed, rate, shape = 0x0123456789ABCDEF, 0.3, (2, 3, 5, 11)
        threshold = int(rate * 2**32)
        got = keep_mask(STANDARD, seed, rate, 1, 2, np.array([4, 0]), shape)
        for at, i in enumerate((4, 0)):
            for j in range(11):
                word = second_pairs.philox((j >> 2, i, 2, 1), (0x89ABCDEF, 0x01234567))[j & 3]
                assert got[at, j] == (word >= threshold)

    def test_shared_heads_use_head_zero(self) -> None:
        shape = (2, 3, 8, 16)
        shared = replace(STANDARD, dropout="shared_heads")
        np.testing.assert_array_equal(mask(shared, 7, 0.5, 1, 2, shape), mask(STANDARD, 7, 0.5, 1, 0, shape))

    def test_linear_offset_beyond_32_bits(self) -> None:
        shape = (3, 4, 40000, 40000)
        linear = replace(STANDARD, dropout="linear_offset")
        rows, offset = np.array([39999]), ((2 * 4 + 3) * 40000 + 39999) * 40000
        got = keep_mask(linear, 9, 0.5, 2, 3, rows, shape)[0, :5]
        for j in range(5):
            low, high = (offset + j) & 0xFFFFFFFF, (offset + j) >> 32
            assert high > 0
            assert got[j] == (second_pairs.philox((low, high, 0, 0), (9, 0))[0] >= 2**31)

    @given(chunk=st.integers(1, 9))
    def test_each_chunk_starts_over_with_its_own_key(self, chunk: int) -> None:
        shape, seed = (1, 1, 4, 20), (2**32 - 1) << 32
        split = replace(STANDARD, dropout="chunk_keys", dropout_chunk=chunk)
        whole = mask(split, seed, 0.5, 0, 0, shape)
        for number, start in enumerate(range(0, 20, chunk)):
            part = whole[:, start : start + chunk]
            # The chunk's number is added to the high word of the key, which wraps around.
            key = ((2**32 - 1 + number) % 2**32) << 32
            np.testing.assert_array_equal(part, mask(STANDARD, key, 0.5, 0, 0, shape)[:, : part.shape[1]])

    @pytest.mark.parametrize("dropout", ["philox_tile", "shared_heads", "chunk_keys"])
    @given(seed=SEEDS, chunk=st.integers(1, 9), data=st.data())
    def test_a_part_that_knows_its_origin_draws_the_mask_of_the_whole(
        self, dropout: str, seed: int, chunk: int, data: st.DataObject
    ) -> None:
        semantics = replace(STANDARD, dropout=dropout, dropout_chunk=chunk)
        shape = (3, 4, 6, 21)
        origin = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        batch, head, row, key = origin
        part = (1, 1, shape[2] - row, data.draw(st.integers(0, shape[3] - key)))
        got = keep_mask(semantics, seed, 0.5, 0, 0, np.arange(part[2]), part, origin)
        whole = mask(semantics, seed, 0.5, batch, head, shape)
        np.testing.assert_array_equal(got, whole[row:, key : key + part[3]])

    def test_the_last_place_that_32_bits_can_name(self) -> None:
        last = (2**32 - 1,) * 4
        got = keep_mask(STANDARD, 5, 0.5, 0, 0, np.array([0]), (1, 1, 1, 1), last)
        word = second_pairs.philox((last[3] >> 2, *last[:3]), (5, 0))[3]
        assert got.tolist() == [[word >= 2**31]]

    def test_a_linear_offset_has_no_origin(self) -> None:
        linear = replace(STANDARD, dropout="linear_offset")
        with pytest.raises(ValueError, match=r"origin: got \(0, 0, 1, 0\), expected zeros"):
            keep_mask(linear, 5, 0.5, 0, 0, np.array([0]), (1, 1, 1, 1), (0, 0, 1, 0))

    @pytest.mark.parametrize("dropout", DIALECTS)
    def test_no_keys_no_rows(self, dropout: str) -> None:
        semantics = replace(STANDARD, dropout=dropout)
        assert mask(semantics, 1, 0.5, 0, 0, (1, 1, 3, 0)).shape == (3, 0)
        assert mask(semantics, 1, 0.5, 0, 0, (1, 1, 0, 3)).shape == (0, 3)

    @given(seed=SEEDS, rows=st.lists(st.integers(0, 63), max_size=8))
    def test_rows_are_independent_of_the_block_they_come_in(self, seed: int, rows: list[int]) -> None:
        shape = (1, 2, 64, 10)
        chosen = keep_mask(STANDARD, seed, 0.4, 0, 1, np.array(rows, np.int64), shape)
        np.testing.assert_array_equal(chosen, mask(STANDARD, seed, 0.4, 0, 1, shape)[rows])


class TestSharing:
    """S29: which of batch entries and heads have a mask of their own."""

    SHAPE = (3, 4, 6, 21)

    def masks(self, shared: str | None, dropout: str = "philox_tile") -> np.ndarray:
        semantics = replace(STANDARD, dropout=dropout)
        rows = np.arange(self.SHAPE[2])
        return np.stack(
            [
                [keep_mask(semantics, 3, 0.5, b, h, rows, self.SHAPE, shared=shared) for h in range(4)]
                for b in range(3)
            ]
        )

    @pytest.mark.found_outside
    @pytest.mark.parametrize("dropout", ["philox_tile", "linear_offset", "chunk_keys"])
    @pytest.mark.parametrize(
        ("shared", "own"), [(None, (3, 4)), ("b", (1, 4)), ("h", (3, 1)), ("bh", (1, 1))], ids=str
    )
    def test_one_mask_serves_all_that_share_it(
        self, shared: str | None, own: tuple[int, int], dropout: str
    ) -> None:
        masks = self.masks(shared, dropout)
        # The shared coordinate is 0, so that the mask is that of the first entry or head.
        expected = np.broadcast_to(self.masks(None, dropout)[: own[0], : own[1]], masks.shape)
        np.testing.assert_array_equal(masks, expected)
        assert len(np.unique(masks.reshape(12, -1), axis=0)) == own[0] * own[1]

    @pytest.mark.found_outside
    @pytest.mark.parametrize(
        ("shared", "place"), [("b", (0, 6, 7, 8)), ("h", (5, 0, 7, 8)), ("bh", (0, 0, 7, 8))]
    )
    def test_the_origin_of_what_is_shared_is_zero(self, shared: str, place: tuple[int, ...]) -> None:
        rows, shape = np.arange(6), (1, 1, 6, 21)
        got = keep_mask(STANDARD, 3, 0.5, 0, 0, rows, shape, (5, 6, 7, 8), shared)
        np.testing.assert_array_equal(got, keep_mask(STANDARD, 3, 0.5, 0, 0, rows, shape, place))

    @pytest.mark.parametrize("shared", [None, "b", "h", "bh"])
    def test_rows_of_one_entry_have_masks_of_their_own(self, shared: str | None) -> None:
        """Packed sequences are rows of one batch entry: they differ whatever is shared."""
        assert len(np.unique(self.masks(shared)[0, 0], axis=0)) == self.SHAPE[2]


class TestGivenWeights:
    """Weights of a generator that is not known."""

    OWN = Semantics(dropout="own_generator")

    def problem(self) -> Problem:
        query, key, value = np.random.default_rng(0).standard_normal((3, 2, 5, 2, 4)).astype(np.float32)
        return make_problem(query, key, value, dropout_prob=0.5, dropout_seed=3)

    def test_the_oracle_drops_the_given_weights(self) -> None:
        problem = self.problem()
        rows, shape = np.arange(5), (2, 2, 5, 5)
        keep = [[keep_mask(STANDARD, 3, 0.5, b, h, rows, shape) for h in range(2)] for b in range(2)]
        given = replace(problem, dropout_keep=np.array(keep), dropout_seed=4)
        cotangents = Cotangents(problem.value)
        expected = attention(problem, STANDARD, cotangents).items()
        for name, array in attention(given, self.OWN, cotangents).items().items():
            np.testing.assert_array_equal(array, expected[name])

    def test_a_generator_that_is_not_known_draws_nothing(self) -> None:
        with pytest.raises(ValueError, match="dropout_keep: got None, expected the kept weights"):
            attention(self.problem(), self.OWN)


class TestThreshold:
    def test_rate_zero_keeps_everything(self) -> None:
        assert mask(STANDARD, 3, 0.0, 0, 0, (1, 1, 64, 64)).all()

    @pytest.mark.parametrize("rate", [1 - 2.0**-33, 1 - 2.0**-53])
    def test_rate_next_to_one_keeps_only_the_largest_word(self, rate: float) -> None:
        # floor(r 2^32) = 2^32 - 1: one word in four thousand million survives.
        assert not mask(STANDARD, 3, rate, 0, 0, (1, 1, 64, 64)).any()

    def test_a_rate_below_one_word_drops_nothing(self) -> None:
        assert mask(STANDARD, 3, 2.0**-33, 0, 0, (1, 1, 64, 64)).all()

    @pytest.mark.parametrize("dropout", DIALECTS)
    def test_the_word_at_the_threshold_is_kept(self, dropout: str) -> None:
        semantics = replace(STANDARD, dropout=dropout)
        word = second_pairs.philox((0, 0, 0, 0), (0, 0))[0]
        assert mask(semantics, 0, word / 2**32, 0, 0, (1, 1, 1, 1)).all()
        assert not mask(semantics, 0, (word + 1) / 2**32, 0, 0, (1, 1, 1, 1)).any()


class TestStatistics:
    @settings(max_examples=20)
    @given(seed=SEEDS, rate=st.sampled_from((0.1, 0.5, 0.9)))
    def test_keep_rate(self, seed: int, rate: float) -> None:
        kept = np.stack([mask(STANDARD, seed, rate, 0, h, (1, 4, 64, 64)) for h in range(4)])
        deviation = (kept.mean() - (1 - rate)) / np.sqrt(rate * (1 - rate) / kept.size)
        assert abs(deviation) < 6  # two in a thousand million

    @settings(max_examples=20)
    @given(seed=SEEDS)
    def test_heads_rows_batches_and_seeds_are_independent(self, seed: int) -> None:
        shape = (2, 2, 64, 64)
        base = mask(STANDARD, seed, 0.5, 0, 0, shape)
        others = {
            "head": mask(STANDARD, seed, 0.5, 0, 1, shape),
            "batch": mask(STANDARD, seed, 0.5, 1, 0, shape),
            "next row": np.roll(base, 1, axis=0),
            "next column": np.roll(base, 1, axis=1),
            "next quartet": np.roll(base, 4, axis=1),
            "transposed": base.T[~np.eye(64, dtype=bool)],
            "low word": mask(STANDARD, seed ^ 1, 0.5, 0, 0, shape),
            "high word": mask(STANDARD, seed ^ (1 << 32), 0.5, 0, 0, shape),
        }
        for name, other in others.items():
            mine = base[~np.eye(64, dtype=bool)] if name == "transposed" else base
            # Under transposition each unordered pair is met twice, which doubles the variance.
            limit = 6 * np.sqrt(2) if name == "transposed" else 6
            agreement = (mine == other).mean()
            assert abs(agreement - 0.5) / (0.5 / np.sqrt(mine.size)) < limit, name
