"""What imports what, seen from outside: in a fresh process, on `sys.modules`."""

import json
import pathlib
import pkgutil
import subprocess
import sys

import speculative

# Everything that a machine which only decodes needs.
CORE = (
    "types",
    "sampling",
    "partitioning",
    "verification",
    "decoding",
    "drafts",
    "models",
    "checkpoints",
)
WITHOUT_JAX = ("analysis", "records", "reports")
HEAVY = ("tensorflow", "tensorflow_datasets", "tensorflow_text", "seqio", "gin", "t5x")


def modules_of(*names: str) -> list[str]:
    """The modules of the package that are called, or are within, one of `names`."""
    found = pkgutil.walk_packages(speculative.__path__, "speculative.")
    return [m.name for m in found if m.name.split(".")[1] in names]


def brought_in(modules: list[str]) -> set[str]:
    """Top-level names in `sys.modules` of a fresh process that has imported `modules`."""
    code = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps([name for name in sys.modules if '.' not in name]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(modules)],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(speculative.__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_itself_brings_nothing():
    assert not brought_in(["speculative"]) & {"jax", *HEAVY}


def test_decoding_needs_no_tensorflow_seqio_or_gin():
    core = modules_of(*CORE)
    assert core
    assert not brought_in(["speculative", *core]) & set(HEAVY)


def test_analysis_and_reports_need_no_jax():
    assert not brought_in(modules_of(*WITHOUT_JAX)) & {"jax", "flax", *HEAVY}


def test_the_entrance_needs_neither_until_it_launches():
    assert not brought_in(["speculative.main"]) & {"jax", *HEAVY}
