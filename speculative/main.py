r"""The one entrance: `python -m speculative.main --run_mode=MODE --gin_file=... --gin.NAME=VALUE`.

Example, on the shipped pair of models:

    python -m speculative.main --run_mode=evaluate \
        --gin_file=configs/runs/quickstart.gin --gin.OUTPUT_DIR="'runs/quickstart'"

Later gin files override earlier ones and `--gin.NAME=VALUE` overrides all. A string needs quotes
of its own inside those of the shell. Exit codes: 0 done; 2 a mistake in what was given, told in one
line; 1 a fault of the program, with its stack trace.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from absl import flags
from absl import logging as absl_logging

from speculative.errors import ConfigError, UserError

RUN_MODES = {
    mode: f"speculative.runs.{mode}:{mode}"
    for mode in ("evaluate", "infer", "train", "calibrate", "benchmark", "plan")
}
"""Run mode -> `module:function` of the function that gin configures and the launcher calls."""


def offered_modes() -> dict[str, str]:
    """The entries of `RUN_MODES` whose module is there (looked up, not imported)."""
    found = {}
    for mode, function in RUN_MODES.items():
        try:
            spec = importlib.util.find_spec(function.partition(":")[0])
        except ModuleNotFoundError:
            spec = None
        if spec is not None:
            found[mode] = function
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the given arguments (default: the command line's) and return the exit code.

    A `UserError` becomes one line on stderr and 2; any other exception passes through.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        values = _parse(arguments)
        if values.help:
            print(_help(values))
            return 0
        _launch(values)
    except UserError as error:
        # gin appends lines about where it was; the first line is the error's own.
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 130
    return 0


def rewrite_gin_arguments(arguments: Sequence[str]) -> list[str]:
    """`--gin.NAME=VALUE` -> `--gin_bindings=NAME = VALUE`, as T5X does.

    Raises:
      ConfigError: a `--gin.NAME` without a value.
    """
    rewritten = []
    for argument in arguments:
        if argument.startswith(("--gin.", "-gin.")):
            name, equals, value = argument.lstrip("-")[len("gin.") :].partition("=")
            if not equals or not name or not value:
                raise ConfigError(
                    f"The flag {argument}",
                    expected="--gin.NAME=VALUE",
                    mend="""Write no space around '='; strings need quotes, --gin.X="'text'" """,
                )
            argument = f"--gin_bindings={name} = {value}"
        rewritten.append(argument)
    return rewritten


def _parse(arguments: Sequence[str]) -> flags.FlagValues:
    values = _flags()
    try:
        rest = values(["speculative.main", *rewrite_gin_arguments(arguments)])[1:]
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split()), mend="--help lists the flags") from None
    if rest:
        raise ConfigError(
            f"The argument '{rest[0]}' is not a flag",
            expected="only flags",
            mend="Flags begin with --; a value with spaces needs quotes",
        )
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Libraries read absl's own flags; leave them at their values.
    return values


def _flags() -> flags.FlagValues:
    """A flag table of this call's own, so that `main` can be called many times in a process."""
    v = flags.FlagValues()
    texts = {
        "gin_file": "A gin file; may be given many times, later ones override earlier ones.",
        "target_gin_file": "A gin file of the target model, loaded under the gin scope 'target'; "
        "may be given many times.",
        "draft_gin_file": "A gin file of the draft model, loaded under the gin scope 'draft'; "
        "may be given many times.",
        "gin_bindings": "One binding, 'NAME = VALUE'; --gin.NAME=VALUE is short for it. "
        "May be given many times.",
    }
    for name, text in texts.items():
        flags.DEFINE_multi_string(name, [], text, flag_values=v, module_name="")
    lists = {
        "gin_search_paths": (["."], "Folders in which gin files are looked for, before the "
                             "project's own."),
        "seqio_additional_cache_dirs": ([], "Folders in which SeqIO looks for cached tasks."),
    }  # fmt: skip
    for name, (default, text) in lists.items():
        flags.DEFINE_list(name, default, text, flag_values=v, module_name="")
    strings = {
        "run_mode": "What to run.",
        "tfds_data_dir": "Where TensorFlow Datasets keeps prepared data, for every task.",
        "coordinator_address": "host:port of process 0 of a run on many hosts, or 'auto' where "
        "the cluster tells JAX by itself (TPU pods, Slurm).",
    }
    for name, text in strings.items():
        flags.DEFINE_string(name, None, text, flag_values=v, module_name="")
    numbers = {
        "process_count": (None, "How many processes a run on many hosts has."),
        "process_index": (None, "Which of them this one is, from 0."),
        "initialization_timeout": (300, "Seconds to wait for the other processes."),
    }
    for name, (default, text) in numbers.items():
        flags.DEFINE_integer(name, default, text, lower_bound=0, flag_values=v, module_name="")
    flags.DEFINE_bool(
        "dry_run", False, "Check and print the configuration, then stop.", flag_values=v,
        module_name="",
    )  # fmt: skip
    flags.DEFINE_bool(
        "help", False, "Print this and stop.", flag_values=v, module_name="", short_name="h"
    )
    # --logtostderr, --verbosity and the like, which T5X's commands carry.
    for flag in flags.FLAGS.flags_by_module_dict().get(absl_logging.__name__, []):
        if flag.name not in v:
            v[flag.name] = flag
    return v


def _help(values: flags.FlagValues) -> str:
    hidden = set(flags.FLAGS.flags_by_module_dict().get(absl_logging.__name__, []))
    lines = [(__doc__ or "").strip(), "", "Flags:"]
    for name in sorted(values):
        flag = values[name]
        if flag in hidden or name != flag.name:
            continue
        choices = "{" + ",".join(sorted(offered_modes())) + "}" if name == "run_mode" else ""
        default = "" if flag.default in (None, [], False) else f" Default: {flag.default_as_str}."
        lines += [f"  --{name}{'=' + choices if choices else ''}", f"      {flag.help}{default}"]
    lines.append("  and absl's logging flags (--verbosity, --logtostderr, ...).")
    return "\n".join(lines)


def _launch(values: flags.FlagValues) -> None:
    modes = offered_modes()
    if values.run_mode not in modes:
        raise ConfigError(
            f"--run_mode={values.run_mode}" if values.run_mode else "--run_mode is not given",
            expected=f"one of {', '.join(sorted(modes))}",
        )
    try:
        from speculative.runs import launch
    except ModuleNotFoundError as error:
        if error.name != "gin":
            raise
        raise ConfigError(
            "The launcher needs gin-config", mend='pip install "speculative[launch]"'
        ) from None
    launch.launch(
        launch.Request(
            run_mode=values.run_mode,
            function=modes[values.run_mode],
            gin_files=tuple(values.gin_file),
            target_gin_files=tuple(values.target_gin_file),
            draft_gin_files=tuple(values.draft_gin_file),
            bindings=tuple(values.gin_bindings),
            search_paths=tuple(values.gin_search_paths),
            dry_run=values.dry_run,
            tfds_data_dir=values.tfds_data_dir,
            cache_dirs=tuple(values.seqio_additional_cache_dirs),
            hosts=launch.Hosts(
                values.coordinator_address,
                values.process_count,
                values.process_index,
                values.initialization_timeout,
            ),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
