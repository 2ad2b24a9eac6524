"""Flags from elsewhere: a YAML file (`--config FILE`) and the environment (`PAGERUNNER_*`). The command line beats the
environment, which beats the file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pagerunner import limits
from pagerunner.cli.options import SPEC_FLAGS, Parser
from pagerunner.errors import ConfigError
from pagerunner.vllm_flags import TOGETHER, screen

PREFIX = "PAGERUNNER_"
_NO_FLAGS = (
    "CPU_KERNELS",
    "HOST_IP",
    "PP_LAYER_PARTITION",
    "RANKS_SHARE_DEVICES",
)  # variables that the engine reads itself
_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
# What Kubernetes sets in every pod for a service that is called pagerunner.
_KUBERNETES = re.compile(r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")


class ConfiguredParser(Parser):
    """A parser with `--config`, whose flags may also stand in that file and in the environment."""

    def __init__(self, prog: str, description: str, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(prog, description)
        self._environ = os.environ if environ is None else environ
        text = (
            "YAML file of flags without the dashes, such as `max-model-len: 8192`; $PAGERUNNER_MAX_MODEL_LEN beats it"
        )
        self.add_argument("--config", metavar="FILE", help=text)

    def parse(self, argv: Sequence[str], *, tell: bool = True, whole: bool = True) -> argparse.Namespace:
        """Parse `argv`, with what the environment and the file say of flags that it doesn't have.

        Raises:
            ConfigError: a flag, key or variable is unknown, or has a value that can't be read; it says where.
        """
        alone = super().parse(argv, tell=False, whole=False)  # for `--config`; the whole is parsed in the end
        found: dict[str, list[str]] = {}
        variables = self._variables()
        path = alone.config or variables.pop("config", None)
        if path:
            found |= self._words(f"{path}: ", _read(path), "key")
        found |= self._words("the environment: ", variables, "variable")
        given = {name for word in argv if (name := self._option(word)) is not None}
        if getattr(alone, "model_tag", None) is not None:
            given.add("model")
        more = [word for dest, one in found.items() if dest not in given for word in one]
        end = [*argv, "--"].index("--")
        return super().parse([*argv[:end], *more, *argv[end:]], tell=tell, whole=whole)

    def _option(self, word: str) -> str | None:
        """The destination of the flag that `word` begins with."""
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in SPEC_FLAGS:
            name = "--speculative-config"
        if name in TOGETHER:
            return name.removeprefix("--no-").removeprefix("--").replace("-", "_")
        return next((action.dest for action in self._actions if name in action.option_strings), None)

    def _variables(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for variable, value in self._environ.items():
            name = variable.removeprefix(PREFIX)
            if name == variable or not value or _KUBERNETES.fullmatch(name) or variable.startswith(limits.PREFIX):
                continue
            if name in _NO_FLAGS or (name == "PORT" and "://" in value):  # the latter is Kubernetes' too
                continue
            found[name.lower()] = value
        return found

    def _words(self, where: str, values: Mapping[str, Any], what: str) -> dict[str, list[str]]:
        """For each destination the words that set it."""
        actions = {action.dest: action for action in self._actions if action.option_strings and action.dest != "help"}
        found: dict[str, list[str]] = {}
        for key, value in values.items():
            dest = str(key).replace("-", "_")
            flag = "--" + dest.replace("_", "-")
            try:
                if value is None and flag in TOGETHER:
                    continue
                if dest not in actions or dest == "config":
                    words = [f"{flag}={value if isinstance(value, str) else json.dumps(value, default=str)}"]
                    screened = screen(words, [f"--{name.replace('_', '-')}" for name in actions], whole=False)
                    if flag in TOGETHER:
                        found[str(self._option(flag))] = words
                        continue
                    for word in screened:
                        if (meant := self._option(word)) in (None, "config"):
                            raise ConfigError(self._unknown(what, str(key), actions))
                        if meant == "speculative_config":  # each sets another of its keys
                            found[meant] = [*found.get(meant, ()), word]
                        found.setdefault(str(meant), [word])
                    continue
                if value is not None:
                    words = _flag_words(actions[dest], value)
                    super().parse(words)  # so that a bad value is reported with its place
                    found[dest] = [*found.get(dest, ()), *words] if dest == "speculative_config" else words
            except ConfigError as error:
                raise ConfigError(f"{where}{error}") from None
        return found

    @staticmethod
    def _unknown(what: str, key: str, actions: Mapping[str, object]) -> str:
        def shown(dest: str) -> str:
            return PREFIX + dest.upper() if what == "variable" else dest.replace("_", "-")

        near = difflib.get_close_matches(key.replace("-", "_"), [name for name in actions if name != "config"], n=1)
        hint = f"; did you mean {shown(near[0])}?" if near else "."
        return f"unknown {what} {shown(key) if what == 'variable' else key}{hint}"


def _flag_words(action: argparse.Action, value: Any) -> list[str]:
    """The words that give `action` its value from YAML or a text. Raises ConfigError for a value of the wrong kind."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        truth = value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
        if truth is None:
            raise ConfigError(f"{flag[2:]} must be true or false, got {value!r}.")
        if truth:
            return [flag]
        return [one for one in action.option_strings if one.startswith("--no-")]
    if isinstance(value, bool):
        raise ConfigError(f"{flag[2:]} must be a value, got {value!r}.")
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value, default=str)}"]
    if not isinstance(value, list):
        return [f"{flag}={value}"]
    if not all(isinstance(item, (str, int, float)) for item in value):
        raise ConfigError(f"{flag[2:]} must be a list of plain values, got {value!r}.")
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={item}" for item in value]
    if action.nargs == "+":
        return [flag, *map(str, value)]
    return [f"{flag}={','.join(map(str, value))}"]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's plain values, without keys that are given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        keys = [str(key.value).replace("-", "_") for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _read(path: str) -> dict[str, Any]:
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # noqa: S506 (a SafeLoader)
        json.dumps(values, default=str)  # what the flags of JSON are made of: no circles
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}.") from None
    except RecursionError:
        raise ConfigError(f"the config file {path} has lists or mappings in one another too many times.") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"the config file {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold keys and values, got a {type(values).__name__}.")
    return values
