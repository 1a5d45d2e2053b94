"""Binds what gin files and flags say, and accepts no typing error in silence.

References decide, before the run, what it can reach: the library holds no gin decorators, so gin
hands values to the run function and to what references lead to, and to nothing else. Whatever is
bound but not reached stops the launch, and so does what is reached but not set.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
from gin import config as gin_config

from speculative.errors import ConfigError
from speculative.runs.launch import checks
from speculative.runs.launch.gin_files import (
    PROJECT_PATHS,
    T5X_MODULES,
    Source,
    Statement,
    is_required,
)

_MACRO = "gin.macro"
_Key = tuple[str, str]  # (scope, complete selector), as gin keys its bindings.


class _Unknown(Exception):
    """A value that only a call of a configurable can tell."""


class Configuration:
    """gin's (global) configuration for one run function, filled, checked and ready.

    Order of binding: target's files, draft's files, gin files, command line; later ones override.

    Raises:
      ConfigError: a file or statement that gin cannot read; a name or argument that does not
        exist; something bound and used nowhere; something required and not set; a value that
        cannot be of its argument's type.
    """

    def __init__(
        self,
        function: Callable,
        *,
        main_module: str,
        model_files: Mapping[str, Sequence[str]],
        gin_files: Sequence[str],
        bindings: Sequence[str],
        search_paths: Sequence[str] = (".",),
    ):
        gin.clear_config()
        _forget_imports()
        self._function = function
        if gin_config._inverse_lookup(function) is None:
            gin.register(function, module=function.__module__)
        self._run: _Key = ("", gin_config._inverse_lookup(function).selector)
        self._where: dict[tuple[str, str, str], str] = {}
        self._history: dict[_Key, dict[str, list[Any]]] = {}  # Overridden values too.
        self._passed_over: list[str] = []

        paths = tuple(dict.fromkeys((*search_paths, *PROJECT_PATHS)))
        models = {Source(scope, paths, main_module): files for scope, files in model_files.items()}
        plain = Source("", paths, main_module)
        of_models = {m: [s for f in files for s in m.read(f)] for m, files in models.items()}
        others = [s for file in gin_files for s in plain.read(file)]
        others += [s for binding in bindings for s in plain.read_flag(binding)]
        for model, statements in of_models.items():
            set_outside = [s.selector for s in others if s.scope == model.scope and not s.argument]
            set_inside = [s.key for s in statements if not s.argument and not is_required(s.value)]
            model.macros.update(set_outside, set_inside)
        for model, statements in of_models.items():
            self._passed_over += model.passed_over
            for statement in statements:
                if statement.argument or statement.key in model.macros:
                    scope = "/".join(filter(None, (model.scope, statement.scope)))
                    statement = dataclasses.replace(statement, scope=scope)
                self._bind(statement)
        already: set[str] = set()
        for statement in others:
            # A run file names what it requires; files before it may have set that.
            if not (is_required(statement.value) and statement.key in already):
                self._bind(statement)
                already.add(statement.key)
        for model in models:
            self._give_config(model.scope)

        self._reached, self._called = _reach(self._run, gin_config._CONFIG)
        # What was overridden is no typing error, nor is what it led to.
        self._reachable, _ = _reach(self._run, self._history)
        self._check_used({m.scope for m in models if m.from_t5x})
        self._check_set()
        self._check_types()
        if self._passed_over:
            names = ", ".join(sorted(set(self._passed_over)))
            print(f"note: settings of T5X's training are passed over: {names}", file=sys.stderr)

    def value(self, argument: str) -> Any:
        """What the run function's `argument` will be; None if it has no such argument."""
        known = {**checks.literal_defaults(self._function), **self._reached[self._run]}
        return copy.deepcopy(known.get(argument))

    def operative(self) -> str:
        """All that the run can use, defaults included, as text that gin reads back."""
        config = {}
        for (scope, selector), bound in self._reached.items():
            wrapped = gin_config._REGISTRY[selector].wrapped
            if wrapped is not gin_config._retrieve_constant:
                config[scope, selector] = {**checks.literal_defaults(wrapped), **bound}
        return gin_config._config_str(config, max_line_length=100)

    def _bind(self, statement: Statement) -> None:
        last = statement.selector.split(".")[-1]
        self._where[statement.scope, last, statement.argument] = statement.where
        try:
            gin.parse_config(statement.text)
        except (ValueError, NameError, AttributeError, SyntaxError) as error:
            said = str(error).split("\n")[0]
            if said.startswith("malformed node"):  # Of Python's parser, which gin asks.
                said = "no value that gin can read (a number too large for a float, for example)"
            raise ConfigError(
                f"{statement.where}: {re.sub(r' from .*?>', '', said).replace('<', '')}",
                mend=_near(statement, said),
            ) from None
        for (scope, selector), bound in gin_config._CONFIG.items():
            macro = selector == _MACRO and scope == statement.key
            other = scope == statement.scope and selector.split(".")[-1] == last
            argument = "value" if macro else statement.argument
            if (macro or other) and argument in bound:
                history = self._history.setdefault((scope, selector), {})
                history.setdefault(argument, []).append(bound[argument])

    def _give_config(self, scope: str) -> None:
        """Hand a model file's configuration to the model, if nobody has.

        A pasted block only describes a `T5Config`. Whatever the run reaches under the model's scope
        and has an argument `config` that is not bound gets it.
        """
        described = [
            selector
            for bound_scope, selector in gin_config._CONFIG
            if bound_scope == scope
            and gin_config._REGISTRY[selector].wrapped.__module__ in T5X_MODULES.values()
        ]
        reached, _ = _reach(self._run, self._history)
        if len(described) != 1 or (scope, described[0]) in reached:
            return
        reference = gin_config.ConfigurableReference(f"{scope}/{described[0]}", True)
        for (reached_scope, selector), bound in reached.items():
            takes = checks.argument_names(gin_config._REGISTRY[selector].wrapped)
            if reached_scope == scope and "config" in takes and "config" not in bound:
                gin_config._CONFIG.setdefault((scope, selector), {})["config"] = reference
                self._history.setdefault((scope, selector), {})["config"] = [reference]

    def _place(self, scope: str, selector: str, argument: str) -> tuple[str, str]:
        """(the binding as a user would write it, where it was written)."""
        if selector == _MACRO:
            outer, _, name = scope.rpartition("/")
            return f"Macro {scope}", self._where.get((outer, name, ""), "?")
        last = selector.split(".")[-1]
        prefix = f"{scope}/" if scope else ""
        return f"{prefix}{last}.{argument}", self._where.get((scope, last, argument), "?")

    def _check_used(self, t5x_scopes: set[str]) -> None:
        referenced = {
            "/".join(r.scopes)
            for r in gin_config.iterate_references(self._history)
            if r.configurable.selector == _MACRO
        }
        used = {
            (outer, selector)
            for scope, selector in self._reachable
            for outer in _outer_scopes(scope)
        }
        for (scope, selector), bound in gin_config._CONFIG.items():
            macro, configurable = selector == _MACRO, gin_config._REGISTRY[selector]
            if (scope, selector) in used or (macro and scope in referenced):
                continue
            # Somebody else's @gin.configurable is called from Python, where none can see it.
            decorated = not macro and configurable.import_source is None
            if decorated and configurable.wrapped is not self._function:
                continue
            for name, where in (self._place(scope, selector, argument) for argument in bound):
                if scope.split("/")[0] in t5x_scopes:
                    self._passed_over.append(name.removeprefix("Macro "))
                    continue
                known = [self._place(*k, a)[0] for k in used for a in self._history.get(k, ())]
                near = checks.did_you_mean(*((scope, referenced) if macro else (name, known)))
                raise ConfigError(
                    f"{name} ({where}) is bound and used nowhere in this run",
                    mend=near or "Remove it, or use it",
                )

    def _check_set(self) -> None:
        macros = [
            scope
            for (scope, selector), bound in self._reached.items()
            if selector == _MACRO and ("value" not in bound or _is_required(bound["value"]))
        ]
        if macros:
            raise ConfigError(
                f"Required and not set: {', '.join(sorted(macros))}",
                mend="Give " + " ".join(f"--gin.{name}=..." for name in sorted(macros)),
            )
        for (scope, selector), bound in self._reached.items():
            if selector == _MACRO:
                continue
            wrapped = gin_config._REGISTRY[selector].wrapped
            unset = [a for a, value in bound.items() if _is_required(value)]
            if (scope, selector) in self._called:
                unset += checks.unset_arguments(wrapped, bound)
            if unset and wrapped is not gin_config._retrieve_constant:
                names = ", ".join(self._place(scope, selector, a)[0] for a in unset)
                given = "" if self._where else "Give a run file with --gin_file=..."
                raise ConfigError(f"Required and not set: {names}", mend=given)

    def _check_types(self) -> None:
        for (scope, selector), bound in self._reached.items():
            wrapped = gin_config._REGISTRY[selector].wrapped
            for argument, value in bound.items() if selector != _MACRO else ():
                try:
                    plain = _plain(value)
                except _Unknown:
                    continue
                wanted = checks.type_mismatch(wrapped, argument, plain)
                if wanted:
                    name, where = self._place(scope, selector, argument)
                    via = (
                        f" = {value}" if isinstance(value, gin_config.ConfigurableReference) else ""
                    )
                    raise ConfigError(
                        f"{name}{via} ({where})",
                        expected=wanted,
                        found=f"{plain!r} ({type(plain).__name__})",
                    )


