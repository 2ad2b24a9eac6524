"""Entry point: find the verb, load its module, turn errors into one sentence and an exit code.

Exit codes: 0 done, 1 a bug of ours, 2 the user's input or machine, 130 interrupted, 141 nobody reads the output.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from pagerunner import limits
from pagerunner.errors import ConfigError, PagerunnerError, described

VERBS: dict[str, tuple[str, str]] = {
    "generate": ("pagerunner.cli.generate", "complete prompts; without a model, with the demo model"),
    "chat": ("pagerunner.cli.chat", "talk to a model in the terminal"),
    "serve": ("pagerunner.cli.serve", "serve a model over HTTP with OpenAI's endpoints"),
    "proxy": ("pagerunner.cli.proxy", "share requests out among several servers"),
    "plan": ("pagerunner.cli.plan", "show how a model would use memory, from its config alone"),
    "run-batch": ("pagerunner.cli.run_batch", "answer an OpenAI batch file; goes on where it was interrupted"),
    "bench": ("pagerunner.cli.bench", "measure throughput, latency, start-up or sleep"),
    "bench serve": ("pagerunner.cli.bench_serve", "load a server and measure how long it lets requests wait"),
    "eval": ("pagerunner.cli.evaluate", "score a model on recall, addition, sorting and sentences"),
    "collect-env": ("pagerunner.cli.collect_env", "print versions and hardware for a bug report"),
}
_WITHOUT_ENGINE = ("bench serve", "collect-env")


def usage() -> str:
    """The text of `pagerunner --help`."""
    width = max(map(len, VERBS))
    lines = ["usage: pagerunner VERB [options]", "", "An LLM inference engine whose subject is memory.", "", "verbs:"]
    lines += [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
    lines += ["", "`pagerunner VERB --help` lists a verb's options; `--version` prints the version;"]
    lines += ["`--debug`, anywhere, shows the traceback of an error."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        code = _dispatch(words)
        if sys.stdout is not None:  # as it is in a process that was started without one
            sys.stdout.flush()
        return code
    except PagerunnerError as error:
        return _report(f"error: {_one_line(str(error)) or type(error).__name__}", 2, debug)
    except KeyboardInterrupt:
        _ignore_interrupts(argv)
        return _report("interrupted.", 130, debug)
    except BrokenPipeError:
        # The rest of the buffer can't be written. Without this the interpreter would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        # a disk is full, mostly the output's; a file may not be read, or has no possible name, mostly the model's
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EACCES, errno.ENAMETOOLONG):
            return _report(f"error: {error}.", 2, debug)
        # The last resort: a bug of ours is reported and not shown raw.
        what = f"internal error: {_one_line(described(error))}"
        return _report(what if debug else f"{what} (--debug shows where)", 1, debug)
    finally:
        _ignore_interrupts(argv)


def _ignore_interrupts(argv: Sequence[str] | None) -> None:
    """Let a Ctrl-C not end the process by its signal, status -2, while Python ends it with an exit code. SIGTERM still does."""
    if argv is None:  # this is the process's own command line
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Python ends by the signal if that has interrupted the code of a text, such as a library's dataclass, whoever has caught it.
        # The code of another text, of which a named tuple is made, lets it forget that.
        namedtuple("Nothing", ())


def _dispatch(words: list[str]) -> int:
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-v", "-V", "--version", "version"):
        from pagerunner import __version__

        print(f"pagerunner {__version__}")
        return 0
    verb, *rest = words
    if rest and f"{verb} {rest[0]}" in VERBS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the verbs are {', '.join(VERBS)}."
        raise ConfigError(f"unknown verb {verb!r}; {hint}")
    module: Any = importlib.import_module(VERBS[verb][0])
    namespace = module.build_parser().parse(rest)
    if limits.FAULTS and verb not in _WITHOUT_ENGINE:  # said before torch is loaded, which takes seconds
        raise ConfigError(" ".join(limits.FAULTS))
    return int(module.run(namespace))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _report(text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"pagerunner: {text}", file=sys.stderr)
    return code
