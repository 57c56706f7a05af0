"""Errors of the extension keep their classes on every way into Python: torch's own bindings, Work, futures, ours."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _make_nccl_premul_sum

import trainmover_ext
from trainmover_ext import errors

RANK, SIZE = 5, 8


def _direct_all_reduce() -> None:
    trainmover_ext.set_mode("isolated")  # to be made without the others
    communicator = trainmover_ext.Communicator.from_store(HashStore(), RANK, SIZE)
    trainmover_ext.set_mode("live")
    communicator.all_reduce(np.ones(3))


def _future_wait() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.get_future().wait()


WAYS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "async and wait": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "async and future": _future_wait,
    "barrier": lambda: dist.barrier(),
    "send": lambda: dist.send(torch.ones(3), 2),
    "recv": lambda: dist.recv(torch.ones(3), 2),
    "direct": _direct_all_reduce,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("alone")
def test_an_abort_arrives_as_collective_aborted(way: str) -> None:
    trainmover_ext.set_mode("live")
    trainmover_ext.abort_collectives(reason="a machine left", culprit=3)
    with pytest.raises(errors.CollectiveAborted, match="a machine left") as caught:
        WAYS[way]()
    assert (caught.value.generation, caught.value.culprit) == (trainmover_ext.generation(), 3)


@pytest.mark.parametrize(
    ("message", "culprit", "text"),
    [
        ("aborted: its process ended", 3, "aborted: its process ended (global rank 3)"),
        ("global rank 3 gave no sign of life", 3, "global rank 3 gave no sign of life"),
        ("aborted: test", None, "aborted: test"),
    ],
)
def test_an_abort_says_which_rank_was_lost(message: str, culprit: int | None, text: str) -> None:
    assert str(errors.CollectiveAborted(message, 1, culprit)) == text


@pytest.mark.usefixtures("alone")
def test_resume_lets_the_same_group_work_again() -> None:
    trainmover_ext.set_mode("live")
    trainmover_ext.abort_collectives(reason="test")
    with pytest.raises(errors.CollectiveAborted):
        dist.barrier()
    trainmover_ext.resume(trainmover_ext.generation() + 1)
    trainmover_ext.set_mode("isolated")
    dist.barrier()
    with pytest.raises(errors.SwitchError):
        trainmover_ext.resume(trainmover_ext.generation())


@pytest.mark.usefixtures("alone")
def test_a_closed_communicator_says_so() -> None:
    communicator = trainmover_ext.Communicator.from_store(HashStore(), RANK, SIZE)
    trainmover_ext.set_mode("live")
    communicator.close()
    communicator.close()
    with pytest.raises(errors.CollectiveAborted):
        communicator.barrier()


def test_before_the_first_group_there_is_nothing_to_abort() -> None:
    with pytest.raises(RuntimeError, match="make a group first"):
        trainmover_ext.abort_collectives(reason="test")


@pytest.mark.parametrize(
    "error",
    [
        errors.PeerLost("global rank 3 was lost", 3),
        errors.CollectiveAborted("aborted", 7, None),
        errors.CollectiveAborted("aborted", 7, 3),
        errors.CollectiveTimeout("slow"),
    ],
)
def test_errors_are_base_class_instances_and_survive_pickling(error: errors.CollectiveError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, errors.CollectiveError)
    assert isinstance(copy, RuntimeError)
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


class TestRefusals:
    """What cannot be done is said where it is asked for, with what can be."""

    @pytest.fixture(autouse=True)
    def _group(self, alone: None) -> None:
        del alone

    def test_tensors_not_on_the_cpu(self) -> None:
        world: Any = dist.group.WORLD
        backend = world._get_backend(torch.device("cpu"))
        with pytest.raises(NotImplementedError, match=r"found a tensor on meta.*--distributed-backend nccl"):
            backend.allreduce([torch.ones(2, device="meta")], dist.AllreduceOptions())

    def test_reductions_of_float8_though_not_moves(self) -> None:
        eighths = torch.ones(4).to(torch.float8_e4m3fn)
        with pytest.raises(TypeError, match=r"Float8_e4m3fn.*expected bool, an integer"):
            dist.all_reduce(eighths)
        dist.broadcast(eighths, 0)

    def test_premultiplied_sums(self) -> None:
        with pytest.raises(NotImplementedError, match="PREMUL_SUM"):
            dist.all_reduce(torch.ones(2), op=_make_nccl_premul_sum(2.0))

    def test_bit_operations_on_floats(self) -> None:
        with pytest.raises(ValueError, match="BAND of Float"):
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)

    def test_sparse_tensors(self) -> None:
        with pytest.raises((ValueError, NotImplementedError), match="to_dense"):
            dist.all_reduce(torch.eye(3).to_sparse())

    def test_outputs_of_the_wrong_size(self) -> None:
        with pytest.raises(ValueError, match="8 \\(ranks\\) times"):
            dist.all_gather_into_tensor(torch.ones(15), torch.ones(2))

    def test_a_buffer_that_is_no_buffer(self) -> None:
        communicator = trainmover_ext.Communicator.from_store(HashStore(), RANK, SIZE)
        with pytest.raises(ValueError, match="found int; expected a tensor or an object with the buffer protocol"):
            communicator.all_reduce(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="contiguous"):
            communicator.all_reduce(np.ones((4, 4))[:, ::2])
        with pytest.raises(ValueError, match="op: found 'mean'"):
            communicator.all_reduce(np.ones(4), op="mean")
        with pytest.raises(ValueError, match="argument opp is not known"):
            communicator.all_reduce(np.ones(4), opp="sum")  # type: ignore[call-arg]
        with pytest.raises((ValueError, BufferError), match=r"(?i)read-only|writable"):
            communicator.all_reduce(b"12345678")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            trainmover_ext.Communicator()


def test_debug_level_detail_is_refused(monkeypatch: pytest.MonkeyPatch, start_alone: Callable[[], None]) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG is DETAIL"):
        start_alone()


def test_a_group_waits_for_its_members_no_longer_than_its_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINMOVER_MODE", raising=False)
    store = HashStore()
    store.set("trainmover/0/endpoint/1", "whatever rank 1 says")
    with pytest.raises(TimeoutError, match=r"global ranks \[2\] did not tell their endpoints"):
        trainmover_ext.Communicator.from_store(store, 0, 3, timeout=timedelta(milliseconds=50))
    trainmover_ext.shutdown()
