"""From transformers' processors and criteria of a batch to the sampling parameters of each row.

transformers shows processors and criteria the ids of the whole batch, left padding included. Here every row is a
request of its own, so each processor and criterion is bound to a row: it sees a batch of that row alone, with exactly
the ids that transformers would show it there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria

from ..request import LogitsProcessor as RowProcessor
from ..request import Stateless
from .options import names, refuse, whole

# Classes of transformers that depend on one row's ids and logits only. Others keep a state from call to call or mix
# rows (classifier-free guidance, SynthID, speech): a verification that skips and repeats positions would break them.
_BY_ROW = names(
    """
    EncoderNoRepeatNGramLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor EpsilonLogitsWarper EtaLogitsWarper
    ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor
    InfNanRemoveLogitsProcessor LogitNormalization MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor
    MinPLogitsWarper NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor PrefixConstrainedLogitsProcessor
    RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor SuppressTokensAtBeginLogitsProcessor
    SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper
    TypicalLogitsWarper WatermarkLogitsProcessor
    EosTokenCriteria MaxLengthCriteria MaxTimeCriteria StopStringCriteria
    """
)
# Of these, the ones that don't look at the ids.
_BY_LOGITS = names(
    """
    EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper
    SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper
    TypicalLogitsWarper
    """
)
# In the order in which transformers applies them, which is the kernels' order too.
_KERNEL_TAIL: tuple[tuple[type, str], ...] = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)


def refuse_stateful(items: Sequence[Any]) -> None:
    """ValueError that names the processors and criteria of transformers that cannot be bound to a row."""
    own = (LogitsProcessor.__module__, StoppingCriteria.__module__)
    refuse(type(p).__name__ for p in items if type(p).__module__ in own and type(p).__name__ not in _BY_ROW)


def share(processors: Iterable[Any]) -> list[Any]:
    """The processors, those of transformers that look at the logits only as `Stateless`."""
    own = LogitsProcessor.__module__
    return [Stateless(p) if type(p).__module__ == own and type(p).__name__ in _BY_LOGITS else p for p in processors]


def split_tail(processors: LogitsProcessorList, do_sample: bool) -> tuple[list[Any], dict[str, Any]]:
    """Split off the processors at the end that the kernels carry out.

    Returns
    -------
    list
        The processors that remain.
    dict
        Temperature and truncation as `dsde.SamplingParams` names them; temperature 0 if not sampling.
    """
    rest = list(processors)
    if rest and type(rest[-1]) is LogitNormalization:  # moves all logits alike: no distribution changes
        rest.pop()
    if not do_sample:
        return rest, {"temperature": 0.0}
    tail: dict[str, Any] = {"temperature": 1.0}
    for kind, name in reversed(_KERNEL_TAIL):
        if rest and type(rest[-1]) is kind and _plain(rest[-1], getattr(rest[-1], name)):
            tail[name] = getattr(rest.pop(), name)
    return rest, tail


def _plain(processor: Any, value: float) -> bool:
    """Whether the kernels do the same: they always keep one token, drop with -inf, and know no top_p of 0."""
    cuts = (
        getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "filter_value", -torch.inf) == -torch.inf
    )
    return cuts and (value > 0 or isinstance(processor, MinPLogitsWarper))


def split_criteria(criteria: StoppingCriteriaList) -> tuple[int, frozenset[int], list[Any]]:
    """Length limit and end-of-sequence ids of the list, and the criteria that must be asked at every token."""
    limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    eos = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    rest = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    # Ids below 0, with which some say that nothing ends a row, are no tokens.
    return whole("max_length", min(limits), 0), frozenset(int(i) for ids in eos for i in ids.tolist() if i >= 0), rest


@dataclass
class Row:
    """One row of the batch.

    Parameters
    ----------
    index : int
        Which row.
    copies : int
        Consecutive rows that share a prompt (``num_return_sequences``).
    padding : Tensor [1, n] int64
        The ids left of its prompt, on the target's device.
    """

    index: int
    copies: int
    padding: torch.Tensor

    def processor(self, processor: Any) -> RowProcessor:
        """`processor`, bound to this row unless it is a `Stateless`, which all rows share."""
        if isinstance(processor, Stateless):
            return processor
        own = self._own(processor)

        def bound(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = own(self._ids(prefix), logits)
            missing = logits.shape[1] - scores.shape[1]  # transformers goes on with the tokens that are left
            return F.pad(scores, (0, missing), value=-torch.inf) if missing > 0 else scores

        return bound

    def criterion(self, criterion: Any) -> Callable[[torch.Tensor], bool]:
        """`criterion`, bound to this row; it gets None for its scores."""
        return lambda prefix: bool(criterion(self._ids(prefix), None))

    def _ids(self, prefix: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.padding, prefix.to(self.padding.device)), 1)

    def _own(self, processor: Any) -> Any:
        """A copy that knows this row only, where a processor holds something for each row of the batch."""
        lengths = getattr(processor, "prompt_ignore_length", None)
        prompt = self.index // self.copies
        if isinstance(lengths, torch.Tensor):  # repetition penalty
            return _with(processor, prompt_ignore_length=lengths[self.index : self.index + 1])
        if hasattr(processor, "_prefix_allowed_tokens_fn"):
            allowed = processor._prefix_allowed_tokens_fn
            return _with(processor, _prefix_allowed_tokens_fn=lambda _, ids: allowed(prompt, ids), _num_beams=1)
        if hasattr(processor, "encoder_input_ids"):
            return _with(processor, encoder_input_ids=processor.encoder_input_ids[prompt : prompt + 1])
        if hasattr(processor, "generated_ngrams"):  # encoder_no_repeat_ngram_size
            return _with(processor, generated_ngrams=processor.generated_ngrams[prompt : prompt + 1], batch_size=1)
        return processor


def _with(processor: Any, **changes: Any) -> Any:
    changed = copy.copy(processor)
    vars(changed).update(changes)
    return changed
