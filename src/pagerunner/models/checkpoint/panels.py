"""Which of a model's matrices a CPU engine keeps in panels."""

from __future__ import annotations

import torch

from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts
from pagerunner.models.checkpoint.loader import Model
from pagerunner.ops.panels import Layout, panel_width
from pagerunner.quant.base import Unquantized, UnquantizedExperts
from pagerunner.quant.dequantized import Dequantized, DequantizedExperts
from pagerunner.quant.expert_panels import ExpertsInPanels
from pagerunner.quant.panels import InPanels


def store_in_panels(model: Model) -> int:
    """Keep the model's float32 matrices in panels, and return how many; 0 on a machine without CPU kernels.

    The model has no memory yet. All experts of a layer count as two matrices. A matrix stays as it is if products of another shape read
    it as one matrix. An embedding changes if it has the output weights too: looking rows up alone is faster in a plain table.
    """
    width = panel_width()
    if width is None:
        return 0
    tied = getattr(model, "tied", False)
    changed = 0
    for module in model.modules():
        if isinstance(module, Linear):
            form, outputs, suits = module.method, module.out_features, not module.needs_dense
            sections = 2 if len(module.parts) == 2 and len(set(module.parts.values())) == 1 else 1
        elif isinstance(module, Embedding):
            form, outputs, suits, sections = module.method, module.vocab_size, tied, 1
        elif isinstance(module, Experts):
            held = module.method
            if module.dtype != torch.float32 or type(held) not in (UnquantizedExperts, DequantizedExperts):
                continue
            packed = held.form if isinstance(held, DequantizedExperts) else None
            module.store(ExpertsInPanels(width, module.sizes.features, module.sizes.inner, packed))
            changed += 2
            continue
        else:
            continue
        if suits and module.dtype == torch.float32 and type(form) in (Unquantized, Dequantized):
            layout = Layout(width, outputs, sections)
            module.store(InPanels(layout, form.forms if isinstance(form, Dequantized) else None))
            changed += 1
    return changed