def _reach(run: _Key, config: Mapping[_Key, Mapping[str, Any]]) -> tuple[dict, set[_Key]]:
    """What `run` can reach by the references in `config`.

    Returns:
      Values by configurable (and the scope that it is called in), inner scopes' over outer ones';
      and the configurables that are surely called, not only handed on.
    """
    reached: dict[_Key, dict[str, Any]] = {}
    called = {run}
    queue = [run]
    while queue:
        scope, selector = queue.pop()
        if (scope, selector) in reached:
            continue
        values: dict[str, Any] = {}
        for outer in _outer_scopes(scope):
            values.update(config.get((outer, selector), {}))
        reached[scope, selector] = values
        for reference in gin_config.iterate_references(values):
            key = ("/".join(reference.scopes) or scope, reference.configurable.selector)
            queue.append(key)
            if reference.evaluate:
                called.add(key)
    return reached, called


def _outer_scopes(scope: str) -> Iterator[str]:
    """`""`, `"a"`, `"a/b"` for `"a/b"`: where gin looks for bindings, in its order."""
    parts = scope.split("/") if scope else []
    for i in range(len(parts) + 1):
        yield "/".join(parts[:i])


def _is_required(value: Any) -> bool:
    return (
        isinstance(value, gin_config.ConfigurableReference)
        and value.configurable.wrapped is gin_config._retrieve_constant
        and value.scopes == ["gin.REQUIRED"]
    )


