"""Chat templates: Jinja texts that come with checkpoints, rendered in a sandbox with the helpers they expect."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pagerunner import limits
from pagerunner.errors import CheckpointError, InvalidRequestError
from pagerunner.models.configs.json_files import read_json
from pagerunner.types.checks import show

if TYPE_CHECKING:
    import jinja2
    from jinja2.compiler import CodeGenerator


_MOST_BYTES = 8 * 1024 * 1024  # those of models have up to 30 thousand


class ChatTemplate:
    """A checkpoint's templates by name; "tool_use", where there is one, is taken when tools are given."""

    def __init__(self, templates: Mapping[str, str], where: str) -> None:
        self.templates = dict(templates)
        self.where = where

    @classmethod
    def find(cls, directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """The template in chat_template.jinja, chat_template.json or tokenizer_config.json, the first that is there."""
        file = directory / "chat_template.jinja"
        if file.is_file():
            return cls({"default": _read(file)}, str(file))
        file = directory / "chat_template.json"
        values = read_json(file) if file.is_file() else tokenizer_config
        where = str(file if file.is_file() else directory / "tokenizer_config.json")
        found = values.get("chat_template")
        if isinstance(found, str):
            return cls({"default": found}, where)
        if isinstance(found, list):
            named = {
                x["name"]: x["template"] for x in found if isinstance(x, dict) and {"name", "template"} <= x.keys()
            }
            if named and len(named) == len(found) and all(isinstance(x, str) for pair in named.items() for x in pair):
                return cls(named, where)
        if found:
            raise CheckpointError(f"{where}: chat_template must be a text or a list of names and templates.")
        return None

    @classmethod
    def from_option(cls, option: str) -> ChatTemplate:
        """A template that the user gave: the path of a file, or the text itself.

        Raises:
            CheckpointError: it looks like a path, and there is no such file.
        """
        if "{" in option or "\n" in option:
            return cls({"default": option}, "chat_template")
        if not os.path.exists(option):  # False for what can't be a name at all, too
            raise CheckpointError(f"There is no chat template file {option}.")
        if not Path(option).is_file():
            raise CheckpointError(f"The chat template {option} is no regular file.")
        return cls({"default": _read(Path(option))}, option)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names that the templates read. Raises InvalidRequestError where one is not valid.

        Even reading a template may take any time and memory: a server asks its template process instead.
        """
        import jinja2

        environment = _environment()
        try:
            found = [_undeclared(environment, text) for text in self.templates.values()]
        except jinja2.TemplateError as error:
            raise self._invalid(error) from None
        return frozenset().union(*found) - environment.globals.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text.

        Raises:
            InvalidRequestError: the template is not valid, or it fails on or refuses these messages.
        """
        import jinja2

        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise InvalidRequestError(f"{self.where} has no default chat template, only {', '.join(self.templates)}.")
        if variables.get("continue_final_message"):
            raise InvalidRequestError("continue_final_message is not supported.", param="continue_final_message")
        try:
            template = _compile(self.templates[name])
            shown = list(map(_with_arguments, messages))
            values = {"documents": None, **variables, "messages": shown, "tools": tools and list(tools)}
            text = _within_limit(template.generate(values))
            text.encode("utf-8")
        except (MemoryError, RecursionError) as error:
            raise InvalidRequestError(
                f"The chat template takes too much for these messages: {type(error).__name__}.", param="messages"
            ) from None
        except UnicodeEncodeError:
            raise InvalidRequestError("messages hold a lone surrogate, which is not valid Unicode text.") from None
        except jinja2.TemplateSyntaxError as error:
            raise self._invalid(error) from None
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"The chat template refuses these messages: {error}", param="messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, ArithmeticError) as error:
            raise InvalidRequestError(f"The chat template fails on these messages: {error}", param="messages") from None
        return text

    def _invalid(self, error: Exception) -> InvalidRequestError:
        return InvalidRequestError(f"The chat template of {self.where} is not valid: {str(error).rstrip('.')}.")


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """A conversation as the server shows it to templates, of which many know texts only: parts are one text, a line each.

    Raises:
        InvalidRequestError: a message is no mapping, or a part no text.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{where} must be a mapping with role and content, got {show(message)}.", param="messages"
        )
    plain = dict(message)
    if isinstance(content := message.get("content"), list):
        plain["content"] = joined_text(map(_part, content), f"{where}.content", "messages")
    elif content is None and message.get("role") == "assistant":  # it has called, thought or refused
        plain["content"] = message.get("refusal") or ""
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):  # templates have each of the names
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning, "thinking": reasoning}
    return plain


def _part(part: Any) -> tuple[object, object, object]:
    if isinstance(part, Mapping):
        return part.get("type", "text"), part.get("text"), part.get("refusal")
    return ("text", part, None) if isinstance(part, str) else (part, None, None)


def joined_text(
    parts: Iterable[tuple[object, object, object]],
    where: str,
    param: str,
    kinds: tuple[str, ...] = ("text", "input_text", "output_text"),
) -> str:
    """The texts of a message's parts of these `kinds`, and refusals, a line each. A part is its type, its text and its refusal.

    Raises:
        InvalidRequestError: a part is of another type, or has no text; `param` is at fault.
    """
    texts = []
    for kind, text, refusal in parts:
        if kind == "refusal" and isinstance(refusal, str):
            kind, text = kinds[0], refusal
        if kind not in kinds:
            raise InvalidRequestError(f"{where} holds a part of type {show(kind)}; this model takes text only.", param)
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where} holds a text part without text.", param)
        texts.append(text)
    return "\n".join(texts)


def _within_limit(pieces: Iterator[str]) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limits.MAX_PROMPT_CHARS:
            raise InvalidRequestError(
                f"The chat template makes more than {limits.MAX_PROMPT_CHARS} characters of these messages "
                f"{limits.knob('MAX_PROMPT_CHARS')}.",
                param="messages",
            )
        parts.append(piece)
    return "".join(parts)


def _read(file: Path) -> str:
    try:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise CheckpointError(
                f"{file} has {size} bytes, more than the {_MOST_BYTES} that a chat template may have."
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as text: {error}.") from None


@functools.cache
def _without_folding(base: type[CodeGenerator]) -> type[CodeGenerator]:
    """A compiler that computes nothing. Jinja's own computes constants, such as `"a" * 3000000000` in a branch that is never
    taken."""
    from jinja2.nodes import Impossible, TemplateData

    class WithoutFolding(base):  # type: ignore[misc, valid-type]
        def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
            if not isinstance(node, TemplateData):
                raise Impossible
            return str(super()._output_child_to_const(node, frame, finalize))

    return WithoutFolding


def _undeclared(environment: jinja2.Environment, text: str) -> set[str]:
    """As jinja2.meta.find_undeclared_variables, without computing constants."""
    from jinja2.meta import TrackingCodeGenerator

    tracking: Any = _without_folding(TrackingCodeGenerator)
    generator = tracking(environment)
    generator.visit(environment.parse(text))
    found: set[str] = generator.undeclared_identifiers
    return found


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    from jinja2.compiler import CodeGenerator
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's tokens for training; here its body is just text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols], optimized=False
    )
    environment.code_generator_class = _without_folding(CodeGenerator)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Arguments(dict[str, Any]):
    """A tool call's arguments. Some templates treat them as a mapping, others as JSON text that they join to other text."""

    def __str__(self) -> str:
        return _tojson(self)

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its tool calls, values or JSON text, as templates of either kind take them."""
    shown = []
    for call in message.get("tool_calls") or ():
        function, arguments = call["function"], call["function"]["arguments"]
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # a text that is no JSON is shown as it is
                arguments = json.loads(arguments or "{}")
        if isinstance(arguments, dict):
            call = {**call, "function": {**function, "arguments": _Arguments(arguments)}}
        shown.append(call)
    return {**message, "tool_calls": shown} if shown else message


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML, which templates don't expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def _compile(text: str) -> jinja2.Template:
    return _environment().from_string(text)
