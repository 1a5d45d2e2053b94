"""The record schema: round trip, each kind of error, atomic writing, provenance."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from speculative import provenance as provenance_module
from speculative import records, schema
from speculative.errors import RecordError

RECORD = Path(__file__).parent / "reports" / "data" / "record_v1.json"


@pytest.fixture
def record():
    return records.read_record(RECORD)


@pytest.fixture
def value():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def minimal():
    setting = records.Setting(
        task="task",
        split="test",
        num_examples=1,
        draft=records.Model("draft"),
        verifier="token",
        exact=True,
        temperature=0.0,
        top_k=0,
        top_p=0.0,
        gamma=3,
        batch_size=1,
        dtype="float32",
    )
    host = records.Host("cpu", 2)
    provenance = records.Provenance(None, "python", {"python": "3.11"}, (), host, 0)
    return records.Record(
        "evaluate", "2023-07-23T12:00:00+00:00", provenance, records.Model("target"), (setting,)
    )


def test_round_trip(record, tmp_path):
    path = records.write_record(record, tmp_path / "new" / "record.json")
    assert records.read_record(path) == record
    assert path.read_text() == RECORD.read_text(encoding="utf-8")
    assert json.loads(path.read_text())["version"] == 1


def test_optional_fields_are_written_as_null_and_read_when_absent(tmp_path):
    path = records.write_record(minimal(), tmp_path / "record.json")
    value = json.loads(path.read_text())
    assert value["settings"][0]["alpha"] is None
    value["settings"][0] = {k: v for k, v in value["settings"][0].items() if v is not None}
    path.write_text(json.dumps(value))
    assert records.read_record(path) == minimal()


def test_numpy_values_are_written_as_numbers():
    value = {"a": np.float32(1.5), "b": (np.int32(3), np.arange(2)), "c": records.Ends(1, 2)}
    assert schema.to_json(value) == {"a": 1.5, "b": [3, [0, 1]], "c": {"eos": 1, "budget": 2}}


def test_whole_numbers_are_read_as_floats_where_floats_are_meant(value, tmp_path):
    value["settings"][0]["temperature"] = 1
    (tmp_path / "r").write_text(json.dumps(value))
    assert type(records.read_record(tmp_path / "r").settings[0].temperature) is float


S = "settings.0"
DELETE = object()


@pytest.mark.parametrize(
    ("where", "new", "named", "expected", "found"),
    [
        # unknown, missing, type
        ("colour", "red", "record has an unknown field", "run_mode", "'colour'"),
        (f"{S}.temprature", 0, "record.settings[0] has an unknown field", "temperature", "temprat"),
        ("run_mode", DELETE, "record.run_mode is missing", "a string", ""),
        (f"{S}.gamma", DELETE, "record.settings[0].gamma is missing", "a whole number", ""),
        ("provenance.host.cores", DELETE, "record.provenance.host.cores", "a whole number", ""),
        ("run_mode", 3, "record.run_mode", "a string", "3"),
        (f"{S}.exact", 1, "record.settings[0].exact", "true or false", "1"),
        (f"{S}.gamma", True, "record.settings[0].gamma", "a whole number", "True"),
        (f"{S}.gamma", 5.0, "record.settings[0].gamma", "a whole number", "5.0"),
        (f"{S}.gamma", None, "record.settings[0].gamma", "a whole number", "null"),
        (f"{S}.temperature", "0", "record.settings[0].temperature", "a finite number", "'0'"),
        (f"{S}.alpha", 0.8, "record.settings[0].alpha", "an object", "0.8"),
        ("settings", {}, "record.settings", "a list", "{}"),
        ("provenance.versions.jax", 1, "record.provenance.versions.jax", "a string", "1"),
        (f"{S}.quality.speculative", [], "record.settings[0].quality.speculative", "object", "[]"),
        (f"{S}.examples.0.rounds.0.kind", "x", "rounds[0].kind", "'correction'", "'x'"),
        (f"{S}.task", "\ud800", "record.settings[0].task", "UTF-8", "ud800"),
        # range
        (f"{S}.temperature", -1, "record.settings[0].temperature", "at least 0", "-1"),
        (f"{S}.top_p", 1.5, "record.settings[0].top_p", "from 0 to 1", "1.5"),
        (f"{S}.batch_size", 0, "record.settings[0].batch_size", "at least 1", "0"),
        (f"{S}.verify_ratio", 0, "record.settings[0].verify_ratio", "above 0", "0"),
        (f"{S}.temperature", float("nan"), "record.settings[0].temperature", "finite", "nan"),
        (f"{S}.walltime.compile_s", float("inf"), "walltime.compile_s", "finite", "inf"),
        (f"{S}.accepted_per_position.1", -2, "accepted_per_position[1]", "at least 0", "-2"),
        # fields that contradict each other
        ("version", 2, "record.version", "1", "2"),
        ("version", DELETE, "record.version", "1", "None"),
        ("version", True, "record.version", "1", "True"),
        ("created", "yesterday", "record.created", "ISO 8601", "yesterday"),
        ("created", "2023-07-23T12:00:00", "record.created", "offset", "2023"),
        ("settings", [], "record.settings", "at least one", "[]"),
        (f"{S}.emitted", 3650, "record.settings[0].emitted", "2689 + 1000 - 40 = 3649", "3650"),
        (f"{S}.proposed", 2000, "record.settings[0].accepted", "at most proposed, 2000", "2689"),
        (f"{S}.proposed", 5001, "record.settings[0].proposed", "5000", "5001"),
        (f"{S}.ends.eos", 2, "record.settings[0].ended_on_draft", "at most", "40"),
        (f"{S}.acceptance_of_drafted", 0.8, "acceptance_of_drafted", "0.5378", "0.8"),
        (f"{S}.tokens_per_target_run", 3.5, "tokens_per_target_run", "3.649", "3.5"),
        (f"{S}.accepted_per_position.0", 801, "accepted_per_position", "add up to", "801"),
        (f"{S}.accepted_per_position.1", 900, "accepted_per_position", "none above", "900"),
        (f"{S}.accepted_per_position", [1], "accepted_per_position", "5 counts", "[1]"),
        (f"{S}.alpha.low", 0.9, "record.settings[0].alpha.estimate", "0.9 to", "0.8"),
        (f"{S}.alpha.high", None, "record.settings[0].alpha.low", "both", "'high': None"),
        (f"{S}.walltime.speedup", 2.65, "record.settings[0].walltime.speedup", "2.697", "2.65"),
        (f"{S}.walltime.low", 2.75, "record.settings[0].walltime.speedup", "2.75 to", "2.69"),
        (f"{S}.identical_outputs.identical", 129, "identical_outputs.identical", "128", "129"),
        (f"{S}.identical_outputs.near_ties", 1, "identical_outputs.near_ties", "0", "1"),
        (f"{S}.quality.speculative", {}, "quality.speculative", "bleu", "[]"),
        (f"{S}.gamma_search.points.0.gamma", 1, "gamma_search.points", "rising", "[1, 1"),
        (f"{S}.examples.0.rounds.0.rejected", [], "rounds[0].rejected", "at least one", "[]"),
        (f"{S}.examples.0.rounds.1.rejected", ["a"], "rounds[1].rejected", "no token", "['a']"),
        (f"{S}.examples.0.rounds.2.next", "a", "rounds[2].next", "''", "'a'"),
    ],
)
def test_reading_names_field_expected_and_found(
    value, tmp_path, where, new, named, expected, found
):
    *parents, last = (int(part) if part.isdigit() else part for part in where.split("."))
    parent = value
    for part in parents:
        parent = parent[part]
    if new is DELETE:
        del parent[last]
    else:
        parent[last] = new
    path = tmp_path / "record.json"
    path.write_text(json.dumps(value))
    with pytest.raises(RecordError) as caught:
        records.read_record(path)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 1200
    assert named in line.partition("; expected")[0] and "; expected" in line
    assert expected in line and found in line.rpartition("; ")[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No record"), ("{", "not JSON"), ("[]", "an object"), (b"\xff", "not JSON")],
)
def test_a_file_that_is_no_record(tmp_path, content, message):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecordError, match=message):
        records.read_record(path)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("gamma", -1), ("verifier", "\ud800"), ("alpha", records.Alpha(0.5, 0.6, 0.7, 10))],
)
def test_writing_checks_too_and_leaves_the_old_file(tmp_path, field, wrong):
    path = records.write_record(minimal(), tmp_path / "record.json")
    old = path.read_text()
    setting = dataclasses.replace(minimal().settings[0], **{field: wrong})
    with pytest.raises(RecordError, match=rf"record.settings\[0\]\.{field}"):
        records.write_record(dataclasses.replace(minimal(), settings=(setting,)), path)
    assert path.read_text() == old
    with pytest.raises(RecordError, match="version"):
        records.write_record(dataclasses.replace(minimal(), version=2), path)


@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = records.write_record(minimal(), tmp_path / "record.json")
    old = path.read_text()

    def fail(self, *arguments):
        if failing == "write_text":  # half of the text reaches the disk
            Path(self).write_bytes(arguments[0][: len(arguments[0]) // 2].encode())
        raise OSError("No space left on device")

    monkeypatch.setattr(type(epath.Path(tmp_path)), failing, fail)
    with pytest.raises(OSError, match="No space"):
        records.write_record(dataclasses.replace(minimal(), run_mode="benchmark"), path)
    monkeypatch.undo()
    assert path.read_text() == old
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_provenance_fits_the_schema(tmp_path):
    provenance = records.provenance(seed=3, devices=["cpu"], config_text="a = 1\n")
    assert provenance.seed == 3 and provenance.devices == ("cpu",)
    assert provenance.versions["numpy"] == np.__version__
    assert provenance.host.cores >= 1 and provenance.host.cpu
    record = dataclasses.replace(minimal(), provenance=provenance)
    path = records.write_record(record, tmp_path / "record.json")
    assert records.read_record(path).provenance == provenance


def test_config_hash_ignores_blank_lines_only():
    digest = provenance_module.config_hash("a = 1\nb = 2\n")
    assert digest == provenance_module.config_hash("a = 1  \n\nb = 2")
    assert digest != provenance_module.config_hash("a = 1\nb = 3\n")
    assert len(digest) == 64


def test_command_has_no_absolute_path_of_program_or_folder(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "run.py").write_text(
        "from speculative.provenance import command\nprint(command())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(records.__file__).parent.parent))
    arguments = [f"--out={tmp_path}/runs/a", "--at", str(tmp_path), f"{tmp_path}s/b", "c d"]
    for how in ([str(tmp_path / "run.py")], ["-m", "run"]):
        done = subprocess.run(
            [sys.executable, *how, *arguments], capture_output=True, text=True, check=True
        )
        typed = "-m run" if how[0] == "-m" else "run.py"
        assert done.stdout == f"python {typed} --out=runs/a --at . {tmp_path}s/b 'c d'\n"


def test_commit(tmp_path):
    def git(*arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "core.hooksPath=/dev/null"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert provenance_module.commit(tmp_path) is None
    git("init")
    assert provenance_module.commit(tmp_path) is None  # nothing committed yet
    results = tmp_path / "experiments" / "table" / "results"
    for folder in (tmp_path / "speculative", results):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("1")
    git("add", "."), git("commit", "-m", "a")
    clean = provenance_module.commit(tmp_path)
    assert len(clean) == 40
    assert provenance_module.commit(tmp_path / "speculative") is None  # not the top
    (results / "a.py").write_text("2")
    (tmp_path / "notes.txt").write_text("new, but no code")
    assert provenance_module.commit(tmp_path) == clean
    (tmp_path / "speculative" / "b.py").write_text("new code")
    assert provenance_module.commit(tmp_path) == f"{clean}-dirty"
    (tmp_path / "speculative" / "b.py").unlink()
    (tmp_path / "speculative" / "a.py").write_text("2")
    assert provenance_module.commit(tmp_path) == f"{clean}-dirty"


def test_records_and_reports_need_neither_jax_nor_tensorflow():
    code = (
        "import sys, speculative.records, speculative.reports.tables, speculative.reports.page\n"
        "import speculative.analysis.theory, speculative.analysis.estimation\n"
        "print([m for m in ('jax', 'flax', 'tensorflow', 'seqio', 'gin') if m in sys.modules])"
    )
    root = Path(records.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
