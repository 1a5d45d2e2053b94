"""The launcher: what a run function is given, and the one line for each kind of mistake."""

import os
import subprocess
import sys
import textwrap

import pytest

from speculative import main as main_module
from speculative.errors import CheckpointError
from speculative.main import main
from speculative.models.config import T5Config

# No name that a real run function has: gin keeps every function that it has seen in a process.
RUN_FUNCTION = """
import dataclasses
from collections.abc import Sequence

CALLS = []
FAIL_WITH = []


@dataclasses.dataclass
class Model:
    config: object = None
    checkpoint_path: str | None = None


def decode_it(
    target: Model,
    task: str,
    output_dir: str,
    draft: Model | None = None,
    gammas: Sequence[int] = (4,),
    batch_size: int = 32,
    temperature: float = 0.0,
    seed: int | None = None,
):
    CALLS.append(dict(locals()))
    for error in FAIL_WITH:
        raise error


def other(steps: int = 1):
    pass
"""

RUN_GIN = """
from __gin__ import dynamic_registration

import __main__ as evaluate_script
import dummy_run

TASK = %gin.REQUIRED
BATCH_SIZE = 8

evaluate_script.decode_it:
  target = @target/dummy_run.Model()
  draft = @draft/dummy_run.Model()
  task = %TASK
  output_dir = %OUTPUT_DIR
  batch_size = %BATCH_SIZE
"""

# A T5X user's block, pasted, as `t5_1_1/small.gin` has it.
MODEL_GIN = """
from __gin__ import dynamic_registration

from t5x.examples.t5 import network

EMB_DIM = {emb_dim}
network.T5Config:
  vocab_size = 32128
  dtype = 'bfloat16'
  emb_dim = %EMB_DIM
  num_heads = 6
  num_encoder_layers = 8
  num_decoder_layers = 8
  head_dim = 64
  mlp_dim = 1024
  mlp_activations = ('gelu', 'linear')
  dropout_rate = %DROPOUT_RATE
  logits_via_embedding = False
"""

DYNAMIC = "from __gin__ import dynamic_registration\nimport dummy_run\n"

PLAIN_GIN = RUN_GIN.replace("  draft = @draft/dummy_run.Model()\n", "")


