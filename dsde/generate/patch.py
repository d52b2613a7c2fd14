"""One line that lets `model.generate` decode speculatively: `patch`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Literal

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerationMode

from ..cache import CannotRollBack
from .decoder import TURN, Decoder
from .options import hand_back_reason, refuse, refuse_options, whole

_SIGNATURE = inspect.signature(GenerationMixin.generate)
_REFUSED = (
    "synced_gpus",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "inputs_embeds",
    "cache",
    "past_key_values",
)


def patch(model: PreTrainedModel, draft: PreTrainedModel | Literal["ngram"] | None = None, **options: Any) -> Patch:
    """Let ``model.generate`` decode speculatively.

    Parameters
    ----------
    model : PreTrainedModel
        The target; only its attribute ``generate`` is set.
    draft : PreTrainedModel or "ngram", optional
        What proposes tokens. Without one, calls that bring an ``assistant_model`` or ``prompt_lookup_num_tokens`` are
        sped up with that, and other calls run as before.
    **options
        ``tokenizer``, ``draft_tokenizer`` and the engine's options, as for `dsde.Decoder`.

    Returns
    -------
    Patch
        Ends with its ``undo()``, or as a context manager.

    Raises
    ------
    ValueError
        The pair or an option does not work.

    Notes
    -----
    Calls of ``generate`` may come from any thread and take turns. While one runs, nothing else may use the two models.
    """
    return Patch(model, draft, **options).install()


class Patch:
    """What `patch` puts in the place of ``model.generate``: called like it, it also is a context manager.

    Parameters
    ----------
    model, draft, **options
        As for `patch`.
    """

    def __init__(
        self, model: PreTrainedModel, draft: PreTrainedModel | Literal["ngram"] | None = None, **options: Any
    ) -> None:
        for name in ("streamer", "stop_strings"):
            if options.get(name) is not None:
                raise ValueError(f"{name} belongs to a call of generate, not to a patch")
        self.model = model
        self.draft = draft
        self.decoder = Decoder(draft, **options)
        self._before: Any = None
        self._compared: tuple[Any, ...] = ()
        functools.update_wrapper(self, GenerationMixin.generate.__get__(model))
        if draft is not None and hand_back_reason(model, GenerationMode.GREEDY_SEARCH) is None:
            try:
                self.decoder.prepare(model)  # what cannot work is said here
            except CannotRollBack as cause:
                if cause.model is not model:  # such a target is handed back, call by call
                    raise

    def install(self) -> Patch:
        """Replace ``model.generate`` on the instance."""
        if self not in self._patches():
            self._before = vars(self.model).get("generate")
            self.model.generate = self
        return self

    def undo(self) -> None:
        """Give the model its former ``generate`` back; patches may be undone in any order, and more than once."""
        patches = list(self._patches())
        if self not in patches:
            return
        place = patches.index(self)
        if place > 0:
            patches[place - 1]._before = self._before
        elif self._before is not None:
            self.model.generate = self._before
        else:
            del self.model.generate

    def _patches(self) -> Iterator[Patch]:
        """The patches that the model has now, the latest first."""
        patched = vars(self.model).get("generate")
        while isinstance(patched, Patch):
            yield patched
            patched = patched._before

    def __enter__(self) -> Patch:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy of a patched model is not patched: it gets what its class has.
        return functools.partial, (type(self.model).generate, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take the arguments of ``generate`` and return what it returns."""
        with TURN:
            return self._generate(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        call = dict(_SIGNATURE.bind(self.model, *args, **kwargs).arguments)
        del call["self"]
        call |= call.pop("kwargs", {})
        decoder, draft = self.decoder, self._draft(call)
        wanted = draft is not None or decoder.engine_options.get("controller") == "off"
        if not wanted or call.get("custom_generate") is not None:
            return self._original(*args, **kwargs)
        # transformers would keep these from a custom loop, or ask of the call what only its own assisted loop needs.
        streamer, tokenizer, draft_tokenizer = (
            call.pop(name, None) for name in ("streamer", "tokenizer", "assistant_tokenizer")
        )
        call.pop("assistant_model", None)
        lookup = self._take(call, "prompt_lookup_num_tokens")
        if lookup is not None:
            call["num_assistant_tokens"] = whole("prompt_lookup_num_tokens", lookup, 1)
        config = self._config(call)
        reason = hand_back_reason(self.model, config.get_generation_mode())
        if reason is not None:
            decoder.warn(reason)
            return self._original(*args, **kwargs)
        refuse_options(config)
        refuse(k for k in _REFUSED if not (call.get(k) is None or call[k] is False))
        decoder.draft = draft  # one engine at a time: each holds a cache for the target
        given = (draft, tokenizer, draft_tokenizer)
        if given not in (self._compared, (draft, None, None)):
            decoder.check_tokenizers(self.model, tokenizer, draft_tokenizer)
            self._compared = given
        if config.stop_strings is not None:
            call["stopping_criteria"] = self._with_stop_strings(call, tokenizer or decoder.tokenizer)

        def loop(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
            return decoder.decode(model, input_ids, streamer=streamer, **prepared)

        return type(self.model).generate(self.model, **call, custom_generate=loop)

    def _draft(self, call: dict[str, Any]) -> PreTrainedModel | Literal["ngram"] | None:
        """The draft that this call brings, else the patch's own."""
        if call.get("assistant_model") is not None:
            return call["assistant_model"]
        return self.draft if self._option(call, "prompt_lookup_num_tokens") is None else "ngram"

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self.model).generate(self.model, *args, **kwargs)

    def _config(self, call: dict[str, Any]) -> GenerationConfig:
        """The generation config that transformers will make of this call."""
        options = {k: v for k, v in call.items() if k not in _SIGNATURE.parameters}
        config, _ = self.model._prepare_generation_config(call.get("generation_config"), **options)
        return config

    def _with_stop_strings(self, call: dict[str, Any], tokenizer: Any) -> StoppingCriteriaList:
        """The call's criteria and one for its stop strings, which transformers refuses beside a custom loop."""
        strings = self._take(call, "stop_strings")
        criteria = StoppingCriteriaList(call.get("stopping_criteria") or ())
        if tokenizer is None:
            raise ValueError(f"stop_strings need a tokenizer, got {strings!r} without one")
        if not any(type(c) is StopStringCriteria for c in criteria):  # the caller's own one takes precedence
            criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
        return criteria

    def _option(self, call: dict[str, Any], name: str) -> Any:
        """An option wherever it was set: in the call, its generation config, or the model's."""
        configs = (call.get("generation_config"), self.model.generation_config)
        return next((v for v in (call.get(name), *(getattr(c, name, None) for c in configs)) if v is not None), None)

    def _take(self, call: dict[str, Any], name: str) -> Any:
        """The option, which transformers will find unset."""
        value = self._option(call, name)
        call.pop(name, None)
        if getattr(call.get("generation_config"), name, None) is not None:
            call["generation_config"] = copy.deepcopy(call["generation_config"])
            setattr(call["generation_config"], name, None)
        if getattr(self.model.generation_config, name, None) is not None:
            call[name] = None
        return value