def _plain(value: Any) -> Any:
    """`value` with its macros followed, or `_Unknown` if a call would have to be made."""
    if isinstance(value, gin_config.ConfigurableReference):
        bound = gin_config._CONFIG.get(("/".join(value.scopes), _MACRO), {})
        if value.configurable.selector != _MACRO or "value" not in bound:
            raise _Unknown
        return _plain(bound["value"])
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(v) for v in value)
    return value


def _forget_imports() -> None:
    """Take back what gin files before registered, under the names that those files gave it.

    A class is registered once; a file that names it otherwise would not find it any more.
    """
    for selector, known in list(gin_config._REGISTRY.items()):
        if known.import_source is not None:
            gin_config._REGISTRY.pop(selector)
            gin_config._INVERSE_REGISTRY.pop(known.wrapped, None)


def _near(statement: Statement, said: str) -> str:
    """A suggestion for a name that gin did not find."""
    names = re.findall(r"'([^'\s]*)'", said)  # Not the apostrophe of "doesn't have a".
    if "parameter named" in said:
        function = gin_config._REGISTRY.get_match(statement.selector)
        known = checks.argument_names(function.wrapped) if function else []
        return checks.did_you_mean(names[-1], known)
    if "no attribute" in said:
        module = sys.modules.get(next((n for n in names if n in sys.modules), ""))
        wanted = said.split("no attribute ")[-1].rstrip(".")
        own = [n for n, v in vars(module).items() if callable(v)] if module else []
        return checks.did_you_mean(wanted, own)
    if "import statement" in said:
        return checks.did_you_mean(names[0], [i.split()[-1] for i in statement.imports])
    if "No configurable matching" in said:
        every = {s.split(".")[-1] for s, _ in gin_config._REGISTRY.items()}
        near = checks.did_you_mean(names[-1].strip("@()").split(".")[-1], every)
        return near or "A gin file must import the module that it is in"
    return ""
