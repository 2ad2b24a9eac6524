"""What the packers of these tests write in the formats of compressed-tensors, read by that package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import make_checkpoint
from helpers.quantise import CONFIGS, PACKED, quantise

transformers = pytest.importorskip("transformers")


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "kind", [kind for kind in (*CONFIGS, *PACKED) if "compressed" in kind or kind in ("int4", "int8 packed")]
)
def test_compressed_tensors_reads_its_formats_as_they_are_meant(tmp_path: Path, kind: str) -> None:
    """The package that writes them, so what the packers of these tests take for the format is what it is."""
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    meant, file = quantise(path, kind), path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["quantization_status"] = "compressed"  # without it transformers reads no codes
    file.write_text(json.dumps(config))
    read = transformers.CompressedTensorsConfig(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=read, dtype=torch.float32)
    found = dict(reference.named_parameters())
    assert any(name.endswith("down_proj.weight") for name in meant)
    for name, weight in meant.items():
        torch.testing.assert_close(found[name].float(), weight.float(), atol=1e-6, rtol=1e-5)
