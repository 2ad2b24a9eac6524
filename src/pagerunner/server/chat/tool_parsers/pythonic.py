"""Calls that are written as Python: `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Generator

from pagerunner.server.chat.tool_parsers.stream import MalformedError, StreamParser, Wait

_NAME = re.compile(r"[\w.\-]*")
_NESTING = re.compile(r"[\[\](){}\"'\\]")
_CLOSER = {"[": "]", "(": ")", "{": "}"}
ERRORS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
"""What reading Python may raise."""
_WORDS = {"true": True, "false": False, "null": None}  # some write JSON's


class Pythonic(StreamParser):
    """The answer is a list of calls of Python with named arguments, which are literals. Llama 3.2 and 4 write them so.

    Nothing has to mark a call, so only the names of the request's tools make one. A call is told when it is whole.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        super().__init__()

    def parse(self) -> Wait:
        """See StreamParser."""
        self.begin()
        yield from self.spaces()
        yield from self.optional("<|python_start|>")
        yield from self.spaces()
        try:
            yield from self.listed(self._call)
            yield from self.spaces()
            yield from self.optional("<|python_end|>")
            self.begin()
        except MalformedError:
            pass
        self.end_call()
        yield from self.until((), self.say)

    def _call(self) -> Wait:
        name = yield from self.word(_NAME)
        if name not in self._names or (yield from self.char()) != "(":
            raise MalformedError
        text = yield from self._brackets()
        try:
            call = parsed(f"f{text}")
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
                raise MalformedError
            found = {argument.arg: value_of(argument.value) for argument in call.keywords if argument.arg is not None}
            if len(found) < len(call.keywords):
                raise MalformedError
            arguments = as_json(found)
        except ERRORS:
            raise MalformedError from None
        self.start_call(name)
        self.argue(arguments)

    def _brackets(self) -> Generator[None, None, str]:
        """The text up to where the bracket that comes next is closed."""
        pieces: list[str] = []
        open_: list[str] = []  # what closes the brackets, or a text
        while True:
            found = _NESTING.search(self._text, self._at)
            pieces.append(self._take((found.end() if found else len(self._text)) - self._at))
            if not found:
                if not (yield from self.char()):
                    raise MalformedError
                continue
            what = found[0]
            quoted = bool(open_) and open_[-1] in "\"'"
            if what == "\\":
                if not (yield from self.char()):
                    raise MalformedError
                pieces.append(self._take(1))
            elif open_ and what == open_[-1]:
                open_.pop()
                if not open_:
                    return "".join(pieces)
            elif not quoted and what in "\"'":
                open_.append(what)
            elif not quoted and what in _CLOSER:
                open_.append(_CLOSER[what])
            elif not quoted:
                raise MalformedError


def parsed(text: str) -> ast.expr:
    """An expression of Python. Raises one of ERRORS if the text isn't any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a model writes
        return ast.parse(text, mode="eval").body


def as_json(value: object) -> str:
    """The value as JSON that can be sent. Raises one of ERRORS if there is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # half of a surrogate pair can't be
    return text


def value_of(node: ast.expr) -> object:
    """A literal's value. Raises one of ERRORS for anything else."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [value_of(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else value_of(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError
        return dict(zip(keys, map(value_of, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex | set) or value is ...:
        raise ValueError
    return value
