"""Claims about who reads which sample: all ranks together walk one sequence, from wherever they start."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.samplers import CyclicSampler, SamplerShape, SequentialSampler

SIZES = st.integers(1, 6)


def shape(total: int, consumed: int, micro: int, rank: int, ranks: int) -> SamplerShape:
    return SamplerShape(
        total_samples=total,
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
    )


def walk(kind: str, total: int, consumed: int, micro: int, ranks: int, *, seed: int = 7) -> Iterator[list[int]]:
    """Each step's samples of all ranks, in the order of the ranks."""
    shapes = [shape(total, consumed, micro, rank, ranks) for rank in range(ranks)]
    samplers = [SequentialSampler(s) if kind == "single" else CyclicSampler(s, seed) for s in shapes]
    for batches in zip(*map(iter, samplers), strict=True):
        assert all(len(batch) == micro for batch in batches)
        yield list(itertools.chain(*batches))


@settings(deadline=None)
@given(total=st.integers(0, 80), consumed=st.integers(0, 90), micro=SIZES, ranks=SIZES)
def test_all_ranks_together_read_each_sample_once_and_in_order(
    total: int, consumed: int, micro: int, ranks: int
) -> None:
    step = micro * ranks
    steps = max(0, total - consumed) // step
    read = list(itertools.chain(*walk("single", total, consumed, micro, ranks)))
    assert read == list(range(consumed, consumed + steps * step))


@settings(deadline=None)
@given(total=st.integers(1, 80), micro=SIZES, ranks=SIZES, done=st.integers(0, 20), data=st.data())
def test_a_resumed_pass_goes_on_exactly(total: int, micro: int, ranks: int, done: int, data: st.DataObject) -> None:
    straight = list(walk("single", total, 0, micro, ranks))
    done = min(done, len(straight))
    assert straight[done:] == list(walk("single", total, done * micro * ranks, micro, ranks))
    other_micro, other_ranks = data.draw(SIZES), data.draw(SIZES)
    before = list(itertools.chain(*straight[:done]))
    after = list(itertools.chain(*walk("single", total, len(before), other_micro, other_ranks)))
    assert before + after == list(range(len(before) + len(after)))
    assert total - len(before) - len(after) < other_micro * other_ranks


@settings(deadline=None)
@given(total=st.integers(1, 25), micro=SIZES, ranks=SIZES)
def test_every_cyclic_pass_reads_each_sample_once(total: int, micro: int, ranks: int) -> None:
    passes = 3
    steps = -(-passes * total // (micro * ranks))
    read = list(itertools.chain(*itertools.islice(walk("cyclic", total, 0, micro, ranks), steps)))
    for number in range(passes):
        assert sorted(read[number * total : (number + 1) * total]) == list(range(total))


@settings(deadline=None)
@given(total=st.integers(1, 25), micro=SIZES, ranks=SIZES, done=st.integers(0, 30), data=st.data())
def test_a_resumed_cyclic_run_goes_on_exactly_in_any_layout(
    total: int, micro: int, ranks: int, done: int, data: st.DataObject
) -> None:
    other_micro, other_ranks = data.draw(SIZES), data.draw(SIZES)
    consumed, step = done * micro * ranks, other_micro * other_ranks
    length = consumed + 8 * step
    sequence = list(itertools.chain(*itertools.islice(walk("cyclic", total, 0, 1, 1), length)))
    resumed = list(itertools.islice(walk("cyclic", total, consumed, other_micro, other_ranks), 8))
    assert list(itertools.chain(*resumed)) == sequence[consumed:]


def test_cyclic_passes_differ_from_each_other_and_between_seeds() -> None:
    first, second = itertools.islice(walk("cyclic", 50, 0, 50, 1), 2)
    (other,) = itertools.islice(walk("cyclic", 50, 0, 50, 1, seed=8), 1)
    assert first != second
    assert first != other
    assert first != sorted(first)


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_an_empty_set_gives_nothing(kind: str) -> None:
    assert list(walk(kind, 0, 0, 2, 2)) == []


def test_a_sampler_can_be_walked_twice() -> None:
    sampler = SequentialSampler(shape(8, 2, 1, 1, 2))
    assert list(sampler) == list(sampler) == [[3], [5], [7]]


def test_an_evaluation_reads_its_set_again_and_again_from_any_point() -> None:
    def indices(consumed: int, rank: int) -> list[list[int]]:
        shape = SamplerShape(
            total_samples=7,
            consumed_samples=consumed,
            micro_batch_size=1,
            data_parallel_rank=rank,
            data_parallel_size=2,
        )
        return list(itertools.islice(SequentialSampler(shape, wraps=True), 5))

    assert indices(0, 0) == [[0], [2], [4], [0], [2]]
    assert indices(0, 1) == [[1], [3], [5], [1], [3]]
    assert indices(6 * 100 + 4, 0) == [[4], [0], [2], [4], [0]]


def test_a_set_smaller_than_a_step_ends_at_once_even_if_it_wraps() -> None:
    shape = SamplerShape(
        total_samples=3, consumed_samples=0, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=2
    )
    assert list(SequentialSampler(shape, wraps=True)) == []
