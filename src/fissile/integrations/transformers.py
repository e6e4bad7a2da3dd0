"""Expanded models of Hugging Face transformers: their files, and the split inside a Trainer run.

>>> from fissile.integrations.transformers import ExpandAt
>>> fissile.expand(bert, 2).save_pretrained("wide")
>>> wide = AutoModel.from_pretrained("wide")

``from_pretrained`` loads such a folder wherever this module was imported. For people without
fissile save the model written out: ``fissile.to_dense(wide).save_pretrained("plain")``.

A model made anew from an expanded one's config is dense and as wide as the children, and its config
still says that it was expanded: ``del model.config.quantization_config`` before saving it.
"""

from fissile._common.errors import needs

needs("transformers", "transformers")
needs("accelerate", "transformers")

import fissile.integrations.hf_files  # noqa: E402, F401 (registers what loads expanded models)
from fissile.integrations.hf_trainer import ExpandAt  # noqa: E402

__all__ = ["ExpandAt"]
