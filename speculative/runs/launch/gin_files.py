"""Gin files as lists of statements, with the scope of a model file written into each.

**Scopes of model files.** A target's and a draft's gin file bind the same names, so each is loaded
under a gin scope of its own, `target` or `draft`. gin cannot load a file under a scope, so the file
is taken apart by gin's own parser and every statement is handed back to gin with the scope written
in: `T5Config.emb_dim = 512` becomes `target/T5Config.emb_dim = 512`, `@T5Config()` becomes
`@target/T5Config()`, and a macro that the file itself sets becomes `target/NAME`, in its definition
and in its uses. A macro that the file uses but does not set, or sets to `%gin.REQUIRED`, stays
global. The command line may say `--gin.target/NAME=...`. Where a model file describes a `T5Config`
and refers to it nowhere, the model of that scope gets it as its argument `config`.

**T5X's names.** `from t5x.examples.t5 import network` means our `models.config`, and
`import __main__` the module of the run, whether or not T5X is installed. What a whole T5X model
file says about training (`MODEL`, `OPTIMIZER`, `VOCABULARY`, `network.Transformer`, ...) is passed
over.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath
from gin import config_parser

from speculative.errors import ConfigError
from speculative.runs.launch.checks import did_you_mean

_PACKAGE = epath.Path(__file__).resolve().parent.parent.parent
PROJECT_PATHS = (str(_PACKAGE.parent), str(_PACKAGE))
"""The checkout's root, then the package, into which a built wheel copies `configs/`."""

T5X_MODULES = {
    "t5x.examples.t5.network": "speculative.models.config",
    "t5x.examples.scalable_t5.network": "speculative.models.config",
}
"""T5X's modules, as model files import them -> ours with the same names in them."""

_NOT_OURS = "Transformer"  # In T5X's `network`; here the configuration itself is the model.
_QUOTES = """A string needs quotes of its own, as in --gin.NAME="'text'\""""


