"""What a run can do beside stepping: evaluate, ramp up, end early, fall back, change layout. On small real jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.conftest import JobResult, JobServer
from tests.distributed.test_bit_equality import NO_DROPOUT, TINY

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
PP2 = "--pipeline-model-parallel-size 2"
Run = Callable[..., JobResult]


@pytest.fixture
def run(jobs: JobServer, tmp_path: Path) -> Run:
    """Runs a job with the tiny settings and `flags`; asserts that it succeeded unless `ok` is False."""

    def start(name: str, flags: str, *, world_size: int = 2, ok: bool = True, base: str = TINY) -> JobResult:
        result = jobs.run([*base.split(), *flags.split()], world_size=world_size, folder=tmp_path / name)
        assert result.ok is ok, f"{name}: exit codes {result.exit_codes}\n{result.logs()}"
        return result

    return start


def log_of(result: JobResult, rank: int) -> str:
    return (result.folder / f"rank-{rank}.log").read_text()


def test_dropout_and_every_random_state_survive_a_resume(run: Run, tmp_path: Path) -> None:
    flags = f"{DROPOUT} {PP2} --tensor-model-parallel-size 2 --sequence-parallel"
    straight = run("straight", f"{flags} --save {tmp_path / 'ck'} --save-interval 20", world_size=4)
    resumed = run("resumed", f"{flags} --load {tmp_path / 'ck'} --ckpt-step 20", world_size=4)
    assert resumed.steps() == straight.steps()[20:]
    assert resumed.state() == straight.state()


def test_recompute_changes_no_bit_even_with_dropout(run: Run) -> None:
    short = f"{DROPOUT} --train-iters 6 --lr-decay-iters 40 {PP2}"
    plain = run("plain", short)
    full = run("full", f"{short} --recompute-granularity full --recompute-method block --recompute-num-layers 2")
    selective = run("selective", f"{short} --recompute-granularity selective --recompute-modules core_attn layernorm")
    assert plain.steps() == full.steps() == selective.steps()
    assert plain.state() == full.state() == selective.state()


@pytest.mark.nightly
def test_both_expert_dispatchers_compute_the_same(run: Run) -> None:
    flags = f"{NO_DROPOUT} --train-iters 6 --lr-decay-iters 40 --num-experts 4 --expert-model-parallel-size 2"
    allgather = run("allgather", f"{flags} --disable-bias-linear --moe-token-dispatcher-type allgather")
    alltoall = run("alltoall", f"{flags} --disable-bias-linear --moe-token-dispatcher-type alltoall")
    assert alltoall.losses() == pytest.approx(allgather.losses(), rel=1e-6)


def test_the_batch_ramps_up_and_a_resume_goes_on_ramping(run: Run, tmp_path: Path) -> None:
    base = TINY.replace("--train-iters 40", "--train-samples 200").replace(
        "--lr-warmup-iters 4", "--lr-warmup-samples 8"
    )
    flags = f"{NO_DROPOUT} {PP2} --rampup-batch-size 2 2 60"
    straight = run("straight", f"{flags} --save {tmp_path / 'ck'} --save-interval 10", base=base)
    consumed = [record["consumed_samples"] for record in straight.records if record["kind"] == "step"]
    sizes = [later - earlier for earlier, later in zip([0, *consumed], consumed, strict=False)]
    assert sizes[0] == 2
    assert sizes[-1] == 8
    assert sizes == sorted(sizes)
    assert consumed[-1] <= 200 < consumed[-1] + 8
    resumed = run("resumed", f"{flags} --load {tmp_path / 'ck'} --ckpt-step 10", base=base)
    assert resumed.steps() == straight.steps()[10:]


def test_evaluation_changes_no_bit_of_training_and_goes_on_after_a_resume(run: Run, tmp_path: Path) -> None:
    flags = f"{DROPOUT} {PP2} --train-iters 12 --lr-decay-iters 40"
    evaluating = f"{flags} --eval-interval 3 --eval-iters 2"
    plain = run("plain", flags)
    straight = run("straight", f"{evaluating} --save {tmp_path / 'ck'} --save-interval 6")
    assert plain.steps() == straight.steps()
    assert plain.state() == straight.state()
    resumed = run("resumed", f"{evaluating} --load {tmp_path / 'ck'} --ckpt-step 6")
    assert resumed.steps() == straight.steps()[6:]

    def evaluations(result: JobResult) -> list[tuple[int, str, float]]:
        found = [r for r in result.records if r["kind"] == "evaluation"]
        return [(r["iteration"], r["split"], r["losses"]["lm loss"]) for r in found]

    assert evaluations(resumed) == [found for found in evaluations(straight) if found[0] > 6]
    assert len({loss for _, split, loss in evaluations(straight) if split == "validation"}) > 1


def test_tensorboard_and_the_log_line_have_what_megatron_users_read(run: Run, tmp_path: Path) -> None:
    board = tmp_path / "board"
    result = run(
        "run",
        f"{NO_DROPOUT} --train-iters 4 --lr-decay-iters 40 --log-interval 2 --tensorboard-dir {board} --log-throughput",
    )
    lines = [line for line in log_of(result, 1).splitlines() if " iteration " in line and "elapsed" in line]
    assert len(lines) == 2
    for text in (
        " | consumed samples:",
        " | learning rate: ",
        " | lm loss: ",
        " | grad norm: ",
        " | global batch size:",
    ):
        assert text in lines[0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4]


def test_an_exit_interval_saves_and_a_longer_run_goes_on(run: Run, tmp_path: Path) -> None:
    first = run("first", f"{NO_DROPOUT} --exit-interval 7 --save {tmp_path / 'ck'}")
    assert len(first.steps()) == 7
    assert "--exit-interval reached" in log_of(first, 1)
    second = run("second", f"{NO_DROPOUT} --load {tmp_path / 'ck'} --save {tmp_path / 'ck'}")
    assert [step[1] for step in second.steps()] == list(range(8, 41))
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "40"


def test_the_time_limit_saves_and_ends(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --train-iters 100000 --exit-duration-in-mins 0.03 --save {tmp_path / 'ck'}"
    result = run("run", flags)
    assert 0 < len(result.steps()) < 100000
    assert "--exit-duration-in-mins is over" in log_of(result, 1)
    (folder,) = (tmp_path / "ck").glob("iter_*")
    assert int(folder.name[5:]) == len(result.steps())


def test_a_damaged_checkpoint_is_passed_over_loudly(run: Run, tmp_path: Path) -> None:
    straight = run("straight", f"{NO_DROPOUT} --train-iters 12 --save {tmp_path / 'ck'} --save-interval 4")
    (damaged,) = (tmp_path / "ck").glob("iter_0000012/__0_0.distcp")
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size - 1)
    (tmp_path / "ck" / "iter_0000008" / ".metadata").unlink()
    resumed = run("resumed", f"{NO_DROPOUT} --train-iters 12 --load {tmp_path / 'ck'}")
    assert log_of(resumed, 1).count("WARNING: passed over a damaged checkpoint") == 2
    assert resumed.steps() == straight.steps()[4:]


def test_a_checkpoint_loads_into_another_layout_and_back(run: Run, tmp_path: Path) -> None:
    distributed = f"{NO_DROPOUT} --use-distributed-optimizer --lr-decay-iters 40"
    run("first", f"{distributed} {PP2} --train-iters 8 --save {tmp_path / 'a'}", world_size=4)
    there = (
        f"{distributed} --tensor-model-parallel-size 2 --train-iters 16 --load {tmp_path / 'a'} --save {tmp_path / 'b'}"
    )
    moved = run("moved", there, world_size=4)
    assert "another layout" in log_of(moved, 3)
    interleaved = f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --train-iters 24 --load {tmp_path / 'b'}"
    back = run("back", f"{distributed} {interleaved}", world_size=2)
    straight = run("straight", f"{distributed} --train-iters 24 --load {tmp_path / 'a'}", world_size=1)
    ours = [*moved.losses(), *back.losses()]
    assert ours == pytest.approx(straight.losses(), rel=1e-4)


def test_a_run_that_goes_back_keeps_the_later_checkpoints_aside(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --train-iters 12 --lr-decay-iters 40 --save {tmp_path / 'ck'} --save-interval 4"
    run("first", flags)
    back = f"{flags} --load {tmp_path / 'ck'}"
    returned = run("returned", f"{back} --ckpt-step 4 --exit-interval 8 --clip-grad 0.1")
    assert "kept aside" in log_of(returned, 0)
    assert sorted(path.name for path in (tmp_path / "ck").glob("*iter_*")) == [
        ".set-aside-iter_0000008",
        ".set-aside-iter_0000012",
        "iter_0000004",
        "iter_0000008",
    ]
    after = run("after", f"{back} --clip-grad 0.1")
    assert [step[1] for step in after.steps()] == [9, 10, 11, 12]
    straight = run("straight", f"{back} --ckpt-step 4 --clip-grad 0.1".replace(f"--save {tmp_path / 'ck'}", ""))
    assert after.steps() == straight.steps()[4:]


def test_a_finished_run_started_again_writes_nothing(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --train-iters 4 --lr-decay-iters 40 --save {tmp_path / 'ck'} --load {tmp_path / 'ck'}"
    run("first", flags)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ck").rglob("*")}
    run("again", f"{flags} --no-load-optim --no-save-optim")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ck").rglob("*")} == before


def test_sgd_resumes_with_its_momentum(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --optimizer sgd --lr 0.1 --train-iters 8 --lr-decay-iters 40"
    straight = run("straight", f"{flags} --save {tmp_path / 'ck'} --save-interval 4")
    resumed = run("resumed", f"{flags} --load {tmp_path / 'ck'} --ckpt-step 4")
    assert resumed.steps() == straight.steps()[4:]
    assert resumed.state() == straight.state()


def test_what_is_not_saved_is_not_asked_for(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --train-iters 4 --lr-decay-iters 40 --use-distributed-optimizer"
    first = run("first", f"{flags} --no-save-optim --no-save-rng --save {tmp_path / 'ck'}")
    refused = run("refused", f"{flags} --load {tmp_path / 'ck'}", ok=False)
    assert "holds no optimizer state" in log_of(refused, 0)
    longer = f"{flags} --train-iters 6 --load {tmp_path / 'ck'} --no-load-optim --no-load-rng"
    assert run("taken", longer).losses()[0] < first.losses()[0]


@pytest.mark.nightly
def test_shared_saving_and_reading_change_no_bit(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --train-iters 12 --lr-decay-iters 40 --use-distributed-optimizer {PP2}"
    saves = f"--save {tmp_path / 'ck'} --save-interval 4 --ckpt-assume-constant-structure --no-ckpt-fully-parallel-save"
    straight = run("straight", f"{flags} {saves}", world_size=4)
    for iteration in (4, 8):
        reads = f"--load {tmp_path / 'ck'} --ckpt-step {iteration} --ckpt-fully-parallel-load"
        resumed = run(f"resumed-{iteration}", f"{flags} {reads}", world_size=4)
        assert resumed.steps() == straight.steps()[iteration:]
        assert resumed.state() == straight.state()


def test_who_only_evaluates_needs_no_learning_rate(run: Run, tmp_path: Path) -> None:
    base = TINY.replace("--lr 3e-3 --min-lr 3e-4 ", "")
    run("first", f"{NO_DROPOUT} --train-iters 4 --lr-decay-iters 40 --save {tmp_path / 'ck'}")
    result = run("only", f"{NO_DROPOUT} --skip-train --eval-iters 2 --load {tmp_path / 'ck'}", base=base)
    assert [record["kind"] for record in result.records] == ["evaluation", "evaluation", "state"]
    assert "nothing was trained" in log_of(result, 1)


@pytest.mark.nightly
def test_the_norm_of_the_parameters_is_that_of_the_model_whatever_the_layout(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --use-distributed-optimizer --lr-decay-iters 40 --log-interval 1 --log-params-norm"
    overlap = "--overlap-grad-reduce --overlap-param-gather"
    run("first", f"{flags} --train-iters 2 --save {tmp_path / 'ck'} {PP2}", world_size=4)
    norms = []
    for name, layout, size in (
        ("single", "", 1),
        ("wide", f"--tensor-model-parallel-size 2 {PP2} {overlap}", 8),
    ):
        result = run(name, f"{flags} --train-iters 3 --load {tmp_path / 'ck'} {layout}", world_size=size)
        (line,) = [line for line in log_of(result, size - 1).splitlines() if "params norm" in line]
        norms.append(float(line.split("params norm:")[1].split("|")[0]))
    assert norms[0] == pytest.approx(norms[1], abs=2e-3)


def test_the_routers_losses_are_logged_the_same_in_any_layout(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
    run("first", f"{flags} --train-iters 2 --lr-decay-iters 40 --save {tmp_path / 'ck'} {PP2}")
    found = []
    for name, layout, size in (("single", "", 1), ("spread", f"{PP2} --expert-model-parallel-size 2", 4)):
        result = run(
            name, f"{flags} --train-iters 4 --lr-decay-iters 40 --load {tmp_path / 'ck'} {layout}", world_size=size
        )
        found.append([record["losses"] for record in result.records if record["kind"] == "step"])
    for single, spread in zip(*found, strict=True):
        assert set(single) == {"lm loss", "load_balancing_loss", "z_loss"}
        assert spread == pytest.approx(single, rel=1e-4)


def test_data_that_would_end_too_early_is_refused(run: Run, tmp_path: Path) -> None:
    from megatron.training.indexed_writer import IndexedWriter

    for name in ("a", "b"):
        with IndexedWriter(tmp_path / f"{name}.bin", tmp_path / f"{name}.idx", "uint16") as writer:
            for document in range(10):
                writer.add_document([(document + token) % 255 for token in range(80)])
    base = TINY.replace("--mock-data ", "")
    flags = f"{NO_DROPOUT} --data-path {tmp_path / 'a'} {tmp_path / 'b'} --data-cache-path {tmp_path / 'cache'}"
    refused = run("refused", flags, base=base, ok=False)
    assert set(refused.exit_codes) == {2}
    assert "samples, the run wants 320" in log_of(refused, 0)
    assert "leaves no document for test" in log_of(
        run("taken", f"{flags} --train-iters 2 --lr-decay-iters 40", base=base), 1
    )


def test_a_small_validation_set_is_read_again_and_again(run: Run) -> None:
    base = TINY.replace("--eval-iters 0", "--eval-iters 3 --eval-interval 1")
    result = run("run", f"{NO_DROPOUT} --train-iters 4 --lr-decay-iters 40", base=base)
    assert len([record for record in result.records if record["kind"] == "evaluation"]) == 6


def test_finetuning_takes_the_weights_alone(run: Run, tmp_path: Path) -> None:
    first = run("first", f"{NO_DROPOUT} --train-iters 12 --save {tmp_path / 'ck'} --bf16 --use-distributed-optimizer")
    tuned = run("tuned", f"{NO_DROPOUT} --train-iters 3 --load {tmp_path / 'ck'} --finetune --bf16 --lr-warmup-iters 0")
    assert [step[1] for step in tuned.steps()] == [1, 2, 3]
    assert tuned.losses()[0] < first.losses()[0] - 0.3


def test_weights_whose_gathering_was_put_off_are_saved_whole(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --train-iters 6 --lr-decay-iters 40 --use-distributed-optimizer"
    overlap = "--overlap-grad-reduce --overlap-param-gather"
    for name, more in (("plain", ""), ("overlap", overlap)):
        run(name, f"{flags} {more} --save {tmp_path / name}-ck")
    # Only the weights are loaded: the optimizer's own copy would hide a stale one.
    tuned = [run(f"{name}-tuned", f"{flags} --load {tmp_path / name}-ck --finetune") for name in ("plain", "overlap")]
    assert tuned[0].steps() == tuned[1].steps()


def test_the_shape_of_the_model_can_come_from_the_checkpoint(run: Run, tmp_path: Path) -> None:
    run("first", f"{NO_DROPOUT} --train-iters 4 --lr-decay-iters 40 --swiglu --save {tmp_path / 'ck'}")
    flags = f"{NO_DROPOUT} --train-iters 6 --lr-decay-iters 40 --load {tmp_path / 'ck'}"
    refused = run("refused", flags, ok=False)
    assert set(refused.exit_codes) == {2}
    assert "is of another model" in log_of(refused, 0)
    assert len(run("taken", f"{flags} --use-checkpoint-args").steps()) == 2


def test_a_cyclic_loader_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --dataloader-type cyclic --train-iters 12"
    straight = run("straight", f"{flags} --save {tmp_path / 'ck'} --save-interval 6")
    resumed = run("resumed", f"{flags} --load {tmp_path / 'ck'} --ckpt-step 6")
    assert resumed.steps() == straight.steps()[6:]


def test_worker_processes_that_load_data_change_no_bit(run: Run) -> None:
    flags = f"{DROPOUT} --train-iters 5 --lr-decay-iters 40"
    none, some = run("none", flags), run("some", f"{flags} --num-workers 1")
    assert none.steps() == some.steps()
    assert none.state() == some.state()


def test_an_overflowing_loss_scale_skips_and_halves(run: Run) -> None:
    result = run("run", f"{NO_DROPOUT} --fp16 --hysteresis 1 --train-iters 24")
    steps = [record for record in result.records if record["kind"] == "step"]
    assert steps[0]["skipped"]
    assert steps[1]["loss_scale"] < steps[0]["loss_scale"] == 2.0**31
    assert any(not step["skipped"] for step in steps)


def test_a_resume_goes_on_with_the_loss_scale_it_had(run: Run, tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --fp16 --hysteresis 1 --loss-scale-window 3 --use-distributed-optimizer --train-iters 30"
    straight = run("straight", f"{flags} --save {tmp_path / 'ck'} --save-interval 17")
    assert len({step[4] for step in straight.steps()}) > 3
    resumed = run("resumed", f"{flags} --load {tmp_path / 'ck'} --ckpt-step 17")
    assert resumed.steps() == straight.steps()[17:]
    assert resumed.state() == straight.state()


@pytest.mark.nightly
def test_experts_load_into_a_layout_without_expert_parallelism_and_back(run: Run, tmp_path: Path) -> None:
    moe = f"{NO_DROPOUT} --num-experts 4 --disable-bias-linear --lr-decay-iters 40 --use-distributed-optimizer"
    spread = "--expert-model-parallel-size 2"
    run("first", f"{moe} {spread} --train-iters 6 --save {tmp_path / 'a'}")
    there = run("there", f"{moe} {spread} --train-iters 12 --load {tmp_path / 'a'}")
    single_flags = f"{moe} --train-iters 12 --load {tmp_path / 'a'} --save {tmp_path / 'b'}"
    single = run("single", single_flags, world_size=1)
    assert single.losses() == pytest.approx(there.losses(), rel=1e-4)
    back = run("back", f"{moe} {spread} --train-iters 16 --load {tmp_path / 'b'}")
    straight = run("straight", f"{moe} --train-iters 16 --load {tmp_path / 'b'}", world_size=1)
    assert back.losses() == pytest.approx(straight.losses(), rel=1e-4)


def test_real_text_in_a_blend_trains_and_skips_nothing(run: Run, tmp_path: Path) -> None:
    from megatron.training.indexed_writer import IndexedWriter

    for name, offset in (("a", 0), ("b", 100)):
        with IndexedWriter(tmp_path / f"{name}.bin", tmp_path / f"{name}.idx", "uint16") as writer:
            for document in range(60):
                writer.add_document([(offset + document + 3 * token) % 255 for token in range(80)])
    flags = (
        f"--data-path 0.7 {tmp_path / 'a'} 0.3 {tmp_path / 'b'} --split 80,10,10 --data-cache-path {tmp_path / 'cache'}"
    )
    base = TINY.replace("--mock-data ", "")
    result = run("run", f"{NO_DROPOUT} {PP2} {flags}", base=base, world_size=4)
    again = run("again", f"{NO_DROPOUT} {PP2} {flags}", base=base, world_size=4)
    assert result.steps() == again.steps()
    assert result.losses()[-1] < 0.8 * result.losses()[0]


def test_every_metrics_line_is_json_with_its_kind(run: Run) -> None:
    result = run("run", f"{NO_DROPOUT} --train-iters 2 --lr-decay-iters 40 --eval-interval 1 --eval-iters 1")
    text = (result.folder / "metrics.jsonl").read_text()
    kinds = [json.loads(line)["kind"] for line in text.splitlines()]
    assert kinds.count("step") == 2
    assert kinds[-1] == "state"
    assert "evaluation" in kinds
