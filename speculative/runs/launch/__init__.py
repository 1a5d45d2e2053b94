"""The launcher: gin files and flags in, one call of a run function out.

The only place that knows gin and `jax.distributed`. `gin_files` reads gin files, `configuration`
binds and checks them, and this module does what surrounds a run: joining the other hosts, keeping
TensorFlow off the accelerators, and writing `config.gin`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator

import gin
from etils import epath

from speculative.errors import ConfigError, UserError
from speculative.files import write_text_atomic
from speculative.runs.launch.configuration import Configuration
from speculative.runs.launch.gin_files import import_module
from speculative.runs.launch.tensorflow_guard import hide_accelerators_from_tensorflow

OUTPUT_ARGUMENTS = ("output_dir", "model_dir")
"""What run functions call the folder that they write; T5X's training has the second name."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """A run on many hosts: what `jax.distributed.initialize` is told. Timeout in seconds.

    The address is `host:port` of process 0, `auto` where the cluster tells JAX by itself, or None
    for a run on this host alone.
    """

    coordinator_address: str | None = None
    process_count: int | None = None
    process_index: int | None = None
    initialization_timeout: int = 300


@dataclasses.dataclass(frozen=True)
class Request:
    """One launch: the parsed flags of `speculative.main` (see its help for their meaning).

    `function` is `module:name`; each of `bindings` is `NAME = VALUE`.
    """

    run_mode: str
    function: str
    gin_files: tuple[str, ...] = ()
    target_gin_files: tuple[str, ...] = ()
    draft_gin_files: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()
    search_paths: tuple[str, ...] = (".",)
    dry_run: bool = False
    tfds_data_dir: str | None = None
    cache_dirs: tuple[str, ...] = ()
    hosts: Hosts = Hosts()


def launch(request: Request) -> None:
    """Configure the run function of `request` by gin, write `config.gin`, and call it.

    `config.gin` goes to the run function's argument `output_dir` (or `model_dir`), if it has one,
    before the run starts; on many hosts only the first process writes it. A dry run prints it
    instead.

    Raises:
      ConfigError: anything in the flags or gin files that cannot be meant.
      UserError: the output folder cannot be written, or the run's own.
    """
    hide_accelerators_from_tensorflow()
    first = request.dry_run or _join_hosts(request.hosts)
    function = _import_function(request)
    configuration = Configuration(
        function,
        main_module=request.function.partition(":")[0],
        model_files={"target": request.target_gin_files, "draft": request.draft_gin_files},
        gin_files=request.gin_files,
        bindings=request.bindings,
        search_paths=request.search_paths,
    )
    text = configuration.operative()
    output_dir = next(filter(None, map(configuration.value, OUTPUT_ARGUMENTS)), None)
    if request.dry_run:
        where = f", writing to {output_dir}" if output_dir else ""
        print(f"# --run_mode={request.run_mode} would call {request.function}{where}, with:\n")
        print(text)
        return
    _prepare_seqio(request)
    arguments = gin.get_bindings(function)
    with _written(output_dir, text) if output_dir and first else contextlib.nullcontext():
        function(**arguments)


@contextlib.contextmanager
def _written(output_dir: str, text: str) -> Iterator[None]:
    """`config.gin` lies in the folder before the run starts.

    If a mistake is found before the run has written anything, the `config.gin` of the results that
    were there already is put back.
    """
    folder = epath.Path(output_dir)
    path = folder / "config.gin"

    def content():
        return {p.name: (p.stat().length, p.stat().mtime) for p in folder.iterdir()}

    try:
        earlier = path.read_text() if path.exists() else None
        write_text_atomic(path, text)
        before = content()
    except OSError as error:
        raise UserError(
            "The run's folder cannot be written",
            expected="a folder, or a place for one",
            found=f"{output_dir} ({error.strerror or error})",
        ) from None
    try:
        yield
    except UserError:
        if earlier is not None and content() == before:
            write_text_atomic(path, earlier)
        raise


def _import_function(request: Request) -> Callable:
    module, _, name = request.function.partition(":")
    import_module(module, f"--run_mode={request.run_mode}")
    return getattr(importlib.import_module(module), name)


def _join_hosts(hosts: Hosts) -> bool:
    """Initialise `jax.distributed` if asked to; whether this is the first process."""
    count, index = hosts.process_count, hosts.process_index
    if hosts.coordinator_address is None:
        if count is not None or index is not None:
            raise ConfigError(
                "--process_count and --process_index describe a run on many hosts",
                expected="--coordinator_address with them",
                found="none",
            )
        return True
    if hosts.coordinator_address != "auto" and (
        count is None or index is None or not 0 <= index < count
    ):
        raise ConfigError(
            "--coordinator_address",
            expected="0 <= --process_index < --process_count beside it",
            found=f"--process_index={index} --process_count={count}",
            mend="--coordinator_address=auto asks the cluster for all three",
        )
    import jax

    told = {"initialization_timeout": hosts.initialization_timeout}
    if hosts.coordinator_address != "auto":
        told |= {
            "coordinator_address": hosts.coordinator_address,
            "num_processes": count,
            "process_id": index,
        }
    try:
        jax.distributed.initialize(**told)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"The hosts could not be joined: {str(error).splitlines()[0]}",
            mend="Check --coordinator_address and that every process is started",
        ) from error
    return jax.process_index() == 0


def _prepare_seqio(request: Request) -> None:
    """Hand the data folders of the flags to SeqIO, which is imported only if there are any."""
    if not request.tfds_data_dir and not request.cache_dirs:
        return
    import_module("seqio", "--tfds_data_dir and --seqio_additional_cache_dirs")
    import seqio

    if request.tfds_data_dir:
        from speculative.data import tasks

        tasks.set_tfds_data_dir(request.tfds_data_dir)
    if request.cache_dirs:
        seqio.add_global_cache_dirs(list(request.cache_dirs))
