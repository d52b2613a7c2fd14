"""Speculative decoding for a model repository: put this folder into it, beside the weights.

``from_pretrained(..., trust_remote_code=True)`` then gives the model this `generate`; so does
``transformers serve --trust-remote-code``. Another model can borrow it for one call:
``model.generate(..., custom_generate="path/or/repository", trust_remote_code=True)``.

The draft is the call's ``assistant_model``, else the folder or Hub id in the environment variable DSDE_DRAFT, else the
folder ``draft`` in the model's repository, else prompt lookup.
"""

import os
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import has_file

from dsde.generate import Patch


def generate(*args: Any, model: PreTrainedModel, **kwargs: Any) -> Any:
    """Take the arguments of ``model.generate`` and return what it returns."""
    # Kept with the model, so that the draft and the engine serve every call.
    if not hasattr(model, "_dsde"):
        model._dsde = Patch(model, None if kwargs.get("assistant_model") is not None else load_draft(model))
    return model._dsde(*args, **kwargs)


def load_draft(model: PreTrainedModel) -> PreTrainedModel | str:
    """The draft that belongs to `model`, on its device and in its number format."""
    named = os.environ.get("DSDE_DRAFT")
    if named:
        draft = AutoModelForCausalLM.from_pretrained(named)
    elif has_file(model.name_or_path, "draft/config.json"):
        draft = AutoModelForCausalLM.from_pretrained(model.name_or_path, subfolder="draft")
    else:
        return "ngram"
    return draft.to(model.device, model.dtype).eval()
