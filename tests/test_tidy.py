"""The house's rules, held by a test: what goes where, how long things may be, and that everything has its test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 50

# Where the environment and the wall clock may be read, and why.
MAY_READ_ENVIRONMENT = {
    "megatron/training/environment.py": "the trainer's one place",
    "megatron/resilience/agent/environment.py": "the launcher's one place",
    "trainmover_ext/settings.py": "the data plane's one place",
    "setup.py": "the build's",
    "scripts/prepare_data.py": "sets the tokenizer library's number of threads",
}
MAY_READ_WALL_CLOCK = {
    "megatron/training/reporting.py": "Megatron-LM's log line begins with the time",
    "megatron/resilience/cli/run.py": "names the log folder",
    "megatron/resilience/agent/main.py": "numbers the starts of a machine's agent",
    "megatron/resilience/agent/driven_run.py": "lines of a job and records of its ranks are put in one order",
    "megatron/resilience/baselines/checkpoint_restart.py": "the same",
    "megatron/resilience/controller/shell.py": "the journal's times mean something after a restart",
}

# Sources whose test is not the file of the same name under tests/unit, because only a whole job shows them.
TESTED_ELSEWHERE = {
    "pretrain_gpt.py": "tests/distributed/test_bit_equality.py",
    "megatron/training/checkpointing.py": "tests/distributed/test_features.py",
    "megatron/training/data.py": "tests/distributed/test_features.py",
    "megatron/training/initialize.py": "tests/distributed/test_bit_equality.py",
    "megatron/training/loop.py": "tests/distributed/test_features.py",
    "megatron/training/moe_losses.py": "tests/distributed/test_features.py",
    "megatron/training/parameter_norm.py": "tests/distributed/test_features.py",
    "megatron/training/joining.py": "tests/distributed/test_state_transfer.py",
    "megatron/training/model_setup.py": "tests/distributed/test_bit_equality.py",
    "megatron/training/preload.py": "tests/unit/resilience/patches/test_registry.py",
    "megatron/training/pretrain.py": "tests/distributed/test_bit_equality.py",
    "megatron/training/switching.py": "tests/distributed/test_prove_planned.py",
    "megatron/training/config/model.py": "tests/unit/training/config/test_flag.py",
    "megatron/training/config/parallelism.py": "tests/unit/training/config/test_flag.py",
    "megatron/training/config/storage.py": "tests/unit/training/config/test_flag.py",
    "megatron/training/config/training.py": "tests/unit/training/config/test_flag.py",
    "megatron/resilience/agent/agent.py": "tests/functional/test_control_plane.py",
    "megatron/resilience/agent/agent_config.py": "tests/functional/test_control_plane.py",
    "megatron/resilience/agent/controller_line.py": "tests/functional/test_control_plane.py",
    "megatron/resilience/agent/main.py": "tests/functional/test_control_plane.py",
    "megatron/resilience/agent/output.py": "tests/functional/test_run_launcher.py",
    "megatron/resilience/agent/rank_socket.py": "tests/unit/resilience/worker/test_agent_link.py",
    "megatron/resilience/agent/rank_start.py": "tests/functional/test_run_launcher.py",
    "megatron/resilience/agent/rank_watch.py": "tests/functional/test_run_launcher.py",
    "megatron/resilience/agent/spawner.py": "tests/functional/test_run_launcher.py",
    "megatron/resilience/agent/spawner_child.py": "tests/functional/test_control_plane.py",
    "megatron/resilience/baselines/interruption.py": "tests/unit/resilience/baselines/test_checkpoint_restart.py",
    "megatron/resilience/cli/job.py": "tests/functional/test_run_launcher.py",
    "megatron/resilience/cli/machine.py": "tests/functional/test_run_launcher.py",
    "megatron/resilience/cli/main.py": "tests/functional/test_run_launcher.py",
    "megatron/resilience/state/data_parallel_flags.py": "tests/unit/resilience/state/test_small_state.py",
    "megatron/resilience/worker/errors.py": "tests/unit/resilience/worker/test_rank_worker.py",
    "megatron/resilience/state/errors.py": "tests/unit/resilience/state/test_state_client.py",
    "megatron/resilience/state/state_session.py": "tests/unit/resilience/state/test_state_server.py",
    "megatron/resilience/cli/resilience_flags.py": "tests/unit/resilience/cli/test_run.py",
    "megatron/resilience/cli/run_resilient.py": "tests/functional/test_run_resilient.py",
    "megatron/resilience/cli/tls_flags.py": "tests/unit/resilience/cli/test_run.py",
    "megatron/resilience/cli/usage.py": "tests/unit/resilience/cli/test_run.py",
    "megatron/resilience/cli/user.py": "tests/unit/resilience/cli/test_run.py",
    "megatron/resilience/proof/commands.py": "tests/distributed/test_prove_planned.py",
    "megatron/resilience/proof/planned.py": "tests/distributed/test_prove_planned.py",
    "megatron/resilience/controller/server.py": "tests/functional/test_control_plane.py",
    "megatron/resilience/protocol/agent_messages.py": "tests/unit/resilience/protocol/test_messages.py",
    "megatron/resilience/protocol/controller_words.py": "tests/unit/resilience/protocol/test_controller_core.py",
    "megatron/resilience/protocol/message.py": "tests/unit/resilience/protocol/test_messages.py",
    "megatron/resilience/protocol/rank_messages.py": "tests/unit/resilience/protocol/test_messages.py",
    "megatron/resilience/protocol/user_messages.py": "tests/unit/resilience/protocol/test_messages.py",
    "trainmover_ext/communicator.py": "tests/unit/trainmover_ext/test_backend_operations.py",
    "trainmover_ext/endpoints.py": "tests/unit/trainmover_ext/test_isolated.py",
    "trainmover_ext/switching.py": "tests/distributed/test_prove_planned.py",
    "trainmover_ext/rendezvous.py": "tests/unit/trainmover_ext/test_backend_operations.py",
    "benchmarks/resilience_idle_job.py": "tests/unit/benchmarks/test_resilience_idle_bench.py",
}


# All that the protocol may reach beside itself: nothing of it does anything.
PURE_MODULES = frozenset(
    {"__future__", "collections", "collections.abc", "dataclasses", "enum", "itertools", "msgspec", "re", "typing"}
)
IMPURE_BUILTINS = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input", "open", "print"})
PROTOCOL = "megatron.resilience.protocol"


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks or would track, matching `patterns`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sources() -> list[Path]:
    """Python files that are not tests."""
    return [path for path in tracked("*.py") if not name_of(path).startswith("tests/")]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_megatron_stays_a_namespace_beside_the_packages_core() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists(), "it would hide megatron.core"


def test_megatron_training_is_ours_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import megatron.training; print(megatron.training.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == ROOT / "megatron" / "training" / "__init__.py"


@pytest.mark.parametrize("path", tracked("*.py"), ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= FILE_LINES_MAX or name_of(path).startswith("tests/functional/"), f"{lines} lines: split it"
    for function in functions(path):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length <= FUNCTION_LINES_MAX, f"{function.name} has {length} lines"


@pytest.mark.parametrize("path", tracked("*.cc", "*.h"), ids=name_of)
def test_cpp_files_are_short_and_open_with_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES_MAX
    if path.suffix == ".h":
        assert text.startswith("// "), "a header begins with a paragraph: what it is, who calls it"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_sources_open_with_what_they_are(path: Path) -> None:
    document = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert document, "a module begins with a paragraph: what it is, who calls it"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_environment_and_wall_clock_are_read_in_their_places(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if name_of(path) not in MAY_READ_ENVIRONMENT:
        assert not re.search(r"os\.(environ|getenv)\b", text), "read it in environment.py"
    if name_of(path) not in MAY_READ_WALL_CLOCK:
        assert not re.search(r"time\.time\(|datetime\.(now|utcnow|today)\(", text), (
            "pass a clock, or use the monotonic one"
        )


def impurities(tree: ast.Module) -> list[str]:
    """What a module of the protocol may not name."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case ast.ImportFrom(module=module, level=level):
                imported = ["." * level + (module or "")]
            case ast.Name(id=name) if name in IMPURE_BUILTINS:
                found.append(name)
                continue
            case _:
                continue
        found += [name for name in imported if name not in PURE_MODULES and not f"{name}.".startswith(f"{PROTOCOL}.")]
    return found


