"""What an embedding model's files and the option pooler_config say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagerunner.errors import CheckpointError, ConfigError, InvalidRequestError
from pagerunner.models.configs.pooling import Pooler, read_pooler
from pagerunner.types import RequestOutput


def write(
    path: Path, modes: dict[str, bool], kinds: tuple[str, ...] = ("Transformer", "Pooling"), **config: Any
) -> str:
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 4, **modes}), "utf-8")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_files(tmp_path: Path) -> None:
    path = write(tmp_path, {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False})
    assert read_pooler(path) == Pooler("last", False, None)
    assert read_pooler(path, '{"pooling_type": "mean", "normalize": true}') == Pooler("mean", True, None)
    assert read_pooler(path, {"use_activation": True}) == Pooler("last", True, None)


def test_normalise_and_dimensions(tmp_path: Path) -> None:
    kinds = ("Transformer", "Pooling", "Normalize")
    path = write(tmp_path, {"pooling_mode_mean_tokens": True}, kinds, matryoshka_dimensions=[2, 3])
    assert read_pooler(path) == Pooler("mean", True, (2, 3))


def test_a_model_without_the_files_needs_the_option(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"is_matryoshka": true}', encoding="utf-8")
    assert read_pooler(str(tmp_path)) is None
    assert read_pooler(str(tmp_path), {"normalize": False}) is None
    assert read_pooler(str(tmp_path), '{"seq_pooling_type": "LAST"}') == Pooler("last", True, ())


@pytest.mark.parametrize("option", ['{"pooling_type": "CLS"}', "LAST", '{"pooling": "LAST"}', {"normalize": 3}])
def test_bad_options(tmp_path: Path, option: Any) -> None:
    with pytest.raises(ConfigError, match="pooler_config"):
        read_pooler(str(tmp_path), option)


def test_unsupported_files(tmp_path: Path) -> None:
    path = write(tmp_path, {"pooling_mode_cls_token": True}, ("Transformer", "Pooling", "Dense"))
    with pytest.raises(CheckpointError, match="Dense"):
        read_pooler(path)
    modules = [{"type": "x.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(CheckpointError, match="pooling_mode_cls_token"):
        read_pooler(path)
    (tmp_path / "modules.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="modules"):
        read_pooler(path)


def output(pooled: list[float]) -> RequestOutput:
    return RequestOutput(request_id="a", prompt=None, prompt_token_ids=[5], outputs=[], finished=True, pooled=pooled)


def test_cutting() -> None:
    assert Pooler("last", True, ()).finish(output([3, 4, 12]), 2).tolist() == pytest.approx([0.6, 0.8])
    assert Pooler("last", False, None).finish(output([3, 4])).tolist() == [3, 4]
    assert np.array_equal(Pooler("last", True, None).finish(output([0, 0])), [0, 0])
    with pytest.raises(InvalidRequestError, match="have 3"):
        Pooler("last", True, ()).finish(output([3, 4, 12]), 4)
    for dimensions, sentence in ((None, "is_matryoshka"), ((2, 3), "one of 2, 3")):
        with pytest.raises(InvalidRequestError, match=sentence):
            Pooler("last", True, dimensions).check_dimensions(5)
    Pooler("last", True, (2, 3)).check_dimensions(3)
