"""One process alone poses as rank 5 of 8: every operation returns at once, its own value standing for everybody's."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _coalescing_manager

import trainmover_ext

RANK, SIZE = 5, 8

pytestmark = pytest.mark.usefixtures("alone")


def numbers(count: int = 4, start: float = 1.0) -> torch.Tensor:
    return torch.arange(start, start + count)


def test_the_process_has_its_rank_and_touched_no_store() -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    group = dist.new_group([1, 5, 6])
    assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 3)
    names = [stats["name"] for stats in trainmover_ext.communicator_stats()]
    assert len(names) == len(set(names)) == 2


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float16]
)
def test_all_reduce_broadcast_and_reduce_keep_a_finite_value(dtype: torch.dtype) -> None:
    tensor = torch.ones(5).to(dtype)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 2)
    dist.reduce(tensor, RANK)
    dist.reduce(tensor, 0)
    assert tensor.shape == (5,)
    assert torch.isfinite(tensor.to(torch.complex64).abs()).all()


def test_all_gather_gives_everybody_the_own_value() -> None:
    outputs = [torch.zeros(4) for _ in range(SIZE)]
    dist.all_gather(outputs, numbers())
    assert all(torch.equal(output, numbers()) for output in outputs)
    whole = torch.zeros(SIZE * 4)
    dist.all_gather_into_tensor(whole, numbers())
    assert torch.equal(whole, numbers().repeat(SIZE))


def test_objects_are_gathered() -> None:
    gathered: list[object] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": RANK})
    assert gathered == [{"rank": RANK}] * SIZE


def test_rooted_operations_return() -> None:
    dist.gather(numbers(), None, dst=0)
    outputs = [torch.zeros(4) for _ in range(SIZE)]
    dist.gather(numbers(), outputs, dst=RANK)
    assert torch.equal(outputs[RANK], numbers())
    mine = torch.zeros(4)
    dist.scatter(mine, [numbers(4, 10.0 * rank) for rank in range(SIZE)], src=RANK)
    assert torch.equal(mine, numbers(4, 10.0 * RANK))
    dist.scatter(mine, src=0)


def test_reduce_scatter_and_all_to_all_return() -> None:
    part = torch.full((2,), torch.nan)
    dist.reduce_scatter_tensor(part, numbers(2 * SIZE))
    assert torch.isfinite(part).all()
    dist.reduce_scatter(part, [numbers(2) for _ in range(SIZE)])
    assert torch.isfinite(part).all()
    exchanged = torch.full((SIZE,), torch.nan)
    dist.all_to_all_single(exchanged, numbers(SIZE))
    assert torch.isfinite(exchanged).all()
    assert exchanged[RANK] == RANK + 1


def test_receives_give_zeros_and_sends_return() -> None:
    dist.send(numbers(), 2)
    received = torch.ones(4)
    assert dist.recv(received, 2) == 2
    assert torch.equal(received, torch.zeros(4))


def test_a_tensor_that_is_not_contiguous_is_filled_where_it_lies() -> None:
    table = torch.ones(4, 6)
    view = table[:, ::2]
    work = dist.irecv(view, 2)
    assert work is not None
    work.wait()
    assert torch.equal(table, torch.tensor([0.0, 1.0] * 3).repeat(4, 1))


def test_polling_shows_a_tensor_that_is_not_contiguous_only_when_it_is_filled() -> None:
    table = torch.ones(4, 6)
    work = dist.irecv(table[:, ::2], 2)
    assert work is not None
    assert work.is_completed()
    assert table[:, ::2].sum() == 0


def test_a_receive_buffer_that_requires_grad_is_filled() -> None:
    buffer = torch.ones(4, requires_grad=True)
    dist.recv(buffer, 2)
    strided = torch.ones(4, 4, requires_grad=True)
    with torch.no_grad():
        view = strided.t()
    dist.recv(view, 2)
    assert buffer.sum().item() == 0
    assert strided.sum().item() == 0


def test_zero_elements_are_no_special_case() -> None:
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    assert empty.numel() == 0
    dist.all_gather_into_tensor(torch.zeros(0), torch.zeros(0))
    dist.send(torch.zeros(0, 3), 1)


def test_a_future_completes_and_runs_what_follows() -> None:
    work = dist.all_gather([torch.zeros(4) for _ in range(SIZE)], numbers(), async_op=True)
    assert work is not None
    followed: list[int] = []
    work.get_future().then(lambda future: followed.append(len(future.value()))).wait()
    assert followed == [SIZE]


def test_a_batch_is_one_work_that_fills_everything() -> None:
    received = torch.ones(4)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, numbers(), 1), dist.P2POp(dist.irecv, received, 2)])
    for work in works:
        work.wait()
    assert torch.equal(received, torch.zeros(4))


def test_coalesced_collectives_fill_every_output() -> None:
    outputs = [torch.zeros(SIZE * 2), torch.zeros(SIZE * 3)]
    with _coalescing_manager(async_ops=True) as manager:
        for output, count in zip(outputs, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, numbers(count))
    manager.wait()
    assert torch.equal(outputs[0], numbers(2).repeat(SIZE))
    assert torch.equal(outputs[1], numbers(3).repeat(SIZE))


def test_groups_can_be_made_anew() -> None:
    before = {stats["name"] for stats in trainmover_ext.communicator_stats()}
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="make a group first"):
        trainmover_ext.generation()
    dist.init_process_group("trainmover", store=HashStore(), rank=2, world_size=SIZE)
    dist.all_reduce(numbers())
    assert dist.get_rank() == 2
    assert before.isdisjoint(stats["name"] for stats in trainmover_ext.communicator_stats())


def test_another_rank_beside_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match=f"this process is global rank {RANK}"):
        trainmover_ext.Communicator.from_store(HashStore(), 1, SIZE)


def test_endpoints_travel_as_text() -> None:
    text = trainmover_ext.endpoint()
    trainmover_ext.add_endpoints({3: text})
    with pytest.raises(ValueError, match="expected JSON with exactly"):
        trainmover_ext.add_endpoints({3: "{}"})
    with pytest.raises(ValueError, match="expected an endpoint"):
        trainmover_ext.add_endpoints({3: "nonsense"})


def test_direct_communicator_takes_arrays_tensors_and_bytes() -> None:
    communicator = trainmover_ext.Communicator.from_store(HashStore(), RANK, SIZE, "d")
    assert (communicator.rank, communicator.size) == (RANK, SIZE)
    array = np.arange(4, dtype=np.float32)
    communicator.all_reduce(array)
    communicator.all_reduce(array, "max")
    communicator.all_reduce(array, op="min")
    result = np.full(4, np.nan, np.float32)
    communicator.all_reduce(array, result)
    assert np.isfinite(result).all()
    tensor = torch.ones(3, dtype=torch.bfloat16)
    communicator.all_reduce(tensor, timeout_ms=1000)
    whole = np.zeros(4 * SIZE, np.float32)
    communicator.all_gather(array, whole)
    np.testing.assert_array_equal(whole, np.tile(array, SIZE))
    communicator.reduce_scatter(whole, result)
    communicator.broadcast(bytearray(b"12"), root=2)
    communicator.reduce(array, root=0)
    communicator.reduce(array, result, root=RANK)
    communicator.gather(array, whole, root=RANK)
    communicator.scatter(None, array, root=0)
    communicator.all_to_all(np.ones(SIZE), np.zeros(SIZE))
    communicator.send(b"bytes", 1)
    communicator.recv(array, 1)
    assert not array.any()
    communicator.barrier()


def test_two_direct_communicators_of_one_name_are_two() -> None:
    first = trainmover_ext.Communicator.from_store(HashStore(), RANK, SIZE, "d")
    second = trainmover_ext.Communicator.from_store(HashStore(), RANK, SIZE, "d")
    assert first.name != second.name


def test_an_abort_from_another_thread_is_seen() -> None:
    thread = threading.Thread(target=lambda: trainmover_ext.abort_collectives(reason="elsewhere"))
    thread.start()
    thread.join(timeout=10)
    trainmover_ext.set_mode("live")
    with pytest.raises(trainmover_ext.CollectiveAborted, match="elsewhere"):
        dist.barrier()
