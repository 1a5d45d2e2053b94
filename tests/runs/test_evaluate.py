"""The evaluate run end to end: tiny random checkpoints on data sets that TFDS's writer prepared."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import pathlib
import re
import subprocess
import sys
import types
from html.parser import HTMLParser

import numpy as np
import pytest
import sentencepiece

from speculative import main as main_module
from speculative import records
from speculative.checkpoints import t5x
from speculative.data import vocabulary as vocabularies
from speculative.models.language_model import T5LanguageModel
from tests import helpers_tfds, tiny
from tests.decoding import toys

ROOT = pathlib.Path(main_module.__file__).resolve().parent.parent
CONFIG = tiny.config(dropout_rate=0.1)
DRAFT = CONFIG.replace(mlp_dim=16)
# As T5X's examples have it, a line of T5X's own imports included.
MODEL_GIN = """
from __gin__ import dynamic_registration

from t5x.examples.t5 import network

EMB_DIM = {emb_dim}
network.T5Config:
  vocab_size = {vocab_size}
  dtype = 'float32'
  emb_dim = %EMB_DIM
  num_heads = {num_heads}
  num_encoder_layers = {num_encoder_layers}
  num_decoder_layers = {num_decoder_layers}
  head_dim = {head_dim}
  mlp_dim = {mlp_dim}
  mlp_activations = ('gelu', 'linear')
  dropout_rate = 0.1
  logits_via_embedding = False
