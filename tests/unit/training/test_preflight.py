"""Claims about the check before the start: one line, exit code 2, nothing written, no torch; most by a real process."""

import json
import os
import resource
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import pretrain_gpt
from megatron.training import checkpoint_files
from megatron.training.checkpoint_facts import facts_of
from megatron.training.config import SettingsError
from megatron.training.data_files import parse_split
from megatron.training.environment import cuda_may_be_there
from megatron.training.indexed_writer import IndexedWriter
from megatron.training.layout import Plan
from megatron.training.megatron_flags import MEGATRON_FLAGS
from megatron.training.preflight import plan_run, preflight_main

SCRIPT = Path(pretrain_gpt.__file__)
CPU_S_MAX = 1.5

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64"
RUN = "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3"
BASE = f"{MODEL} {RUN} --tokenizer-type NullTokenizer --vocab-size 100"
MOCK = f"{BASE} --mock-data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int
    stderr: list[str]
    cpu_s: float


@pytest.fixture(autouse=True)
def _in_a_folder_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")


def write_data(prefix: Path) -> None:
    with IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), "uint16") as writer:
        for start in range(5):
            writer.add_document(list(range(start, start + 80)))


def write_tokenizers() -> None:
    """GPT-2's two files and a tokenizer.json, in the current folder."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    Path("vocab.json").write_text(json.dumps(vocabulary))
    Path("merges.txt").write_text("#version: 0.2\n")
    tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save("tokenizer.json")


def plan(flags: str, *, world_size: int = 1, on_cuda: bool = False) -> Plan:
    return plan_run(shlex.split(flags), world_size=world_size, on_cuda=on_cuda)[0]


def save_checkpoint(root: Path, flags: str = MOCK) -> Path:
    (checkpoint_files.begin(root, 20) / "__0_0.distcp").write_text("weights")
    facts = facts_of(plan(flags), consumed_train_samples=160)
    checkpoint_files.finish(root, 20, facts)
    return checkpoint_files.folder_of(root, 20)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def preflight(flags: str, *, world_size: int | str = 1) -> Outcome:
    """Runs the script as the launcher does, and checks that it wrote nothing."""
    before, used = contents(Path.cwd()), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *shlex.split(flags), "--preflight-only"],
        env={**os.environ, "WORLD_SIZE": str(world_size)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert contents(Path.cwd()) == before
    assert result.stdout == ""
    cpu_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return Outcome(code=result.returncode, stderr=result.stderr.splitlines(), cpu_s=cpu_s)


CASES: dict[str, tuple[str, int | str, str]] = {
    "a world size that does not divide": (
        f"{MOCK} --tensor-model-parallel-size 2",
        3,
        "found 3 ranks, expected a mult",
    ),
    "a world size that is no number": (MOCK, "many", "environment variable WORLD_SIZE is 'many'"),
    "no ranks": (MOCK, 0, "environment variable WORLD_SIZE is '0'"),
    "layers that do not divide": (f"{MOCK} --pipeline-model-parallel-size 3", 3, "does not divide into 3 stages"),
    "missing data": (f"{BASE} --data-path absent/data", 1, "no dataset at absent/data"),
    "truncated data": (f"{BASE} --data-path short", 1, "short.bin is too short"),
    "a truncated index": (f"{BASE} --valid-data-path cut --train-data-path data", 1, "cut.idx is cut off"),
    "a nonsense split": (f"{BASE} --data-path data --split 1:x", 1, "--split '1:x'"),
    "no tokenizer": (f"{MODEL} {RUN} --data-path data", 1, "needs --vocab-file and --merge-file"),
    "an absent tokenizer": (
        f"{MODEL} {RUN} --data-path data --tokenizer-type HuggingFaceTokenizer --tokenizer-model absent",
        1,
        "--tokenizer-model absent: No such file",
    ),
    "an unknown flag": (f"{MOCK} --num-layer 4", 1, "found unknown flag --num-layer; did you mean --num-layers?"),
    "a refused flag": (
        f"{MOCK} --fp8-format hybrid",
        1,
        "found --fp8-format, which is refused: fp8 is not implemented",
    ),
    "a file in the way of --save": (f"{MOCK} --save file/below", 1, "--save file/below: file is not a folder"),
    "a folder in /proc": (f"{MOCK} --save /proc/checkpoints", 1, "/proc is not writable"),
    "a file for TensorBoard": (f"{MOCK} --tensorboard-dir file", 1, "--tensorboard-dir file: file is not a folder"),
    "a folder for the metrics": (f"{MOCK} --metrics-file saved", 1, "--metrics-file saved is a folder"),
    "a name too long": (f"{MOCK} --data-cache-path {'x' * 300}", 1, "File name too long"),
    "another model's checkpoint": (f"{MOCK} --load saved --num-layers 8", 1, "saved/iter_0000020 is of another model"),
    "another vocabulary's checkpoint": (f"{MOCK} --load saved --vocab-size 500", 1, "is of another vocabulary"),
    "a checkpoint in the way": (f"{MOCK} --save saved", 1, "--save saved already holds checkpoints"),
    "a checkpoint in the way of another": (f"{MOCK} --save saved --load absent", 1, "already holds checkpoints"),
    "finetuning onto itself": (f"{MOCK} --save saved --load saved --finetune", 1, "--finetune starts again"),
    "an absent --ckpt-step": (f"{MOCK} --load saved --ckpt-step 10", 1, "not there; give another --ckpt-step"),
    "a file for --load": (f"{MOCK} --load file", 1, "Not a directory; give a folder of checkpoints"),
    "no checkpoint where one is asked for": (f"{MOCK} --load absent --exit-on-missing-checkpoint", 1, "asks for one"),
    "a damaged checkpoint alone": (f"{MOCK} --load damaged", 1, "no whole checkpoint in damaged"),
    "a damaged checkpoint's shape": (f"{MOCK} --load damaged --use-checkpoint-args", 1, "no whole checkpoint"),
    "a shape from nowhere": (f"{MOCK} --use-checkpoint-args", 1, "--use-checkpoint-args needs --load"),
    "missing flags": (f"{RUN} --mock-data", 1, "required and not given: --num-layers, --hidden-size"),
    "two precisions": (f"{MOCK} --fp16 --bf16", 1, "found --fp16 and --bf16"),
    "bad YAML": (f"{MOCK} --yaml-cfg bad.yaml", 1, "--yaml-cfg bad.yaml: not YAML"),
    "an unpaddable vocabulary": (f"{MOCK} --make-vocab-size-divisible-by 0", 1, "expected at least 1"),
}
BY_PROCESS = (
    *("a world size that does not divide", "layers that do not divide", "truncated data", "an unknown flag"),
    *("a file in the way of --save", "another model's checkpoint", "a checkpoint in the way", "missing flags"),
    *("two precisions", "bad YAML", "missing data"),
)


def prepare_cases() -> None:
    for name in ("data", "short", "cut"):
        write_data(Path(name))
    os.truncate("short.bin", 100)
    os.truncate("cut.idx", 60)
    Path("file").write_text("")
    Path("bad.yaml").write_text("a: [1")
    save_checkpoint(Path("saved"))
    (save_checkpoint(Path("damaged")) / "__0_0.distcp").unlink()


@pytest.mark.parametrize("case", BY_PROCESS)
def test_what_is_wrong_is_one_line_and_exit_code_2(case: str) -> None:
    flags, world_size, expected = CASES[case]
    prepare_cases()
    outcome = preflight(flags, world_size=world_size)
    (line,) = outcome.stderr
    assert outcome.code == 2
    assert line.startswith("pretrain_gpt.py: error: ")
    assert expected in line
    assert outcome.cpu_s < CPU_S_MAX


@pytest.mark.parametrize("case", CASES)
def test_every_mistake_is_found(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags, world_size, expected = CASES[case]
    prepare_cases()
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    before = contents(Path.cwd())
    assert preflight_main([*shlex.split(flags), "--preflight-only"]) == 2
    assert contents(Path.cwd()) == before
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert expected in printed.err


def test_a_run_that_can_start_is_silent_and_writes_nothing() -> None:
    prepare_cases()
    written = "--save new/folder --load new/folder --tensorboard-dir logs --metrics-file m.jsonl"
    flags = f"{BASE} --data-path data --split 60,20,20 {written}"
    outcome = preflight(flags)
    assert (outcome.code, outcome.stderr) == (0, [])
    assert outcome.cpu_s < CPU_S_MAX


def test_a_split_that_leaves_a_part_empty_has_none_of_it() -> None:
    write_data(Path("data"))
    found, lines = plan_run(shlex.split(f"{BASE} --data-path data --split 80,19,1"), world_size=1, on_cuda=False)
    assert [share > 0 for share in parse_split(found.settings.data.split or "")] == [True, True, False]
    assert lines == ("--split 80,19,1 leaves no document for test: there will be none",)
    assert "without one to train on" in preflight(f"{BASE} --data-path data --split 1,99").stderr[0]


def test_an_uneven_split_that_is_named_is_taken() -> None:
    uneven = "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2"
    assert preflight(f"{MOCK} {uneven}", world_size=3).code == 0


def test_warnings_do_not_stop_a_run() -> None:
    outcome = preflight(f"{MOCK} --wandb-project x --distributed-backend nccl")
    assert outcome.code == 0
    assert outcome.stderr == [
        "warning: --wandb-project is ignored: goes to Weights & Biases",
        "warning: --distributed-backend nccl needs CUDA: trainmover is used",
    ]


def test_flags_win_over_the_yaml_file() -> None:
    Path("run.yaml").write_text("num_layers: 3\npipeline_model_parallel_size: 2\nbf16: true\n")
    assert (
        "--num-layers 3 does not divide"
        in preflight(f"{MOCK.replace('--num-layers 4', '')} --yaml-cfg run.yaml", world_size=2).stderr[0]
    )
    assert preflight(f"--yaml-cfg run.yaml {MOCK}", world_size=2).code == 0


def test_torch_and_megatron_core_are_not_imported() -> None:
    prepare_cases()
    write_tokenizers()
    files = "--data-path data --split 60,20,20 --vocab-file vocab.json --merge-file merges.txt"
    flags = f"{MODEL} {RUN} {files} --save new --load absent"
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import pretrain_gpt; code = pretrain_gpt.main(sys.argv[1:]);"
        "print(code, sorted({'torch', 'megatron.core', 'transformer_engine', 'triton'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(SCRIPT.parent), *shlex.split(flags), "--preflight-only"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.stdout, result.stderr) == ("0 []\n", "")


def test_help_is_printed_without_the_required_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight_main(["--help"]) == 0
    assert "--num-layers" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_passed_over_with_a_warning() -> None:
    save_checkpoint(Path("saved"))
    folder = checkpoint_files.begin(Path("saved"), 30)
    folder.rename(checkpoint_files.folder_of(Path("saved"), 30))
    _, lines = plan_run(shlex.split(f"{MOCK} --load saved --save saved"), world_size=1, on_cuda=False)
    (line,) = lines
    assert line.startswith("passed over a damaged checkpoint: saved/iter_0000030: has no trainmover_manifest.json")


@pytest.mark.parametrize(
    "flags", ["--save saved", "--save saved --load saved --finetune", "--load absent --exit-on-missing-checkpoint"]
)
def test_a_rank_that_joins_takes_the_jobs_checkpoints_for_what_they_are(flags: str) -> None:
    save_checkpoint(Path("saved"))
    argv = shlex.split(f"{MOCK} {flags}")
    with pytest.raises(SettingsError):
        plan_run(argv, world_size=1, on_cuda=False)
    plan, lines = plan_run(argv, world_size=1, on_cuda=False, joins=True)
    assert (plan.world_size, lines) == (1, ())


def test_the_shape_of_a_checkpoint_needs_no_flags() -> None:
    save_checkpoint(Path("saved"))
    flags = f"{RUN} --seq-length 64 --tokenizer-type NullTokenizer --vocab-size 100 --mock-data --load saved"
    assert plan(f"{flags} --use-checkpoint-args").settings.model.num_layers == 4


def test_data_whose_indices_cannot_be_written_asks_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(Path("data"))
    monkeypatch.setattr("megatron.training.preflight._is_read_only", lambda folder: folder == Path())
    with pytest.raises(SettingsError, match=r"the cache of data: \. is not writable; give --data-cache-path"):
        plan(f"{BASE} --data-path data")
    Path("cache").mkdir()
    assert plan(f"{BASE} --data-path data --data-cache-path cache")
    Path("data/cache").mkdir(parents=True)
    assert plan(f"{BASE} --data-path data")


@pytest.mark.parametrize("value", ["", "-1", " "])
def test_a_hidden_device_is_not_there(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert not cuda_may_be_there()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cuda_may_be_there()


GPT3 = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
--fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path data --vocab-file vocab.json
--merge-file merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save saved
--load saved --eval-iters 10 --tensorboard-dir logs"""

