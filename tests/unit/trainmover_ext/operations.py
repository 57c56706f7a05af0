"""What each rank of test_backend_operations.py checks: every operation, compared with what it must give."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _coalescing_manager

import trainmover_ext
from tests.unit.trainmover_ext.given import COUNTS, DTYPES, all_given, check, cut, expect, given, me, size


@check
def all_reduce_sums_every_type_and_size() -> None:
    for dtype in DTYPES:
        for count in COUNTS:
            tensor = given(me(), count, dtype)
            dist.all_reduce(tensor)
            expect(tensor, torch.stack(all_given(count, dtype)).sum(0).to(dtype))


@check
def all_reduce_knows_every_operation() -> None:
    stacked = torch.stack(all_given(100, torch.int32))
    folded = {name: stacked[0].clone() for name in ("and", "or", "xor")}
    for other in stacked[1:]:
        folded["and"] &= other
        folded["or"] |= other
        folded["xor"] ^= other
    wanted = {
        dist.ReduceOp.SUM: stacked.sum(0, dtype=torch.int32),
        dist.ReduceOp.PRODUCT: stacked.prod(0, dtype=torch.int32),
        dist.ReduceOp.MIN: stacked.amin(0),
        dist.ReduceOp.MAX: stacked.amax(0),
        dist.ReduceOp.BAND: folded["and"],
        dist.ReduceOp.BOR: folded["or"],
        dist.ReduceOp.BXOR: folded["xor"],
    }
    for op, result in wanted.items():
        tensor = given(me(), 100, torch.int32)
        dist.all_reduce(tensor, op=op)
        expect(tensor, result)
    average = given(me(), 100, torch.float64)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    expect(average, stacked.double().sum(0) / size())


@check
def all_reduce_of_complex_numbers_sums_both_parts() -> None:
    tensor = torch.complex(given(me(), 50), -given(me(), 50))
    dist.all_reduce(tensor)
    total = torch.stack(all_given(50)).sum(0)
    expect(tensor, torch.complex(total, -total))


@check
def all_reduce_fills_a_tensor_that_is_not_contiguous_and_nothing_beside_it() -> None:
    table = torch.full((10, 6), -1.0)
    table[:, ::2] = given(me(), 30).view(10, 3)
    dist.all_reduce(table[:, ::2])
    expect(table[:, ::2], torch.stack(all_given(30)).sum(0).view(10, 3))
    expect(table[:, 1::2], torch.full((10, 3), -1.0))


@check
def all_reduce_coalesced_reduces_each_tensor() -> None:
    tensors = [given(me(), count) for count in (3, 0, 500)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, count in zip(tensors, (3, 0, 500), strict=True):
        expect(tensor, torch.stack(all_given(count)).sum(0))


@check
def all_reduce_is_the_same_bits_on_all_ranks() -> None:
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(me())).bfloat16()
    dist.all_reduce(tensor)
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, tensor.view(torch.int16).tolist())
    assert all(other == gathered[0] for other in gathered)


@check
def broadcast_from_each_root_moves_every_type() -> None:
    for root in range(size()):
        for dtype in (*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn):
            tensor = given(me(), 100, torch.float32).to(dtype)
            dist.broadcast(tensor, root)
            expect(tensor.to(torch.complex64), given(root, 100).to(dtype).to(torch.complex64))


@check
def reduce_gives_root_the_sum() -> None:
    for root in range(size()):
        tensor = given(me(), 1000)
        dist.reduce(tensor, root)
        if me() == root:
            expect(tensor, torch.stack(all_given(1000)).sum(0))


@check
def all_gather_collects_also_uneven_parts() -> None:
    for counts in ([5] * size(), [rank * 3 for rank in range(size())]):
        outputs = [torch.zeros(count) for count in counts]
        dist.all_gather(outputs, given(me(), counts[me()]))
        for rank, output in enumerate(outputs):
            expect(output, given(rank, counts[rank]))


@check
def all_gather_into_tensor_collects_also_in_place() -> None:
    for count in COUNTS:
        whole = torch.zeros(count * size())
        dist.all_gather_into_tensor(whole, given(me(), count))
        expect(whole, torch.cat(all_given(count)))
        whole.zero_()
        part = whole[me() * count : (me() + 1) * count]
        part.copy_(given(me(), count))
        dist.all_gather_into_tensor(whole, part)
        expect(whole, torch.cat(all_given(count)))


@check
def all_gather_into_tensor_coalesced_collects_each() -> None:
    outputs = [torch.zeros(count * size()) for count in (4, 9)]
    with _coalescing_manager(async_ops=True) as manager:
        for output, count in zip(outputs, (4, 9), strict=True):
            dist.all_gather_into_tensor(output, given(me(), count))
    manager.wait()
    for output, count in zip(outputs, (4, 9), strict=True):
        expect(output, torch.cat(all_given(count)))


@check
def gather_collects_at_root() -> None:
    for root in range(size()):
        outputs = [torch.zeros(20) for _ in range(size())] if me() == root else None
        dist.gather(given(me(), 20), outputs, dst=root)
        for rank, output in enumerate(outputs or []):
            expect(output, given(rank, 20))


@check
def scatter_gives_each_rank_its_part() -> None:
    for root in range(size()):
        part = torch.zeros(20)
        dist.scatter(part, all_given(20) if me() == root else None, src=root)
        expect(part, given(me(), 20))


@check
def reduce_scatter_gives_each_rank_its_part_also_uneven() -> None:
    for counts in ([6] * size(), [rank * 2 for rank in range(size())]):
        output = torch.zeros(counts[me()])
        dist.reduce_scatter(output, cut(given(me(), sum(counts)), counts))
        expect(output, cut(torch.stack(all_given(sum(counts))).sum(0), counts)[me()])


@check
def reduce_scatter_tensor_reduces_also_in_place() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for count in COUNTS:
            total = torch.stack(all_given(count * size(), dtype)).sum(0).to(dtype)
            mine = slice(me() * count, (me() + 1) * count)
            output = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter_tensor(output, given(me(), count * size(), dtype))
            expect(output, total[mine])
            whole = given(me(), count * size(), dtype)
            dist.reduce_scatter_tensor(whole[mine], whole)
            expect(whole[mine], total[mine])


@check
def all_to_all_single_exchanges_rows_also_uneven() -> None:
    output = torch.zeros(size(), 3)
    source = given(me(), size() * 3).view(size(), 3)
    dist.all_to_all_single(output, source)
    expect(output, torch.stack([given(rank, size() * 3).view(size(), 3)[me()] for rank in range(size())]))
    splits = {rank: [(rank + to) % 3 for to in range(size())] for rank in range(size())}
    receives = [splits[rank][me()] for rank in range(size())]
    uneven = torch.zeros(sum(receives))
    dist.all_to_all_single(uneven, given(me(), sum(splits[me()])), receives, splits[me()])
    wanted = [cut(given(rank, sum(splits[rank])), splits[rank])[me()] for rank in range(size())]
    expect(uneven, torch.cat(wanted))


@check
def all_to_all_exchanges_tensors() -> None:
    outputs = [torch.zeros(rank + 1) for rank in range(size())]
    dist.all_to_all(outputs, [given(me(), me() + 1) + to for to in range(size())])
    for rank, output in enumerate(outputs):
        expect(output, given(rank, rank + 1) + me())


@check
def sends_are_matched_by_tag_and_order() -> None:
    to, source = (me() + 1) % size(), (me() - 1) % size()
    sends = [dist.isend(given(me(), 10) + number, to, tag=number % 2) for number in range(4)]
    for number in (1, 3, 0, 2):
        received = torch.zeros(10)
        assert dist.recv(received, source, tag=number % 2) == source
        expect(received, given(source, 10) + number)
    for send in sends:
        assert send is not None
        send.wait()


@check
def a_message_from_anybody_tells_its_sender() -> None:
    if me() == 0:
        senders = set()
        for _ in range(size() - 1):
            received = torch.zeros(6)
            sender = dist.recv(received)
            expect(received, given(sender, 6))
            senders.add(sender)
        assert senders == set(range(1, size()))
    else:
        dist.send(given(me(), 6), 0)
    dist.barrier()  # without it a later message of a quick rank is one from anybody, too


@check
def a_batch_of_sends_and_receives_crosses_without_deadlock() -> None:
    to, source = (me() + 1) % size(), (me() - 1) % size()
    count = 200_000
    received = [torch.zeros(count) for _ in range(2)]
    operations = [dist.P2POp(dist.isend, given(me(), count) + number, to) for number in range(2)]
    operations += [dist.P2POp(dist.irecv, tensor, source) for tensor in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for number, tensor in enumerate(received):
        expect(tensor, given(source, count) + number)


@check
def a_work_dropped_before_its_end_keeps_its_memory() -> None:
    to, source = (me() + 1) % size(), (me() - 1) % size()
    for _ in range(20):
        dist.isend(given(me(), 100_000), to)
    for _ in range(20):
        received = torch.zeros(100_000)
        dist.recv(received, source)
        expect(received, given(source, 100_000))


@check
def futures_complete_and_run_what_follows() -> None:
    tensor = given(me(), 30)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    expect(doubled, torch.stack(all_given(30)).sum(0) * 2)


@check
def waits_release_the_gil() -> None:
    """Rank 1's main thread waits for a message that comes only after its other thread exchanged many with rank 0."""
    rounds, last = 50, 7

    def exchange(peer: int) -> None:
        for _ in range(rounds):
            dist.send(torch.ones(1), peer, tag=1)
            dist.recv(torch.zeros(1), peer, tag=1)

    if me() == 0:
        exchange(1)
        dist.send(torch.ones(1), 1, tag=last)
    elif me() == 1:
        thread = threading.Thread(target=exchange, args=(0,))
        thread.start()
        assert dist.recv(torch.zeros(1), 0, tag=last) == 0
        thread.join(30)
        assert not thread.is_alive()