class Desk:
    """A folder with a dummy run function, and `main` called from within it."""

    def __init__(self, path, capsys):
        self.path, self._capsys = path, capsys

    def write(self, name, text):
        (self.path / name).write_text(text)

    @property
    def module(self):
        return sys.modules["dummy_run"]

    def main(self, *arguments):
        """(exit code, stdout, stderr)"""
        code = main(["--run_mode=evaluate", *arguments])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def call(self, *arguments):
        """The arguments that the run function got."""
        code, _, err = self.main(*arguments)
        assert code == 0, err
        return self.module.CALLS[-1]

    def line(self, *arguments):
        """The one line that a mistake ends with."""
        code, out, err = self.main(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert not (self.path / "out").exists()
        return err.strip()


@pytest.fixture(scope="module")
def code_folder(tmp_path_factory):
    """Where `dummy_run` is; one for all, since gin keeps what it has seen of a module."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "dummy_run.py").write_text(RUN_FUNCTION)
    yield folder
    sys.modules.pop("dummy_run", None)


@pytest.fixture
def desk(tmp_path, code_folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(code_folder))
    monkeypatch.setattr(main_module, "RUN_MODES", {"evaluate": "dummy_run:decode_it"})
    desk = Desk(tmp_path, capsys)
    desk.write("run.gin", RUN_GIN)
    desk.write("plain.gin", PLAIN_GIN)
    desk.write("small.gin", MODEL_GIN.format(emb_dim=512))
    desk.write("large.gin", MODEL_GIN.format(emb_dim=1024))
    yield desk
    if "dummy_run" in sys.modules:
        desk.module.CALLS.clear()
        desk.module.FAIL_WITH.clear()


GIVEN = ("--gin.TASK='lm'", "--gin.OUTPUT_DIR='out'")
PLAIN = ("--gin_file=plain.gin", *GIVEN)
PAIR = (
    "--gin_file=run.gin",
    "--target_gin_file=large.gin",
    "--draft_gin_file=small.gin",
    "--gin.DROPOUT_RATE=0.0",
    *GIVEN,
)


def test_later_files_and_then_the_command_line_override(desk):
    desk.write("more.gin", "BATCH_SIZE = 9\ndecode_it.seed = 1\ndecode_it.gammas = [3, 5]\n")
    got = desk.call(*PLAIN, "--gin_file=more.gin", "--gin.decode_it.seed=2")
    assert (got["batch_size"], got["seed"], got["gammas"]) == (9, 2, [3, 5])
    assert got["task"] == "lm" and got["draft"] is None


def test_two_model_files_with_the_same_names_do_not_collide(desk):
    got = desk.call(*PAIR, "--gin.target/T5Config.num_heads=16", "--gin.draft/EMB_DIM=256")
    target, draft = got["target"].config, got["draft"].config
    assert type(target) is T5Config
    assert (target.emb_dim, target.num_heads) == (1024, 16)
    assert (draft.emb_dim, draft.num_heads) == (256, 6)
    assert target.dropout_rate == draft.dropout_rate == 0.0


def test_included_model_file_and_overrides_without_imports(desk):
    # T5X's small.gin: no header of its own, names resolved through what base.gin imported.
    desk.write("tiny.gin", "include 'small.gin'\nEMB_DIM = 64\nnetwork.T5Config:\n  mlp_dim = 96\n")
    got = desk.call(*PAIR, "--draft_gin_file=tiny.gin")
    assert (got["draft"].config.emb_dim, got["draft"].config.mlp_dim) == (64, 96)
    assert (got["target"].config.emb_dim, got["target"].config.mlp_dim) == (1024, 1024)


def test_a_second_run_in_one_process_may_call_things_otherwise(desk):
    t5x = (desk.path / "small.gin").read_text()
    ours = t5x.replace("t5x.examples.t5 import network", "speculative.models import config")
    desk.write("ours.gin", ours.replace("network.T5Config", "config.T5Config"))
    for file, name in [("small", "network"), ("ours", "config"), ("small", "network")]:
        desk.write("tiny.gin", f"include '{file}.gin'\n{name}.T5Config:\n  mlp_dim = 96\n")
        names = ("--target_gin_file=tiny.gin", "--draft_gin_file=tiny.gin")
        got = desk.call("--gin_file=run.gin", *names, "--gin.DROPOUT_RATE=0.0", *GIVEN)
        assert got["draft"].config.mlp_dim == 96


def test_required_macro_of_a_model_file_is_asked_of_everybody(desk):
    desk.write("base.gin", "DROPOUT_RATE = %gin.REQUIRED\ninclude 'small.gin'\n")
    files = ("--gin_file=run.gin", "--target_gin_file=base.gin", "--draft_gin_file=base.gin")
    line = desk.line(*files, *GIVEN)
    assert "Required and not set: DROPOUT_RATE" in line and "--gin.DROPOUT_RATE=" in line
    got = desk.call(*files, *GIVEN, "--gin.DROPOUT_RATE=0.1", "--gin.draft/DROPOUT_RATE=0.2")
    assert got["target"].config.dropout_rate == 0.1
    assert got["draft"].config.dropout_rate == 0.2


def test_whole_t5x_model_file(desk):
    training = """
        import seqio
        from t5x import adafactor
        from t5x import models
        from t5x.examples.t5 import network
        Z_LOSS = 0.0001
        VOCABULARY = @seqio.SentencePieceVocabulary()
        OPTIMIZER = @adafactor.Adafactor()
        adafactor.Adafactor:
          decay_rate = 0.8
          logical_factor_rules = @adafactor.standard_logical_factor_rules()
        MODEL = @models.EncoderDecoderModel()
        models.EncoderDecoderModel:
          module = @network.Transformer()
          optimizer_def = %OPTIMIZER
          z_loss = %Z_LOSS
        network.Transformer.config = @network.T5Config()
    """
    desk.write("t5x.gin", MODEL_GIN.format(emb_dim=512) + textwrap.dedent(training))
    arguments = ("--gin_file=run.gin", *GIVEN, "--gin.DROPOUT_RATE=0.0")
    code, _, err = desk.main(*arguments, "--target_gin_file=t5x.gin", "--draft_gin_file=small.gin")
    assert code == 0
    assert err.startswith("note: settings of T5X's training are passed over: ")
    assert "MODEL" in err and "Z_LOSS" in err and err.count("\n") == 1
    assert desk.module.CALLS[-1]["target"].config.emb_dim == 512
    assert "seqio" not in (desk.path / "out" / "config.gin").read_text()


def test_configuration_is_written_before_the_run_and_reads_back(desk):
    first = desk.call(*PAIR, "--gin.decode_it.gammas=(2, 3)")
    text = (desk.path / "out" / "config.gin").read_text()
    assert "batch_size = 32" not in text and "BATCH_SIZE = 8" in text
    assert "temperature = 0.0" in text  # A default is part of the record too.
    assert [p.name for p in (desk.path / "out").iterdir()] == ["config.gin"]
    again = desk.call("--gin_file=out/config.gin", "--gin.OUTPUT_DIR='again'")
    assert again == {**first, "output_dir": "again"}
    assert (desk.path / "again" / "config.gin").read_text() == text.replace("'out'", "'again'")


def test_an_override_does_not_make_what_it_replaces_a_mistake(desk):
    got = desk.call(*PAIR, "--gin.decode_it.batch_size=5", "--gin.decode_it.draft=None")
    assert (got["batch_size"], got["draft"]) == (5, None)
    assert "small.gin" not in (desk.path / "out" / "config.gin").read_text()
    assert "draft/" not in (desk.path / "out" / "config.gin").read_text()


def test_dry_run_prints_and_touches_nothing(desk):
    code, out, err = desk.main(*PAIR, "--dry_run")
    assert (code, err) == (0, "")
    assert "dummy_run:decode_it" in out and "writing to out" in out and "TASK = 'lm'" in out
    assert not (desk.path / "out").exists() and not desk.module.CALLS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--gin_fil=x"], ["gin_fil", "Did you mean: gin_file"]),
        (["--run_mode=evaluat"], ["--run_mode=evaluat", "expected one of evaluate"]),
        (["plain.gin"], ["'plain.gin' is not a flag"]),
        (["--gin.TASK"], ["--gin.TASK", "expected --gin.NAME=VALUE"]),
        (["--gin.TASK="], ["--gin.TASK=", "expected --gin.NAME=VALUE"]),
        (["--process_index=1"], ["--coordinator_address"]),
        (["--coordinator_address=localhost:1", "--process_index=2", "--process_count=2"],
         ["0 <= --process_index < --process_count"]),
        (["--initialization_timeout=soon"], ["--initialization_timeout"]),
        ([], ["Required and not set", "task", "--gin_file"]),
        (["--gin_file=plan.gin"], ["Gin file 'plan.gin'", "found none"]),
        ([*PLAIN, "--gin.BATCH_SISE=9"],
         ["Macro BATCH_SISE (--gin.BATCH_SISE) is bound and used nowhere", "'BATCH_SIZE'"]),
        (["--gin_file=plain.gin", "--gin.TASK='lm'"], ["not set: OUTPUT_DIR", "--gin.OUTPUT_DIR="]),
        (["--gin_file=plain.gin", "--gin.TASK='lm'", "--gin.OUTPUT_DRI='out'"],
         ["Macro OUTPUT_DRI", "Did you mean 'OUTPUT_DIR'"]),
        (["--gin_file=plain.gin", "--gin.OUTPUT_DIR='out'"], ["not set: TASK"]),
        ([*PLAIN, "--gin.OUTPUT_DIR=out/x"], ["--gin.OUTPUT_DIR=out/x", "quotes", "'out'"]),
        ([*PLAIN, "--gin.decode_it.batchsize=9"],
         ["doesn't have a parameter named 'batchsize'", "Did you mean 'batch_size'"]),
        ([*PLAIN, "--gin.decode_ti.seed=9"], ["matching 'decode_ti'", "Did you mean 'decode_it'"]),
        ([*PLAIN, "--gin.decode_it.seed='x'"],
         ["decode_it.seed (--gin.decode_it.seed)", "expected int | None", "found 'x' (str)"]),
        ([*PLAIN, "--gin.BATCH_SIZE=2.5"], ["decode_it.batch_size = %BATCH_SIZE (plain.gin:",
                                            "expected int", "found 2.5 (float)"]),
        ([*PLAIN, "--gin.BATCH_SIZE=1e400"], ["--gin.BATCH_SIZE", "no value that gin can read"]),
        ([*PLAIN, "--gin.decode_it.gammas=4"], ["expected collections.abc.Sequence[int]"]),
        ([*PLAIN, "--gin.decode_it.gammas=[4, 'x']"], ["Sequence[int]"]),
        ([*PLAIN, "--gin.decode_it.target=@nowhere.Model()"], ["@nowhere.Model()"]),
        ([*PAIR, "--gin.tagret/T5Config.emb_dim=3"],
         ["tagret/T5Config.emb_dim", "used nowhere", "'target/T5Config.emb_dim'"]),
        ([*PAIR, "--gin.EMB_DIM=3"], ["Macro EMB_DIM", "'target/EMB_DIM'"]),
        ([*PLAIN, "--target_gin_file=large.gin", "--draft_gin_file=small.gin",
          "--gin.DROPOUT_RATE=0.0"], ["draft/T5Config.vocab_size (small.gin:8)", "used nowhere"]),
        ([*PAIR, "--gin.target/T5Config.emb_dim=0"], ["T5Config.emb_dim", "found 0"]),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_one_line(desk, arguments, expected):
    line = desk.line(*arguments)
    for part in expected:
        assert part in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TASK = 'x\n", ["bad.gin:1", "not gin's syntax"]),
        ("X = [1,\n", ["bad.gin:", "not gin's syntax"]),
        ("\nevaluate seed 3\n", ["bad.gin:2", "expected ':' or '='"]),
        ("include 'absent.gin'\n", ["'absent.gin'", "included by bad.gin"]),
        ("include 'bad.gin'\n", ["include each other", "bad.gin -> bad.gin"]),
        ("import dumy_run\n", ["bad.gin:1", "no module 'dumy_run'"]),
        (
            DYNAMIC + "dummy_run.decode_ti.seed = 3\n",
            ["bad.gin:3", "no attribute decode_ti", "Did you mean 'decode_it'"],
        ),
        (
            DYNAMIC + "dumy_run.decode_it.seed = 3\n",
            ["bad.gin:3", "'dumy_run'", "Did you mean 'dummy_run'"],
        ),
        (
            DYNAMIC + "dummy_run.other.steps = 3\n",
            ["other.steps (bad.gin:3)", "used nowhere"],
        ),
    ],
)
def test_a_mistake_in_a_file_names_the_line(desk, text, expected):
    desk.write("bad.gin", text)
    line = desk.line(*PLAIN, "--gin_file=bad.gin")
    for part in expected:
        assert part in line


def test_a_user_error_of_the_run_is_one_line_and_others_pass_through(desk):
    desk.call(*PLAIN)
    desk.module.FAIL_WITH[:] = [CheckpointError("No checkpoint", found="nothing")]
    code, _, err = desk.main(*PLAIN)
    assert (code, err) == (2, "error: No checkpoint; found nothing.\n")
    desk.module.FAIL_WITH[:] = [ZeroDivisionError("a fault")]
    with pytest.raises(ZeroDivisionError):
        desk.main(*PLAIN)


def test_output_dir_that_is_a_file(desk):
    desk.write("taken", "")
    code, _, err = desk.main(*PLAIN, "--gin.OUTPUT_DIR='taken'")
    assert code == 2
    assert err.startswith("error: The run's folder cannot be written") and err.count("\n") == 1


def test_modes_without_a_module_are_not_offered(desk, monkeypatch):
    modes = {"evaluate": "dummy_run:decode_it", "infer": "speculative.runs.no_such:infer"}
    monkeypatch.setattr(main_module, "RUN_MODES", modes)
    assert list(main_module.offered_modes()) == ["evaluate"]
    assert "expected one of evaluate." in desk.line("--run_mode=infer")


def test_seqio_folders_are_handed_over(desk, monkeypatch):
    import seqio

    given = []
    monkeypatch.setattr(seqio, "set_tfds_data_dir_override", given.append)
    monkeypatch.setattr(seqio.TaskRegistry, "names", list)  # Their own folders stay as they are.
    monkeypatch.setattr(seqio, "add_global_cache_dirs", given.append)
    desk.call(*PLAIN, "--tfds_data_dir=a", "--seqio_additional_cache_dirs=b,c")
    assert given == ["a", ["b", "c"]]


def test_the_command_itself(desk):
    """As a process: exit codes, and help without JAX or TensorFlow."""
    script = textwrap.dedent("""
        import sys
        from speculative import main
        main.RUN_MODES = {"evaluate": "dummy_run:decode_it"}
        code = main.main()
        heavy = {"jax", "tensorflow", "gin"} & set(sys.modules)
        if "--help" in sys.argv:
            assert not heavy, heavy
        sys.exit(code)
    """)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=desk.path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(desk.path), *sys.path])},
            capture_output=True,
            text=True,
        )

    desk.write("dummy_run.py", RUN_FUNCTION)
    helped = run("--help")
    assert helped.returncode == 0 and "--gin_file" in helped.stdout, helped.stderr
    wrong = run("--run_mode=evaluate", "--gin_file=plain.gin", "--gin.TASK='lm'")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1, wrong.stderr
    desk.write("dummy_run.py", RUN_FUNCTION + "\nFAIL_WITH.append(RuntimeError('fault'))\n")
    broken = run("--run_mode=evaluate", *PLAIN)
    assert broken.returncode == 1 and "Traceback" in broken.stderr
