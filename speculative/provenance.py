"""Where a record comes from: code, command, package versions, machine, seed, configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from speculative.schema import PositiveCount

PACKAGES = (
    "speculative",
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "gin-config",
    "seqio",
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-datasets",
    "sentencepiece",
    "sacrebleu",
    "rouge-score",
    "numpy",
    "etils",
)

_CHECKOUT = Path(__file__).resolve().parent.parent
_GIT_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class Host:
    """The machine that ran the program: CPU model as it names itself, cores the process may use."""

    cpu: str
    cores: PositiveCount


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What is needed to run the same thing again.

    Attributes:
      commit: Git commit of the code, `-dirty` behind it where the checkout differs from it; None
        for an installed package.
      command: the command line, as one would type it in the folder where it was run.
      versions: version by package, `python` among them; only what is installed.
      devices: the accelerators in words, such as `cpu` or `4 x TPU v4`.
      host: the machine.
      seed: seed of the run.
      config_hash: SHA-256 of the operative configuration, None without one.
    """

    commit: str | None
    command: str
    versions: dict[str, str]
    devices: tuple[str, ...]
    host: Host
    seed: int
    config_hash: str | None = None


def provenance(
    *, seed: int, devices: Sequence[str] = (), config_text: str | None = None
) -> Provenance:
    """Collects the provenance of the running process.

    Args:
      seed: seed of the run.
      devices: the devices in words; the caller asks JAX, so that reports need none.
      config_text: the operative configuration, to be hashed.
    """
    return Provenance(
        commit=commit(),
        command=command(),
        versions=versions(),
        devices=tuple(devices),
        host=host(),
        seed=seed,
        config_hash=None if config_text is None else config_hash(config_text),
    )


def config_hash(text: str) -> str:
    """SHA-256 (hexadecimal) of a configuration; trailing blanks and blank lines do not count."""
    lines = [line.rstrip() for line in text.splitlines()]
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()


def commit(checkout: Path = _CHECKOUT) -> str | None:
    """Commit of `checkout`, `-dirty` behind it where its code or settings differ from the commit.

    Changed tracked files count, and new ones under `speculative/` and `configs/`; written results
    (`experiments/*/results/`) do not. None where `checkout` is not the top of a Git checkout: a
    package installed inside somebody else's repository is not that repository's commit.
    """
    top = _git(checkout, "rev-parse", "--show-toplevel")
    head = _git(checkout, "rev-parse", "--verify", "--quiet", "HEAD")
    if not top or not head or Path(top).resolve() != checkout.resolve():
        return None
    changed = _git(
        checkout,
        *("status", "--porcelain", "--untracked-files=no", "--", "."),
        ":(exclude,glob)experiments/*/results/**",
    )
    new = _git(
        checkout, "ls-files", "--others", "--exclude-standard", "--", "speculative", "configs"
    )
    return head if changed == "" and new == "" else f"{head}-dirty"


def command(argv: Sequence[str] | None = None) -> str:
    """The command line, quoted for a shell, without the absolute path of interpreter or script.

    A module run with `-m` is shown so. Paths below the current folder become relative to it.

    Args:
      argv: arguments with the program first; `sys.argv` by default.
    """
    argv = list(sys.argv if argv is None else argv)
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif argv and argv[0].endswith(".py"):
        script = os.path.relpath(argv[0]) if os.path.isabs(argv[0]) else argv[0]
        program = ["python", os.path.basename(script) if script.startswith("..") else script]
    else:
        typed = argv[0] if argv and not argv[0].startswith("-") else ""
        program = [os.path.basename(typed) or "python"]
    here = os.getcwd().rstrip("/")
    arguments = argv[1:]
    if here:
        pattern = re.compile(rf"(?<![\w./~-]){re.escape(here)}(?:/|(?![\w.~-]))")
        arguments = [pattern.sub(_relative, argument) for argument in arguments]
    return shlex.join([*program, *arguments])


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Version of Python and of each of `packages` that is installed (nothing is imported)."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def host() -> Host:
    """This machine's CPU model and the cores that the process may use."""
    cpu = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return Host(cpu or platform.processor() or platform.machine() or "unknown", cores)


def _relative(match: re.Match) -> str:
    return "" if match.group().endswith("/") else "."


def _git(checkout: Path, *arguments: str) -> str | None:
    """Output of a Git command, None where it fails or Git is absent."""
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