@check
def barriers_hold_until_all_have_come() -> None:
    dist.barrier()
    world: Any = dist.group.WORLD
    world.monitored_barrier(timedelta(seconds=30), True)  # torch.distributed's own function is for gloo only
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()


@check
def objects_travel() -> None:
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, {"rank": me(), "text": "x" * (1 + 1000 * me())})
    assert [entry["rank"] for entry in gathered] == list(range(size()))
    box = [me() * 11]
    dist.broadcast_object_list(box, src=size() - 1)
    assert box == [(size() - 1) * 11]


@check
def subgroups_have_their_own_order() -> None:
    group = dist.new_group([0, size() - 1])
    everybody = dist.new_group()
    if me() in (0, size() - 1):
        tensor = given(me(), 10)
        dist.all_reduce(tensor, group=group)
        expect(tensor, given(0, 10) + given(size() - 1, 10))
    tensor = given(me(), 10)
    dist.all_reduce(tensor, group=everybody)
    expect(tensor, torch.stack(all_given(10)).sum(0))


@check
def a_direct_communicator_gives_what_the_group_gives() -> None:
    communicator = trainmover_ext.Communicator.from_store(HashStore(), me(), size(), "check")
    stacked = np.stack([given(rank, 1000).numpy() for rank in range(size())])
    array = given(me(), 1000).numpy().copy()
    result = np.zeros(1000, np.float32)
    communicator.all_reduce(array, result)
    np.testing.assert_array_equal(result, stacked.sum(0))
    communicator.all_reduce(array, op="max")
    np.testing.assert_array_equal(array, stacked.max(0))
    whole = np.zeros(1000 * size(), np.float32)
    communicator.all_gather(given(me(), 1000), whole)
    np.testing.assert_array_equal(whole, stacked.ravel())
    part = np.zeros(1000, np.float32)
    communicator.reduce_scatter(whole, part)
    np.testing.assert_array_equal(part, stacked[me()] * size())
    communicator.all_to_all(whole, exchanged := np.zeros_like(whole))
    np.testing.assert_array_equal(exchanged, np.tile(stacked[me()], size()))
    communicator.broadcast(part, root=size() - 1)
    np.testing.assert_array_equal(part, stacked[-1] * size())
    communicator.reduce(given(me(), 1000), result, root=0)
    communicator.gather(given(me(), 1000), exchanged, root=0)
    if me() == 0:
        np.testing.assert_array_equal(result, stacked.sum(0))
        np.testing.assert_array_equal(exchanged, stacked.ravel())
    communicator.scatter(whole if me() == 0 else None, part, root=0)
    np.testing.assert_array_equal(part, stacked[me()])
    if me() == 0:
        communicator.send(part, 1, tag=5)
    elif me() == 1:
        assert communicator.recv(result, 0, tag=5) == 0
        np.testing.assert_array_equal(result, stacked[0])
    communicator.barrier()
    communicator.close()