MIXTRAL = """--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --data-path data --split 99990,8,2
--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
--use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval 1000
--eval-iters 10 --save saved --load saved --tensorboard-dir logs --no-load-optim --no-load-rng --wandb-project mixtral
--wandb-exp-name mixtral"""

LLAMA3 = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --init-method-std 0.0134 --attention-backend fused --untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --cross-entropy-loss-fusion --manual-gc --exit-duration-in-mins 235
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --context-parallel-size 1 --mock-data
--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
--eval-interval 100 --save-interval 1000 --log-throughput --ckpt-format torch_dist --distributed-timeout-minutes 60
--save saved --load saved --tensorboard-dir logs --empty-unused-memory-level 1 --profile --profile-step-start 4
--profile-step-end 6"""


@pytest.mark.parametrize(
    ("command", "world_size", "ignored"),
    [
        (GPT3, 128, []),
        (GPT3, 2048, []),
        (MIXTRAL, 32, ["--wandb-project", "--wandb-exp-name"]),
        (MIXTRAL, 128, ["--wandb-project", "--wandb-exp-name"]),
        (
            LLAMA3,
            8,
            ["--empty-unused-memory-level", "--profile", "--profile-step-start", "--profile-step-end"],
        ),
    ],
    ids=["gpt3 on 128", "gpt3 on 2048", "mixtral on 32", "mixtral on 128", "llama3 on 8"],
)
def test_a_launch_of_megatrons_examples_is_taken(command: str, world_size: int, ignored: list[str]) -> None:
    write_data(Path("data"))
    write_tokenizers()
    _, lines = plan_run(shlex.split(command), world_size=world_size, on_cuda=True)
    about_flags = [line for line in lines if not line.startswith("--split")]  # these tiny data leave no validation
    assert about_flags == [f"{name} is ignored: {MEGATRON_FLAGS[name].reason}" for name in ignored]


def test_the_examples_mean_what_they_mean_in_megatron() -> None:
    write_data(Path("data"))
    write_tokenizers()
    gpt3 = plan(GPT3, world_size=256, on_cuda=True)
    assert (gpt3.data_parallel_size, gpt3.precision, gpt3.settings.data.tokenizer_type) == (
        2,
        "fp16",
        "GPT2BPETokenizer",
    )
    assert (gpt3.settings.model.kv_channels, gpt3.settings.model.ffn_hidden_size) == (128, 49152)
    mixtral = plan(MIXTRAL, world_size=32, on_cuda=True)
    assert mixtral.settings.model.position_embedding_type == "rope"
    assert (mixtral.moe_layer_pattern, mixtral.data_parallel_size) == ((1,) * 32, 8)
    llama3 = plan(LLAMA3, world_size=8, on_cuda=True)
    assert llama3.train_iters == 1953125000 // 128
