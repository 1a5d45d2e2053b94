"""Keeps TensorFlow, which only feeds data here, off every accelerator.

TensorFlow takes all of a GPU's memory when it first looks at it. The guard costs nothing until
somebody imports TensorFlow, and then hides the devices before anything can have used them.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Generator
from types import ModuleType


class _HidingLoader(importlib.abc.Loader):
    """Executes TensorFlow with its own loader, then hides the accelerators from it."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _quiet():
            self._loader.exec_module(module)
            _hide(module)

    def __getattr__(self, name: str):
        # Whatever else the import system or a resource reader asks of a loader.
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "tensorflow":
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _HidingLoader(spec.loader)
                return spec
        return None


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    """Keeps back what is written to stderr, below Python too, unless an exception passes through.

    Before its logging is set up TensorFlow tells of absent CUDA libraries whatever the log level.
    """
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            kept.seek(0)
            os.write(own, kept.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)


def _hide(tensorflow: ModuleType) -> None:
    for kind in ("GPU", "TPU"):
        tensorflow.config.set_visible_devices([], kind)


def hide_accelerators_from_tensorflow() -> None:
    """From now on TensorFlow sees the CPU only, whether it is imported already or later.

    Calling it twice does no harm.
    """
    # TensorFlow's start-up notices would bury the one line that an error is meant to be.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "tensorflow" in sys.modules:
        _hide(sys.modules["tensorflow"])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