@check
def figures_count_operations_waits_and_bytes() -> None:
    before = trainmover_ext.communicator_stats()[0].copy()
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000))
    after = trainmover_ext.communicator_stats()[0]
    assert after["operations"] - before["operations"] == 20
    assert 1 <= after["waits"] - before["waits"] <= 20
    assert after["wait_us"] > before["wait_us"]
    # Each rank puts its vector up for the others once, or sends about twice that round a ring.
    assert 1 <= (after["bytes_sent"] - before["bytes_sent"]) / (20 * 400_000) <= 2
    assert after["bytes_received"] > before["bytes_received"]


@check
def after_an_abort_the_same_group_works_again() -> None:
    try:
        dist.barrier()  # of which the abort may reach those who have not left it yet
        if me() == 0:
            trainmover_ext.abort_collectives(reason="check", culprit=size() - 1)
        for _ in range(100_000):
            dist.all_reduce(torch.ones(10))
        raise AssertionError("the abort of rank 0 did not arrive")
    except trainmover_ext.CollectiveAborted as error:
        assert error.culprit == size() - 1  # noqa: PT017
    trainmover_ext.resume(trainmover_ext.generation() + 1)
    tensor = given(me(), 100)
    dist.all_reduce(tensor)
    expect(tensor, torch.stack(all_given(100)).sum(0))
