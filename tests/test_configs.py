"""Every gin file that the project ships, by the launcher's own strictness: nothing is misspelt."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

from speculative import main as main_module
from speculative.models.config import T5Config, parameter_count

ROOT = pathlib.Path(main_module.__file__).resolve().parent.parent
FILES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("configs/**/*.gin"))
EVALUATE = "configs/runs/evaluate.gin"
VALUES = {
    "MIXTURE_OR_TASK_NAME": "'kjv_to_web'",
    "TASK_FEATURE_LENGTHS": "{'inputs': 32, 'targets': 32}",
}  # Of other required macros: a string.


def of(kind: str) -> list[str]:
    return [f for f in FILES if f.startswith(f"configs/{kind}/")]


def text_of(file: str) -> str:
    return (ROOT / file).read_text()


@pytest.fixture
def dry_run(monkeypatch, capsys):
    """From flags to (exit code, stdout, stderr) of a dry run of the mode that a run file is for."""
    monkeypatch.chdir(ROOT)

    def run(run_file: str, *flags: str) -> tuple[int, str, str]:
        mode = re.search(r"^from speculative\.runs import (\w+)$", text_of(run_file), re.M)
        assert mode, f"{run_file} imports no run"
        given = [f"--run_mode={mode[1]}", f"--gin_file={run_file}", *flags, "--dry_run"]
        code = main_module.main(given)
        return code, *capsys.readouterr()

    return run


def missing(answer: tuple[int, str, str]) -> list[str]:
    """The macros that a dry run asks for."""
    code, _, said = answer
    found = re.match(r"error: Required and not set: ([\w, ]+)\.", said)
    assert found or code == 0, said
    return found[1].split(", ") if found else []


def given(names: list[str]) -> list[str]:
    return [f"--gin.{name}={VALUES.get(name, repr('some/where'))}" for name in names]


def assert_runs(dry_run, run_file: str, *flags: str) -> str:
    """The configuration, once every macro that is asked for is given."""
    more = given(missing(dry_run(run_file, *flags)))
    code, out, said = dry_run(run_file, *flags, *more)
    assert (code, said) == (0, ""), said
    return out


def header(file: str) -> str:
    """The comment at the top of a file."""
    lines = []
    for line in text_of(file).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    return "\n".join(lines)


def test_every_file_is_of_a_kind_that_is_tested_here():
    kinds = ("decoding", "models", "pairs", "runs", "tasks")
    assert sorted(file for kind in kinds for file in of(kind)) == FILES
    assert all(of(kind) for kind in ("models", "pairs", "runs", "tasks"))


@pytest.mark.parametrize("file", FILES)
def test_a_header_says_what_it_is_for(file):
    assert len(header(file)) > 20
    assert "from __gin__ import dynamic_registration" in text_of(file)


@pytest.mark.parametrize("file", of("runs"))
def test_run_file(dry_run, file):
    required = missing(dry_run(file))
    assert_runs(dry_run, file)
    _, found, named = header(file).partition("Required macros:")
    assert found or not required, f"{file} does not name {required}"
    named = named.split("\n\n")[0]
    assert set(required) <= set(re.findall(r"\b[A-Z][A-Z_]+\b", named))
    listed = re.match(r"\s*([A-Z_, ]+)\.", named)
    if listed:
        assert sorted(listed[1].split(", ")) == sorted(required)


@pytest.mark.parametrize("file", of("tasks"))
def test_task_file(dry_run, file):
    from speculative.data import tasks

    assert_runs(dry_run, EVALUATE, f"--gin_file={file}")
    name = re.search(r"^MIXTURE_OR_TASK_NAME = '(.*)'$", text_of(file), re.M)
    assert name and tasks.get_task(name[1])


@pytest.mark.parametrize("file", of("models"))
def test_model_file(dry_run, file):
    out = assert_runs(dry_run, EVALUATE, f"--target_gin_file={file}", f"--draft_gin_file={file}")
    fields = dict(re.findall(r"^  (\w+) = ([^#\n]*)", text_of(file), re.M))
    config = T5Config(**{name: ast.literal_eval(value) for name, value in fields.items()})
    for scope in ("target", "draft"):
        assert re.search(rf"^{scope}/(\w+\.)?T5Config\.emb_dim = {config.emb_dim}$", out, re.M), out
    counts = re.findall(r"[\d,]*\d,\d{3},\d{3}(?= parameters)", header(file))
    assert counts == [f"{parameter_count(config):,}"]


@pytest.mark.parametrize("file", of("pairs"))
def test_pair_file(dry_run, file):
    out = assert_runs(dry_run, EVALUATE, f"--gin_file={file}")
    for scope in ("target", "draft"):
        described = re.search(rf"^{scope}/(\w+\.)?T5Config:", text_of(file), re.M)
        reached = re.search(rf"^{scope}/(\w+\.)?T5Config\.emb_dim = \d+$", out, re.M)
        assert bool(described) == bool(reached)


@pytest.mark.parametrize("file", of("decoding"))
def test_decoding_file(dry_run, file):
    assert_runs(dry_run, EVALUATE, f"--gin_file={file}")


@pytest.mark.parametrize("file", FILES)
def test_values_that_only_the_run_would_check(file):
    text = text_of(file)
    for lengths in re.findall(r"(?i)\btask_feature_lengths = (\{.*?\})", text):
        assert set(ast.literal_eval(lengths)) == {"inputs", "targets"}, lengths
    total = re.search(r"^TRAIN_STEPS = (\d+)", text, re.M)
    if total:
        assert sum(map(int, re.findall(r"^  steps = (\d+)", text, re.M))) == int(total[1])