"""
HOSTILE = "He said <b>light</b> & saw </li><script>it</script>."
WMT = {
    "validation": [("That is good.", "Das ist gut."), ("He saw the light.", "Er sah das Licht.")],
    "test": [
        (HOSTILE, "Er sagte <b>Licht</b> & sah es."),
        ("In the beginning.", "Am Anfang."),
        ("The people heard.", "Das Volk hörte es."),
    ],
}
ARTICLE = "(CNN) God saw the light . " + "They went out of the city . " * 20
CNN = {
    "test": [
        (ARTICLE, "God saw the light .\nThe people heard ."),
        ("A short one .", "Short ."),
        ("The people heard it .", "They heard ."),
    ],
}
LENGTHS = {"inputs": 32, "targets": 8}
VOID = {"meta", "br", "link", "hr", "img"}


def noisy(tree: dict, seed: int) -> dict:
    """The tree with a little noise on every value: a draft that is right now and then."""
    random = np.random.default_rng(seed)
    return {
        name: noisy(value, seed + i)
        if isinstance(value, dict)
        else (value * random.normal(1.0, 0.05, size=value.shape)).astype(np.float32)
        for i, (name, value) in enumerate(tree.items())
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Data, checkpoints and model files, as a user would have them."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "data").mkdir()
    helpers_tfds.write_wmt_ende(folder / "data", WMT)
    helpers_tfds.write_cnn_dailymail(folder / "data", CNN)
    tree = toys.random_tree(CONFIG, 0)
    t5x.write(folder / "target", tree, 100)
    t5x.write(folder / "draft", noisy(tree, 1), 100)
    wide = CONFIG.replace(vocab_size=4100)
    t5x.write(folder / "wide", toys.random_tree(wide, 2), 100)
    wider = CONFIG.replace(vocab_size=5000)
    t5x.write(folder / "wider", toys.random_tree(wider, 3), 100)
    for name, config in (("target", CONFIG), ("draft", CONFIG), ("other", DRAFT)):
        (folder / f"{name}.gin").write_text(MODEL_GIN.format(**dataclasses.asdict(config)))
    (folder / "a_file").write_text("not a folder")
    with (folder / "small.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([ARTICLE, *(text for pair in WMT["test"] for text in pair)]),
            model_writer=model,
            vocab_size=60,
            hard_vocab_limit=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
    return folder


def arguments(folder: pathlib.Path, task: str, *more: str, output: str = "out") -> list[str]:
    """A command line; what is in `more` comes last and wins."""
    return [
        "--run_mode=evaluate",
        "--gin_file=configs/runs/evaluate.gin",
        f"--gin_file=configs/tasks/{task}.gin",
        f"--tfds_data_dir={folder / 'data'}",
        f"--gin.TARGET_CHECKPOINT_PATH='{folder / 'target'}'",
        f"--gin.DRAFT_CHECKPOINT_PATH='{folder / 'draft'}'",
        f"--gin.VOCABULARY_PATH='{vocabularies.EMBEDDED_PATH}'",
        f"--gin.OUTPUT_DIR='{folder / output}'",
        f"--gin.TASK_FEATURE_LENGTHS={LENGTHS}",
        "--gin.GAMMAS=(2,)",
        "--gin.evaluate.repeats=2",
        "--gin.evaluate.buckets=None",  # One width, so that each loop is compiled once.
        *more,
    ]


def test_share_of_the_bandwidth():
    from speculative.runs import evaluate

    model = T5LanguageModel(CONFIG)
    half = T5LanguageModel(CONFIG, weights_dtype="bfloat16")
    full = evaluate._memory_record(model, 1e9, 0.5, 10)
    assert full.baseline_share == pytest.approx(full.bytes_per_target_step * 10 / 0.5 / 1e9)
    assert evaluate._memory_record(half, 1e9, 0.5, 10).bytes_per_target_step == (
        full.bytes_per_target_step / 2
    )
    # The encoders by themselves took longer than all of a short decode.
    assert evaluate._memory_record(model, 1e9, -0.1, 10).baseline_share is None


# ------------------------------------------------------------------------------ what a run writes


@pytest.fixture(scope="module")
def evaluated(folder):
    """Output folders by task: three examples in batches of two, so that the last one is padded."""
    from speculative.data import tasks

    models = [f"--target_gin_file={folder}/target.gin", f"--draft_gin_file={folder}/draft.gin"]
    batches = "--gin.BATCH_SIZE=2"
    try:
        wmt = arguments(folder, "wmt_ende", *models, batches, "--gin.GAMMAS=(1, 2)", output="wmt")
        assert main_module.main(wmt) == 0
        # Here the configurations are read off the checkpoints; they are the same, so that hardly
        # anything is compiled again.
        cnn = arguments(folder, "cnn_dailymail", batches, output="cnn")
        assert main_module.main(cnn) == 0
    finally:
        tasks.set_tfds_data_dir(None)
    return {"wmt": folder / "wmt", "cnn": folder / "cnn"}


BOTH = pytest.mark.parametrize(
    ("name", "task"),
    [("wmt", "speculative_wmt_t2t_ende_v003"), ("cnn", "speculative_cnn_dailymail_v002")],
)


def rows_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@BOTH
def test_record(evaluated, name, task):
    record = records.read_record(evaluated[name] / "record.json")
    assert record.run_mode == "evaluate"
    assert (record.target.name, record.target.checkpoint[-6:]) == ("target", "target")
    assert [s.temperature for s in record.settings] == [0.0, 1.0]
    for setting in record.settings:
        assert (setting.task, setting.split) == (task, "test")
        assert (setting.num_examples, setting.batch_size) == (3, 2)
        assert (setting.verifier, setting.exact) == ("TokenVerifier", True)
        assert setting.emitted == setting.accepted + setting.target_runs - setting.ended_on_draft
        assert setting.ends.eos + setting.ends.budget == 3
        assert 0.0 <= setting.alpha.estimate <= 1.0
        assert 0.0 <= setting.acceptance_of_drafted <= 1.0
        assert setting.predicted_iid > 0 and setting.predicted_parts > 0
        assert setting.walltime.repeats == 2 and setting.walltime.examples == 3
        assert 3 <= setting.emitted == setting.walltime.tokens <= 3 * LENGTHS["targets"]
        metrics = {"wmt": {"bleu"}, "cnn": {"rouge1", "rouge2", "rougeLsum"}}[name]
        assert set(setting.quality.speculative) == set(setting.quality.copy_input) == metrics
    greedy, sampled = record.settings
    assert greedy.identical_outputs == records.IdenticalOutputs(3, 3, 0)
    assert greedy.quality.speculative == greedy.quality.autoregressive
    assert sampled.identical_outputs is None
    # A target with noise on it is neither always right nor always wrong.
    assert 0.0 < sampled.alpha.estimate < 1.0


def test_gamma_is_chosen_on_validation(evaluated):
    for setting in records.read_record(evaluated["wmt"] / "record.json").settings:
        assert setting.gamma_search.split == "validation"
        speedups = {point.gamma: point.speedup for point in setting.gamma_search.points}
        assert sorted(speedups) == [1, 2] and setting.gamma == max(speedups, key=speedups.get)
    for setting in records.read_record(evaluated["cnn"] / "record.json").settings:
        assert (setting.gamma, setting.gamma_search) == (2, None)


@BOTH
def test_predictions(evaluated, name, task):
    words = vocabularies.load(vocabularies.EMBEDDED_PATH)
    sources = {"wmt": WMT, "cnn": CNN}[name]["test"]
    record = records.read_record(evaluated[name] / "record.json")
    for setting in record.settings:
        rows = rows_of(evaluated[name] / f"{task}-temperature{setting.temperature:g}.jsonl")
        assert [row["aux"]["example_id"] for row in rows] == [0, 1, 2]
        assert sum(len(row["prediction_tokens"]) for row in rows) == setting.emitted
        for row, (source, target) in zip(rows, sources, strict=True):
            assert set(row) == {"inputs", "targets", "prediction", "prediction_tokens", "aux"}
            assert row["targets"] == row["inputs"]["targets_pretokenized"]
            assert row["inputs"]["inputs_pretokenized"].endswith(source)
            assert row["targets"] == target
            assert row["prediction"] == words.decode(row["prediction_tokens"])
            if setting.temperature == 0:
                assert row["aux"]["identical"]
                assert row["aux"]["autoregressive"] == row["prediction"]


@BOTH
def test_configuration_is_the_one_that_ran(evaluated, name, task):
    text = (evaluated[name] / "config.gin").read_text()
    assert "GAMMAS" in text and "batch_size = %BATCH_SIZE" in text
    assert ("EMB_DIM = 16" in text) == (name == "wmt")
    record = records.read_record(evaluated[name] / "record.json")
    assert record.provenance.config_hash


class _Page(HTMLParser):
    """Fails where an element is closed that is not the last one opened."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@BOTH
