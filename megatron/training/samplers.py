"""Which samples a data-parallel rank reads, in which order: a pure function of the samples consumed before.

Called by `data.py`, one sampler a loader. Every rank of a data-parallel group walks the same sequence and takes its
own micro-batch of each step, so a run can go on from any `consumed_samples`, and a joiner needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerShape:
    """Size of the data set and of one step; `data_parallel_rank` takes the micro-batch of its own number."""

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    @property
    def step(self) -> int:
        """Samples that all data-parallel ranks take together in one micro-batch."""
        return self.micro_batch_size * self.data_parallel_size


class SequentialSampler:
    """One pass in order (`--dataloader-type single`), or one after the other if it `wraps` (evaluation).

    An incomplete last step of a pass is dropped.
    """

    def __init__(self, shape: SamplerShape, *, wraps: bool = False) -> None:
        self._shape = shape
        self._wraps = wraps

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of `micro_batch_size` sample indices."""
        shape = self._shape
        first_of_rank = shape.data_parallel_rank * shape.micro_batch_size
        usable = shape.total_samples - shape.total_samples % shape.step
        start = shape.consumed_samples % usable if self._wraps and usable else shape.consumed_samples
        while start + shape.step <= shape.total_samples:
            yield list(range(start + first_of_rank, start + first_of_rank + shape.micro_batch_size))
            start += shape.step
            if self._wraps and start + shape.step > shape.total_samples:
                start = 0


class CyclicSampler:
    """Endless passes (`--dataloader-type cyclic`), each in a random order that depends on the seed and the pass.

    Passes follow each other without a gap, so that a step may take samples of two; what a sample's place in the
    sequence is depends on neither the micro-batch size nor the number of ranks, and both may change on resuming.
    """

    def __init__(self, shape: SamplerShape, seed: int) -> None:
        self._shape = shape
        self._seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of `micro_batch_size` sample indices; never ends unless the set is empty."""
        shape = self._shape
        first = shape.consumed_samples + shape.data_parallel_rank * shape.micro_batch_size
        shuffled, order = -1, np.empty(0, dtype=np.int64)
        while shape.total_samples:
            batch = []
            for place in range(first, first + shape.micro_batch_size):
                number, position = divmod(place, shape.total_samples)
                if number != shuffled:
                    shuffled, order = (
                        number,
                        np.random.default_rng([self._seed, number]).permutation(shape.total_samples),
                    )
                batch.append(int(order[position]))
            yield batch
            first += shape.step
