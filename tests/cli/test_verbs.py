"""The verbs against a stand-in for `LLM`: what they ask of it, what they print, and where."""

from __future__ import annotations

import io
import json
import logging
import sys
import types
from types import SimpleNamespace
from typing import ClassVar

import pytest

from pagerunner.cli import chat, session
from pagerunner.cli.main import main
from pagerunner.errors import InvalidRequestError
from pagerunner.types import CompletionOutput, RequestOutput, SamplingParams


class StandIn:
    """Echoes prompts in capitals, one token per word, as one delta per word when streaming."""

    made: ClassVar[list[StandIn]] = []

    def __init__(self, model, use_tqdm=True, **values):
        self.model, self.values = model, values
        self.calls, self.closed = [], 0
        group = SimpleNamespace(page_tokens=16)
        self.memory_plan = SimpleNamespace(groups=(group,), num_pages=lambda group: 64)
        StandIn.made.append(self)

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        self.calls.append((prompts, sampling_params, use_tqdm))
        return [self._output(prompt, "final", list(range(20))) for prompt in prompts]

    def stats(self):
        return SimpleNamespace(spec=None)

    def stream_chat(self, messages, sampling_params=None):
        self.calls.append(([dict(message) for message in messages], sampling_params))
        if len(messages) > 6:
            raise InvalidRequestError("The prompt is too long.")
        try:
            for word in messages[-1]["content"].upper().split():
                yield self._output("", word + " ", [1])
        finally:
            self.closed += 1

    def _output(self, prompt, text, token_ids):
        failed = "FAIL" in prompt + text
        completion = CompletionOutput(
            index=0, text="" if failed else text, token_ids=token_ids, finish_reason="error" if failed else "stop"
        )
        return RequestOutput(
            request_id="0",
            prompt=prompt,
            prompt_token_ids=[1] * 40,
            outputs=[completion],
            finished=True,
            num_cached_tokens=32,
            error="It has failed." if failed else None,
        )


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    module = types.ModuleType("pagerunner.llm")
    module.LLM = StandIn
    monkeypatch.setitem(sys.modules, "pagerunner.llm", module)
    monkeypatch.setattr(StandIn, "made", [])
    return StandIn