def test_report(evaluated, name, task):
    text = (evaluated[name] / "report.html").read_text()
    page = _Page(text)
    assert page.open == [] and "script" not in page.tags
    assert task in page.text
    if name == "wmt":  # In the trace of the first example.
        assert HOSTILE not in text and html.escape(HOSTILE, quote=False) in text
        assert HOSTILE in page.text


# -------------------------------------------------------------------------- where outputs differ


def test_a_difference_is_called_a_near_tie_where_the_two_best_logits_are_close(folder, monkeypatch):
    """Temperature 0 gives no difference to look at in float32: this one is made up."""
    from speculative import pair as pairs
    from speculative import sampling
    from speculative.runs import outputs

    words = vocabularies.EMBEDDED_PATH
    pair = pairs.load_pair(folder / "target", folder / "draft", words)
    bench = types.SimpleNamespace(
        pair=pair, lengths=LENGTHS, settings=lambda batch, t: sampling.make(batch, temperature=t)
    )
    same, other, shorter = (5, 6, 1), (5, 7, 1), (5,)
    rows = [
        outputs.Decoded(i, (8, 9, 1), "", "", {}, baseline, (5, 6, 1), "", "")
        for i, baseline in enumerate((same, other, shorter))
    ]
    found = outputs.identical(bench, rows, 0.0)
    assert (found.compared, found.identical, found.near_ties) == (3, 1, 0)
    monkeypatch.setattr(outputs, "NEAR_TIE", 1e6)
    assert outputs.identical(bench, rows, 0.0).near_ties == 2
    assert outputs.identical(bench, rows, 1.0) is None


# ----------------------------------------------------------------------------------------- mistakes

# Runs `main` on each command line of standard input, and says what it answered and wrote to
# standard error, below Python too. One process for all: most of a command's time is imports.
MANY = """
import json, os, sys, tempfile
from speculative.main import main
answers = []
for arguments in json.load(sys.stdin):
    own = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            code = main(arguments)
        except BaseException as error:
            code = repr(error)
        sys.stderr.flush()
        os.dup2(own, 2)
        kept.seek(0)
        answers.append((code, kept.read().decode()))
print(json.dumps(answers))
"""