@pytest.mark.parametrize("path", tracked("megatron/resilience/protocol/*.py"), ids=name_of)
def test_the_protocol_is_pure(path: Path) -> None:
    assert impurities(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import time", "time"),
        ("def f():\n    from os import path", "os"),
        ("import re, urllib.request", "urllib.request"),
        ("from . import x", "."),
        ("from megatron.resilience.protocols import x", "megatron.resilience.protocols"),
        ("def f():\n    say = print", "print"),
        ("eval('1')", "eval"),
    ],
)
def test_what_is_not_pure_is_seen(source: str, named: str) -> None:
    assert impurities(ast.parse(source)) == [named]


def test_nothing_pure_is_named_that_the_protocol_does_not_use() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in tracked("megatron/resilience/protocol/*.py"))
    used = set(re.findall(r"^\s*(?:from|import) ([\w.]+)", text, flags=re.MULTILINE))
    assert used >= PURE_MODULES


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_every_source_has_its_test(path: Path) -> None:
    name = name_of(path)
    if path.name == "__init__.py" or name == "setup.py":
        return
    elsewhere = TESTED_ELSEWHERE.get(name)
    if elsewhere:
        assert (ROOT / elsewhere).is_file()
        return
    mirrored = Path(name.removeprefix("megatron/")).parent / f"test_{path.name}"
    assert (ROOT / "tests" / "unit" / mirrored).is_file(), f"tests/unit/{mirrored} is missing"


def test_every_patch_is_taken_out_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in tracked("tests/unit/resilience/patches/*.py"))
    patches = "".join(path.read_text(encoding="utf-8") for path in tracked("megatron/resilience/patches/*.py"))
    names = re.findall(r'^        name="([a-z0-9-]+)"', patches, flags=re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if f'"{name}"' not in tests] == []


def test_no_exception_to_the_rules_is_out_of_date() -> None:
    names = {name_of(path) for path in sources()}
    for table in (MAY_READ_ENVIRONMENT, MAY_READ_WALL_CLOCK, TESTED_ELSEWHERE):
        assert set(table) <= names, set(table) - names


@pytest.mark.parametrize("path", tracked("*.py", "*.md", "*.sh", "*.toml", "*.cc", "*.h", "Makefile"), ids=name_of)
def test_nothing_unfinished_or_of_one_machine_is_committed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b", text)
    assert not re.search(r"(?<![\w.$}/])/(root|home)/\w", text), "a path of one machine"


@pytest.mark.parametrize("path", tracked("tests/*.py"), ids=name_of)
def test_tests_assert_something(path: Path) -> None:
    checks = re.compile(r"Assert|raises|assert_|check_|verify|expect|warns")
    for function in functions(path):
        if function.name.startswith("test_"):
            assert checks.search(ast.dump(function)), f"{function.name} asserts nothing that can be seen"
