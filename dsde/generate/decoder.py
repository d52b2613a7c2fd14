"""The decoding loop that transformers calls: a prepared batch in, sequences out."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from ..cache import CannotRollBack, context_of
from ..controllers import Static, named
from ..engine import Engine
from ..models import check_tokenizers
from ..request import Completion, Request, SamplingParams
from .batch import ColumnStream, assemble, full_output, left_padding
from .options import MODES, default, hand_back_reason, refuse_inputs, refuse_options, whole
from .rows import Row, refuse_stateful, share, split_criteria, split_tail

_ENGINE_OPTIONS = tuple(n for n in inspect.signature(Engine).parameters if n not in ("target", "draft", "tokenizer"))
# Decoding lends both models to the engine for a while, and two decoders may share a model: one call at a time.
TURN = threading.RLock()


class Decoder:
    """A decoding loop for ``model.generate(..., custom_generate=decoder)``.

    Parameters
    ----------
    draft : PreTrainedModel or "ngram", optional
        What proposes tokens; None needs ``controller="off"``.
    streamer : BaseStreamer, optional
        Gets the prompt, the tokens one at a time, and the end. (transformers keeps a streamer given to ``generate``
        from a custom loop.)
    stop_strings : str or list of str, optional
        Strings that end a row; need `tokenizer`. (transformers refuses them beside a custom loop.)
    tokenizer, draft_tokenizer : PreTrainedTokenizerBase, optional
        If both are known, here or from where the models were loaded, they must agree token by token.
    **engine_options
        For `dsde.Engine`, for example ``controller`` or ``kv_blocks``.

    Raises
    ------
    ValueError
        An option or a controller of that name does not exist, or stop strings lack a tokenizer.

    Notes
    -----
    The engine is made at the first call and kept. Calls from several threads take turns. transformers passes neither
    ``assistant_model`` nor ``synced_gpus`` or ``negative_prompt_ids`` on to a custom loop: here they have no effect.
    """

    def __init__(
        self,
        draft: PreTrainedModel | Literal["ngram"] | None,
        *,
        streamer: Any = None,
        stop_strings: str | list[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        **engine_options: Any,
    ) -> None:
        if stop_strings is not None and tokenizer is None:
            raise ValueError(f"stop_strings need a tokenizer, got {stop_strings!r} without one")
        unknown = ", ".join(name for name in engine_options if name not in _ENGINE_OPTIONS)
        if unknown:
            raise ValueError(f"unknown option: {unknown}; the engine's are {', '.join(_ENGINE_OPTIONS)}")
        named(engine_options.get("controller", "dsde"))
        self.draft = draft
        self.streamer = streamer
        self.stop_strings = stop_strings
        self.tokenizer = tokenizer
        self.draft_tokenizer = draft_tokenizer
        self._tokenized = draft  # whose tokenizer that is; None if it belongs to whatever draft a call brings
        self.engine_options = engine_options
        self._engine: Engine | None = None
        self._made_for: tuple[Any, ...] = ()
        self._warned: set[str] = set()

    def __call__(self, model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
        """Called by transformers; returns what ``model.generate`` returns."""
        if self.stop_strings is not None:
            assert self.tokenizer is not None
            stop = StopStringCriteria(tokenizer=self.tokenizer, stop_strings=self.stop_strings)
            prepared["stopping_criteria"].append(stop)
        return self.decode(model, input_ids, streamer=self.streamer, **prepared)

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **inputs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode a batch that transformers prepared.

        Parameters
        ----------
        model : PreTrainedModel
            The target.
        input_ids : Tensor [B, n] int64
            Left-padded prompts.
        logits_processor, stopping_criteria, generation_config
            As transformers prepared them.
        streamer : BaseStreamer, optional
            As for the class.
        **inputs
            The prepared inputs of the model.

        Raises
        ------
        ValueError
            Anything that is not supported, by name, before the first forward pass.
        RuntimeError
            A row cannot be continued: its logits are NaN or all masked. Or the call comes from within another one.
        MemoryError
            The engine's cache does not fit.
        Exception
            Whatever a processor, a criterion or the streamer raises; a processor's and a criterion's come without their
            traceback, but with a note of the line (from Python 3.11 on).
        """
        config = generation_config
        mode = config.get_generation_mode()
        if mode not in MODES:
            raise ValueError(f"{mode.value.replace('_', ' ')} cannot run in a Decoder; dsde.patch takes such calls")
        length, eos, criteria = split_criteria(stopping_criteria)

        def hand_back(reason: str) -> Any:
            self.warn(reason)
            if streamer is not None:
                streamer.put(input_ids.cpu())
            prepared = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, **inputs}
            with TURN:
                return model._sample(input_ids, generation_config=config, streamer=streamer, **prepared)

        reason = hand_back_reason(model, mode) or _beyond_context(model, length)
        if reason is not None:
            return hand_back(reason)
        refuse_options(config)
        refuse_inputs(model, inputs)
        refuse_stateful([*logits_processor, *stopping_criteria])
        pad = getattr(config, "_pad_token_tensor", None)
        if pad is None and len(input_ids) > 1 and (criteria or eos):
            raise ValueError("pad_token_id is needed: rows may end at different lengths")
        pad_id = 0 if pad is None else int(pad)

        starts = left_padding(input_ids, inputs.get("attention_mask"), inputs.get("position_ids"))
        drafts = whole("num_assistant_tokens", config.num_assistant_tokens, 0)
        rest, tail = split_tail(logits_processor, config.do_sample)
        rest = share(rest)
        # Drawn from torch's own generator, so that torch.manual_seed makes a sampled call repeatable.
        seeds = torch.randint(2**63 - 1, (len(input_ids),)).tolist() if config.do_sample else [0] * len(input_ids)
        keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        rows = [
            Row(i, config.num_return_sequences, ids[None, :start].to(model.device))
            for i, (ids, start) in enumerate(zip(input_ids, starts, strict=True))
        ]
        params = [
            SamplingParams(
                max_new_tokens=max(1, length - input_ids.shape[1]),  # the limit is looked at behind a token
                seed=seed,
                eos=tuple(eos),
                logits_processors=[row.processor(p) for p in rest],
                stopping_criteria=[row.criterion(c) for c in criteria],
                keep_logits=keep,
                **tail,
            )
            for row, seed in zip(rows, seeds, strict=True)
        ]
        prompts = [ids[start:].tolist() for ids, start in zip(input_ids, starts, strict=True)]
        with TURN:
            try:
                engine = self.prepare(model, length=input_ids.shape[1] + params[0].max_new_tokens)
            except CannotRollBack as cause:
                if cause.model is not model:
                    raise
                return hand_back(str(cause))
            usual = engine.controller
            if drafts != default("num_assistant_tokens") and usual.sl_limit > 0:
                engine.controller = Static(drafts)
            try:
                stream = None if streamer is None else ColumnStream(streamer, input_ids, pad_id)
                done = _run(engine, prompts, params, stream)
            finally:
                engine.controller = usual
        sequences = assemble(input_ids, done, pad_id)
        if not config.return_dict_in_generate:
            return sequences
        if not keep:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return full_output(sequences, done, rows, logits_processor, config, pad_id)

    def prepare(self, model: PreTrainedModel, length: int = 0) -> Engine:
        """The engine for `model`: kept from call to call, made anew when one of its models changes.

        That is another draft, or a model's device, number format or vocabulary. Unless ``kv_blocks`` or a controller
        object was given, it is also made anew when `length` positions need a larger pool than it has.

        Raises
        ------
        ValueError
            The tokenizers disagree, or `dsde.Engine` refuses a model or an option.
        RuntimeError
            Called from within one of its own calls, for example by a logits processor.
        MemoryError
            The engine's cache does not fit.
        """
        with TURN:
            now = (*_state(model), *_state(self.draft))
            if self._engine is None or self._made_for != now:
                self._engine = None  # its cache goes before the next one's is allocated
                self.check_tokenizers(model)
                self._engine = Engine(model, self.draft, **self.engine_options)
                self._made_for = now
            if self._engine.has_work:
                raise RuntimeError("generate was called from within its own decoding loop")
            options, pool = self.engine_options, self._engine.blocks
            # A controller that is an object serves one engine only.
            grows = options.get("kv_blocks") is None and isinstance(options.get("controller", "dsde"), str)
            if grows and pool.blocks_for(length) > pool.num_blocks:
                self._engine = None
                self._engine = Engine(model, self.draft, **options | {"kv_blocks": pool.blocks_for(length)})
            return self._engine

    def check_tokenizers(self, model: PreTrainedModel, tokenizer: Any = None, draft_tokenizer: Any = None) -> None:
        """ValueError if the tokenizers of `model` and draft are known and disagree; those of a call come first."""
        for name, given in (("tokenizer", tokenizer), ("assistant_tokenizer", draft_tokenizer)):
            if given is not None and not hasattr(given, "get_vocab"):
                raise ValueError(f"{name} must be a tokenizer, got {given!r}")
        if not isinstance(self.draft, PreTrainedModel):
            return
        kept = self.draft_tokenizer if self._tokenized is None or self._tokenized is self.draft else None
        ours = tokenizer or self.tokenizer or _stored_tokenizer(model)
        theirs = draft_tokenizer or kept or _stored_tokenizer(self.draft)
        if ours is not None and theirs is not None and ours is not theirs:
            check_tokenizers(ours, theirs)

    def warn(self, reason: str) -> None:
        """Say once that calls of this kind run in transformers' own loop."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"dsde hands this call back to transformers: {reason}", stacklevel=4)


def _run(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    stream: ColumnStream | None,
) -> list[Completion]:
    """Decode all rows to their end; whatever goes wrong leaves nothing behind in the engine."""
    requests: list[Request] = []
    try:
        # All are submitted, and so accepted, before anything is computed or streamed.
        requests.extend(engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True))
        if stream is not None:
            stream.start()
        while any(r.completion is None for r in requests):
            engine.step()
            failed = next((r for r in requests if r.error is not None), None)
            if failed is not None:
                raise failed.cause or RuntimeError(failed.error)
            if stream is not None:
                stream.update(requests)
        if stream is not None:
            stream.end()
    finally:
        for request in requests:
            if request.completion is None:
                engine.abort(request.id)
    return [r.completion for r in requests if r.completion is not None]


def _beyond_context(model: PreTrainedModel, length: int) -> str | None:
    context = context_of(model.config.get_text_config())
    if context is not None and length > context:
        return f"max_length is beyond the context of {context} tokens"
    return None


def _state(model: PreTrainedModel | str | None) -> tuple[Any, ...]:
    """A model and what of it an engine relies on."""
    if not isinstance(model, PreTrainedModel):
        return (model,)
    sizes = (model.get_input_embeddings().num_embeddings, getattr(model.get_output_embeddings(), "out_features", None))
    return (model, model.device, model.dtype, *sizes)


def _stored_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies where the model was loaded from, if it is on this machine."""
    name = getattr(model, "name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True) if name else None
    except Exception:  # a folder without a tokenizer, or one that needs packages or code which are not here
        return None