MISTAKES = {
    # More arguments, and what the line says.
    "misspelt macro": (
        ["--gin.GAMMA=(2,)"],
        ["Macro GAMMA (--gin.GAMMA)", "used nowhere", "Did you mean 'GAMMAS'"],
    ),
    "no such checkpoint": (
        ["--gin.DRAFT_CHECKPOINT_PATH='{folder}/absent'"],
        ["There is no checkpoint", "nothing at {folder}/absent"],
    ),
    "checkpoint of another shape": (
        ["--draft_gin_file={folder}/other.gin"],
        ["{folder}/draft", "are not those of the model", "(24, 16)"],
    ),
    "vocabulary of another size": (
        ["--gin.VOCABULARY_PATH='{folder}/small.model'"],
        ["{folder}/small.model does not fit target", "expected 3969 to 4096 ids", "found "],
    ),
    "no such vocabulary": (
        ["--gin.VOCABULARY_PATH='{folder}/absent.model'"],
        ["cannot read the vocabulary {folder}/absent.model"],
    ),
    "no vocabulary": (
        ["--gin.VOCABULARY_PATH='{folder}/a_file'"],
        ["{folder}/a_file is not a SentencePiece model"],
    ),
    "both models wider than the vocabulary": (
        [
            "--gin.TARGET_CHECKPOINT_PATH='{folder}/wider'",
            "--gin.DRAFT_CHECKPOINT_PATH='{folder}/wider'",
        ],
        ["does not fit target", "expected 4873 to 5000 ids", "found 4096"],
    ),
    "draft far wider": (
        ["--gin.DRAFT_CHECKPOINT_PATH='{folder}/wider'"],
        ["does not fit draft", "expected 4873 to 5000 ids", "found 4096"],
    ),
    "draft a little wider": (
        ["--gin.DRAFT_CHECKPOINT_PATH='{folder}/wide'"],
        ["draft's vocabulary", "expected the target's width 4096", "found 4100"],
    ),
    "no such task": (
        ["--gin.MIXTURE_OR_TASK_NAME='wmt_t2t_ende_v33'"],
        ["unknown task 'wmt_t2t_ende_v33'", "wmt_t2t_ende_v003"],
    ),
    "no such split": (
        ["--gin.SPLIT='dev'"],
        ["no split 'dev'", "test", "validation"],
    ),
    "no gamma": (["--gin.GAMMAS=()"], ["evaluate.gammas", "expected", "found ()"]),
    "gamma 0": (["--gin.GAMMAS=(0,)"], ["evaluate.gammas", "1 or more", "found (0,)"]),
    "gamma no list": (["--gin.GAMMAS=3"], ["evaluate.gammas", "found 3 (int)"]),
    "negative temperature": (
        ["--gin.TEMPERATURES=(0.0, -1.0)"],
        ["evaluate.temperatures", "0 or more", "found (0.0, -1.0)"],
    ),
    "no temperature": (["--gin.TEMPERATURES=()"], ["evaluate.temperatures", "found ()"]),
    "one temperature twice": (["--gin.TEMPERATURES=(1.0, 1.0)"], ["evaluate.temperatures", "once"]),
    "no example": (["--gin.NUM_EXAMPLES=0"], ["evaluate.num_examples", "found 0"]),
    "no row": (["--gin.BATCH_SIZE=0"], ["evaluate.batch_size", "found 0"]),
    "negative seed": (["--gin.SEED=-1"], ["evaluate.seed", "found -1"]),
    "no validation example": (
        ["--gin.GAMMAS=(1, 2)", "--gin.evaluate.validation_examples=0"],
        ["evaluate.validation_examples", "found 0"],
    ),
    "no validation split": (
        ["--gin.GAMMAS=(1, 2)", "--gin.evaluate.validation_split='dev'"],
        ["no split 'dev'"],
    ),
    "lengths without targets": (
        ["--gin.TASK_FEATURE_LENGTHS={{'inputs': 32}}"],
        ["task_feature_lengths", "'inputs' and 'targets'"],
    ),
    "top_p above 1": (["--gin.evaluate.top_p=1.5"], ["evaluate.top_p", "found 1.5"]),
    "negative top_k": (["--gin.evaluate.top_k=-3"], ["evaluate.top_k", "found -3"]),
    "folder that is a file": (
        ["--gin.OUTPUT_DIR='{folder}/a_file'"],
        ["The run's folder cannot be written", "{folder}/a_file"],
    ),
    "folder in a file": (
        ["--gin.OUTPUT_DIR='{folder}/a_file/out'"],
        ["The run's folder cannot be written", "{folder}/a_file/out"],
    ),
    # Last, since a process remembers the first directory that a task was read from.
    "data not prepared": (
        ["--gin.MIXTURE_OR_TASK_NAME='lm1b'"],
        ["lm1b", "is not prepared", "{folder}/data/lm1b", "--tfds_data_dir"],
    ),
}


@pytest.fixture(scope="module")
def answers(folder):
    """Exit code and standard error of every mistake, by name, and what was in the folder before."""
    output = folder / "kept"
    output.mkdir()
    before = {"config.gin": "X = 1\n", "record.json": "{}\n", "report.html": "<p>before</p>\n"}
    for name, text in before.items():
        (output / name).write_text(text)
    lines = [
        arguments(folder, "wmt_ende", *(a.format(folder=folder) for a in more), output="kept")
        for more, _ in MISTAKES.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", MANY],
        cwd=ROOT,
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    answered = json.loads(done.stdout.splitlines()[-1])
    after = {path.name: path.read_text() for path in output.iterdir()}
    return dict(zip(MISTAKES, answered, strict=True)), before, after


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(folder, answers, name):
    code, said = answers[0][name]
    assert code == 2, said
    assert re.fullmatch(r"error: [^\n]+\n", said), said
    for part in MISTAKES[name][1]:
        assert part.format(folder=folder) in said


def test_mistakes_leave_the_folder_as_it_was(folder, answers):
    _, before, after = answers
    assert after == before
    assert (folder / "a_file").read_text() == "not a folder"


def test_the_command_itself(folder):
    line = arguments(folder, "wmt_ende", "--gin.VOCABULARY_PAHT='x'", output="command")
    done = subprocess.run(
        [sys.executable, "-m", "speculative.main", *line],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: Macro VOCABULARY_PAHT [^\n]+'VOCABULARY_PATH'\.\n", done.stderr)
    assert not (folder / "command").exists()