@dataclasses.dataclass(frozen=True)
class Statement:
    """`scope/selector.argument = value`; a macro has no argument and is called `selector`.

    `where` is the file and line, or the flag; `imports` are the import lines of that file so far.
    """

    where: str
    imports: tuple[str, ...]
    scope: str
    selector: str
    argument: str
    value: Any

    @property
    def key(self) -> str:
        """What stands left of the equals sign."""
        name = f"{self.scope}/{self.selector}" if self.scope else self.selector
        return f"{name}.{self.argument}" if self.argument else name

    @property
    def text(self) -> str:
        """The statement, and the imports it needs, for gin to read."""
        return "\n".join([*self.imports, f"{self.key} = {self.value!r}"])


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@name`, `@name()` or `%name` inside a value; its repr is what gin is given to read."""

    source: Source
    sign: str
    name: str
    evaluate: bool = False

    def __repr__(self) -> str:
        scoped = self.source.scope and (self.sign == "@" or self.name in self.source.macros)
        scope = f"{self.source.scope}/" if scoped else ""
        return f"{self.sign}{scope}{self.name}{'()' if self.evaluate else ''}"


class Source(config_parser.ParserDelegate):
    """A reader of the gin files of one scope (`target`, `draft`, or `""` for none).

    Attributes:
      macros: names that live under the scope; to be filled before a statement's text is taken.
      from_t5x: whether the files are T5X's own, with settings of its training in them.
      passed_over: what was left out of T5X's files.
    """

    def __init__(self, scope: str, search_paths: Sequence[str], main_module: str):
        self.scope = scope
        self.macros: set[str] = set()
        self.from_t5x = False
        self.passed_over: list[str] = []
        self._foreign: set[str] = set()  # Prefixes of selectors that T5X alone can resolve.
        self._search_paths = search_paths
        self._main_module = main_module

    def configurable_reference(self, scoped_configurable_name, evaluate):
        """See `gin.config_parser.ParserDelegate`."""
        return Reference(self, "@", scoped_configurable_name, evaluate)

    def macro(self, macro_name):
        """See `gin.config_parser.ParserDelegate`."""
        return Reference(self, "%", macro_name)

    def read(self, path: str, including: tuple[str, ...] = ()) -> Iterator[Statement]:
        """The statements of a file and of what it includes, in order.

        Raises:
          ConfigError: no such file, not gin's syntax, or an import that fails.
        """
        text = self._open(path, including)
        if path in including:
            raise ConfigError(f"Gin files include each other: {' -> '.join((*including, path))}")
        try:
            statements = list(config_parser.ConfigParser(text, self))
        except (SyntaxError, tokenize.TokenError) as error:
            line = getattr(error, "lineno", None) or error.args[-1][0]
            raise ConfigError(f"{path}:{line}: {_said(error)}") from None
        imports: list[str] = []
        self.from_t5x |= bool(self.scope) and any(map(_is_t5x_training, statements))
        for statement in statements:
            where = f"{path}:{statement.location.line_num}"
            if isinstance(statement, config_parser.ImportStatement):
                imports += self._import(statement, where)
            elif isinstance(statement, config_parser.IncludeStatement):
                yield from self.read(statement.filename, (*including, path))
            elif isinstance(statement, config_parser.BindingStatement):
                yield from self._keep(Statement(where, tuple(imports), *statement[:4]))

    def read_flag(self, binding: str) -> Iterator[Statement]:
        """The one statement of a `NAME = VALUE` from the command line.

        Raises:
          ConfigError: not gin's syntax.
        """
        where = f"--gin.{binding.partition('=')[0].strip()}"
        try:
            statements = list(config_parser.ConfigParser(binding, self))
        except (SyntaxError, tokenize.TokenError) as error:
            value = binding.partition("=")[2].strip()
            raise ConfigError(f"{where}={value}: {_said(error)}", mend=_QUOTES) from None
        for statement in statements:
            if not isinstance(statement, config_parser.BindingStatement):
                raise ConfigError(f"--gin_bindings={binding}", expected="NAME = VALUE")
            yield Statement(where, (), *statement[:4])

    def _open(self, path: str, including: tuple[str, ...]) -> str:
        absolute = os.path.isabs(path) or "://" in path
        for folder in [""] if absolute else self._search_paths:
            candidate = epath.Path(os.path.join(folder, path))
            if candidate.is_file():
                return candidate.read_text()
        known = [p for root in PROJECT_PATHS for p in epath.Path(root).glob("configs/*/*.gin")]
        raise ConfigError(
            f"Gin file '{path}'" + (f", included by {including[-1]}," if including else ""),
            expected="a file" if absolute else f"a file under {', '.join(self._search_paths)}",
            found="none",
            mend=did_you_mean(path, [str(p.relative_to(p.parents[2])) for p in known]),
        )

    def _import(self, statement: config_parser.ImportStatement, where: str) -> list[str]:
        module, name = statement.module, statement.bound_name()
        ours = T5X_MODULES.get(module, self._main_module if module == "__main__" else None)
        if module.startswith("__gin__."):
            return [statement.format()]
        # T5X's model files import SeqIO for their vocabulary; here that is the task's.
        if ours is None and self.from_t5x and module.split(".")[0] in ("t5x", "seqio"):
            self._foreign.add(name)
            return []
        if module in T5X_MODULES:
            self._foreign.add(f"{name}.{_NOT_OURS}")
        import_module(ours or module, where)
        if ours is None:
            return [statement.format()]
        parent, _, leaf = ours.rpartition(".")
        return [f"from {parent} import {leaf} as {name}" if parent else f"import {leaf} as {name}"]

    def _keep(self, statement: Statement) -> list[Statement]:
        names = [r.name.split("/")[-1] for r in _references(statement.value) if r.sign == "@"]
        for name in (statement.selector, *names):
            if any(name == f or name.startswith(f + ".") for f in self._foreign):
                self.passed_over.append(statement.selector)
                return []
        return [statement]


def is_required(value: Any) -> bool:
    """Whether a parsed value is `%gin.REQUIRED`: to be set by somebody else."""
    return isinstance(value, Reference) and value.sign == "%" and value.name == "gin.REQUIRED"


def import_module(module: str, where: str) -> None:
    """Import what `where` asks for.

    Raises:
      ConfigError: the module, or a package that it needs, is not there.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if missing == module or module.startswith(missing + "."):
            raise ConfigError(f"{where}: there is no module '{module}'") from None
        if missing.split(".")[0] == "speculative":
            raise
        raise ConfigError(
            f"{where}: '{module}' needs the package '{missing}', which is not installed",
            mend='pip install "speculative[all]" brings every package that this project uses',
        ) from None


def _is_t5x_training(statement: Any) -> bool:
    """Whether it imports a part of T5X that has no counterpart here."""
    module = getattr(statement, "module", "")
    return module.split(".")[0] == "t5x" and module not in T5X_MODULES


def _references(value: Any) -> Iterator[Reference]:
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _references(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _references(item)


def _said(error: Exception) -> str:
    # gin puts the telling part, "Failed to parse token", on its second line.
    said = str(getattr(error, "msg", None) or error.args[0]).split("\n")[-1].strip().rstrip(".")
    return f"not gin's syntax: {said}"