@pytest.fixture
def stdin(monkeypatch):
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_generate_prints_prompts_with_texts_and_a_summary(stand_in, capsys):
    assert main(["generate", "one", "two", "--model", "dir", "--max-model-len", "auto"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "one\n  -> final\n\ntwo\n  -> final\n\n"
    assert "2 prompts, 80 prompt tokens (64 from the prefix cache), 40 generated" in captured.err
    assert "4 of 64 pages of 16 tokens filled" in captured.err  # ceil(60 / 16) - 32 / 16 for each
    assert "demo" not in captured.err
    [llm] = stand_in.made
    assert (llm.model, llm.values["max_model_len"]) == ("dir", "auto")
    [(prompts, params, _)] = llm.calls
    assert prompts == ["one", "two"]
    assert params == SamplingParams(temperature=0.0, max_tokens=128)


def test_generate_without_a_model_says_that_it_uses_the_demo(stand_in, capsys, monkeypatch):
    monkeypatch.setattr(session, "demo_model_path", lambda: "demo-dir")
    assert main(["generate"]) == 0
    assert "demo model" in capsys.readouterr().err
    assert stand_in.made[0].model == "demo-dir"
    assert len(stand_in.made[0].calls[0][0]) >= 4


def test_generate_does_not_take_a_models_directory_for_a_prompt(stand_in, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert main(["generate", str(tmp_path), "hi"]) == 2
    assert f"error: {tmp_path} is a model's directory; name it with --model {tmp_path}.\n" in capsys.readouterr().err
    (tmp_path / "model.safetensors").touch()
    for name in ("config.json", "model.safetensors"):
        assert main(["generate", str(tmp_path / name), "hi"]) == 2
        assert (
            f"error: {tmp_path / name} is a file of a model; name it with --model {tmp_path}.\n"
            in capsys.readouterr().err
        )
    assert stand_in.made == []
    assert main(["generate", "--model", "demo", str(tmp_path)]) == 0  # where a model is named, a prompt is a prompt
    assert main(["generate", "a" * 5_000, ""]) == 0


@pytest.mark.parametrize("verb", ["chat", "eval"])
def test_a_models_directory_that_stands_alone_is_told_of_the_flag(verb, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert main([verb, str(tmp_path)]) == 2
    assert f"unexpected argument '{tmp_path}'; name a model with --model {tmp_path}" in capsys.readouterr().err


def test_generate_quietly(stand_in, capsys):
    assert main(["generate", "x", "--model", "dir", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_generate_json_is_one_object_per_prompt(capsys):
    assert main(["generate", "a", "b", "--model", "dir", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["prompt"] for entry in objects] == ["a", "b"]
    assert objects[0]["outputs"][0]["finish_reason"] == "stop"


def test_a_failed_request_is_told_and_is_the_exit_code(stdin, capsys, monkeypatch):
    assert main(["generate", "one", "FAIL", "--model", "dir"]) == 2
    assert "FAIL\n  -> It has failed.\n" in capsys.readouterr().out
    assert main(["generate", "one", "FAIL", "--model", "dir", "--json"]) == 2
    assert [json.loads(line)["error"] for line in capsys.readouterr().out.splitlines()] == [None, "It has failed."]
    assert main(["chat", "--model", "dir", "--quick", "fail"]) == 2
    assert "It has failed." in capsys.readouterr().err
    talk = chat.Conversation(StandIn("dir"), SamplingParams())
    chat._answer(talk, "fail")
    assert "It has failed." in capsys.readouterr().err and talk.messages == []
    monkeypatch.setattr(StandIn, "chat", lambda self, *_, **__: [self._output("FAIL", "", [])], raising=False)
    assert main(["eval", "--model", "dir", "--num-examples", "1", "--tasks", "addition"]) == 2
    assert "An answer can't be scored: It has failed." in capsys.readouterr().err


def test_generate_reads_prompts_from_stdin(stand_in, stdin):
    stdin("first\n\nsecond\n")
    assert main(["generate", "-", "--model", "dir"]) == 0
    assert stand_in.made[0].calls[0][0] == ["first", "second"]


def test_generate_with_empty_stdin_is_an_error(stdin, capsys):
    stdin("\n")
    assert main(["generate", "-", "--model", "dir"]) == 2
    assert "stdin holds no prompt" in capsys.readouterr().err


def test_a_missing_demo_model_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(session, "demo_names", list)
    assert main(["generate"]) == 2
    assert "the demo model is missing from this installation" in capsys.readouterr().err


def test_chat_takes_lines_of_stdin_as_turns_and_keeps_the_history(stand_in, stdin, capsys):
    stdin("hello there\n\nand again\n")
    assert main(["chat", "--model", "dir", "--system-prompt", "Be brief."]) == 0
    assert capsys.readouterr().out == "HELLO THERE \nAND AGAIN \n"
    first, second = (call[0] for call in stand_in.made[0].calls)
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}]
    assert second[2:] == [
        {"role": "assistant", "content": "HELLO THERE "},
        {"role": "user", "content": "and again"},
    ]


def test_chat_obeys_commands_of_stdin_and_asks_the_model_nothing_after_quit(stand_in, stdin, capsys, tmp_path):
    file = tmp_path / "talk.json"
    stdin(f"/stats\nhello\n/stats\n/save {file}\n/quit\nnever asked\n")
    assert main(["chat", "--model", "dir"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("There has been no reply yet.\nHELLO \n") and f"2 messages are in {file}." in out
    assert [message["content"] for message in json.loads(file.read_text())] == ["hello", "HELLO "]
    assert len(stand_in.made[0].calls) == 1


def test_chat_quick_is_one_turn(stand_in, capsys):
    assert main(["chat", "--model", "dir", "--quick", "hi you"]) == 0
    assert capsys.readouterr().out == "HI YOU \n"
    assert stand_in.made[0].calls[0][1].output_kind == "delta"


def test_chat_beyond_the_models_length_is_an_error(stdin, capsys):
    stdin("a\nb\nc\nd\n")
    assert main(["chat", "--model", "dir"]) == 2
    assert "The prompt is too long." in capsys.readouterr().err


def test_an_interrupted_reply_is_closed_and_forgotten():
    llm = StandIn("dir")
    talk = chat.Conversation(llm, SamplingParams())
    pieces = talk.reply("one two three")
    assert next(pieces) == "ONE "
    pieces.close()
    assert llm.closed == 1 and talk.messages == []


def test_repl_goes_on_after_an_error_and_after_ctrl_c(monkeypatch, capsys):
    llm = StandIn("dir")
    talk = chat.Conversation(llm, SamplingParams(), "Be brief.")
    lines = iter(["one", "/what", "two", "three", "four", "/clear", "five"])
    monkeypatch.setattr("builtins.input", lambda prompt: next_line(lines))
    chat._converse(talk)
    captured = capsys.readouterr()
    assert "too long" in captured.err and "/clear starts over" in captured.err
    assert "FIVE" in captured.out and "/quit" in captured.out
    assert [message["content"] for message in talk.messages] == ["Be brief.", "five", "FIVE "]

    monkeypatch.setattr(llm, "stream_chat", interrupted)
    chat._answer(talk, "six")
    assert "stopped" in capsys.readouterr().out
    assert len(talk.messages) == 3


def next_line(lines):
    try:
        return next(lines)
    except StopIteration:
        raise EOFError from None


def interrupted(messages, params):
    raise KeyboardInterrupt
    yield


def test_eval_prints_a_row_per_task_and_distance(capsys, monkeypatch):
    monkeypatch.setattr(session, "demo_model_path", lambda: "demo-dir")
    assert main(["eval", "--num-examples", "2", "--tasks", "recall,addition"]) == 0
    out = capsys.readouterr().out
    assert "recall @ 64" in out and "recall @ 1024" in out and "addition" in out and "0 of 2" in out


def test_eval_of_an_unknown_task_and_of_none(capsys):
    assert main(["eval", "--model", "dir", "--tasks", ","]) == 2
    assert "no task is named; there are recall, addition" in capsys.readouterr().err
    assert main(["eval", "--model", "dir", "--tasks", "singing"]) == 2
    assert "unknown task 'singing'" in capsys.readouterr().err


def test_serve_hands_its_options_to_the_server(monkeypatch):
    calls = []
    module = types.ModuleType("pagerunner.server.launch")
    module.run_server = lambda args, **options: calls.append((args, options)) or 0
    monkeypatch.setitem(sys.modules, "pagerunner.server.launch", module)
    words = ["serve", "dir", "--port", "0", "--api-key", "k1", "k2", "--max-num-seqs", "4"]
    words += ["--device", "cpu"]
    words += ["--served-model-name", "one", "two", "--admin-key", "a", "--allowed-origin", "https://x.example"]
    words += ["--shutdown-timeout", "5"]
    words += ["--uvicorn-log-level", "warning", "--disable-access-log-for-endpoints", "/health,/metrics"]
    words += [
        "--disable-fastapi-docs",
        "--tool-call-parser",
        "hermes",
        "--enable-auto-tool-choice",
        "--reasoning-parser",
        "qwen3",
    ]
    assert main(words) == 0
    [(args, options)] = calls
    assert (args.model, args.max_num_seqs, args.device) == ("dir", 4, "cpu")
    names = ["one", "two"]
    chat = options.pop("chat")
    assert (chat.tool_parser, chat.auto_tools, chat.reasoning_parser) == ("hermes", True, "qwen3")
    assert options == {
        "host": "127.0.0.1",
        "port": 0,
        "api_keys": ["k1", "k2"],
        "lora_modules": [],
        "logs": (True, ("/health", "/metrics"), "warning"),
        "docs": False,
        "served_model_name": names,
        "admin_keys": ["a"],
        "allowed_origins": ["https://x.example"],
        "drain_seconds": 5.0,
        "otlp_traces_endpoint": None,
        "api_server_count": 1,
    }


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_a_model_behind_a_flag_of_several_words_is_not_taken_for_one_of_them(flag, capsys):
    assert main(["serve", flag, "one", "dir"]) == 2
    shown = capsys.readouterr().err
    assert f"no model is named; if the last word is it, put it before {flag}." in shown
    assert "dir" not in shown, "it may be a key"


@pytest.mark.parametrize("names", [[""], ["a", ""], ["a", "b", "a"]])
def test_names_that_are_served_differ_and_are_not_empty(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--served-model-name", *names]) == 2
    assert f"--served-model-name takes each name once, and none that is empty; got {names}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "variable", "level"),
    [([], "", 20), (["--quiet"], "", 30), (["--quiet", "--log-level", "DEBUG"], "", 10), ([], "error", 40)],
)
def test_serve_logs_from_the_level_that_a_flag_or_the_environment_says(monkeypatch, words, variable, level):
    levels = []
    module = types.ModuleType("pagerunner.server.launch")
    module.run_server = lambda args, **options: 0
    monkeypatch.setitem(sys.modules, "pagerunner.server.launch", module)
    monkeypatch.setenv("PAGERUNNER_LOG_LEVEL", variable)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: levels.append(options["level"]))
    assert main(["serve", "dir", *words]) == 0
    assert levels in ([level], [logging.getLevelName(level)])


def test_a_log_level_that_is_none_is_one_sentence(capsys):
    assert main(["serve", "dir", "--log-level", "loud"]) == 2
    assert "--log-level" in capsys.readouterr().err


def test_serves_help_begins_with_what_most_people_set(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: pagerunner serve [MODEL] [options]\n")
    titles = [
        "common options",
        "model",
        "memory",
        "scheduling",
        "execution",
        "tools and reasoning",
        "security",
        "logging",
    ]
    places = [text.index(f"\n{title}:\n") for title in titles]
    common = text[places[0] : places[1]]
    assert places[0] == min(places)
    flags = ("--host", "--port", "--api-key", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs")
    assert all(flag in common for flag in flags)


def test_serve_does_not_take_the_last_name_for_the_model(capsys):
    assert main(["serve", "--served-model-name", "name", "dir"]) == 2
    assert "put it before --served-model-name" in capsys.readouterr().err


def test_serve_takes_its_key_from_the_environment(monkeypatch):
    calls = []
    module = types.ModuleType("pagerunner.server.launch")
    module.run_server = lambda args, **options: calls.append(options) or 0
    monkeypatch.setitem(sys.modules, "pagerunner.server.launch", module)
    monkeypatch.setenv("PAGERUNNER_API_KEY", "from-env")
    assert main(["serve", "dir", "--quiet"]) == 0
    assert (calls[0]["api_keys"], calls[0]["logs"].access) == (["from-env"], False)


def test_chat_reads_long_messages_saves_and_tells_what_it_took(monkeypatch, capsys, tmp_path):
    talk = chat.Conversation(StandIn("dir"), SamplingParams(), "Be brief.")
    file = tmp_path / "talk.json"
    lines = [
        "/stats",
        "one\\",
        "two",
        '"""three',
        "",
        'four"""',
        "/stats",
        f"/save {file}",
        f"/save {tmp_path}",
        "/reset",
    ]
    given = iter(lines)
    monkeypatch.setattr("builtins.input", lambda prompt: next_line(given))
    chat._converse(talk)
    captured = capsys.readouterr()
    assert "no reply yet" in captured.out
    assert "2 tokens, the first after" in captured.out and "40, 32 of them in the prefix cache" in captured.out
    assert [message["content"] for message in json.loads(file.read_text())] == [
        "Be brief.",
        "one\ntwo",
        "ONE TWO ",
        "three\n\nfour",
        "THREE FOUR ",
    ]
    assert "can't be written" in captured.err
    assert [message["content"] for message in talk.messages] == ["Be brief."]
