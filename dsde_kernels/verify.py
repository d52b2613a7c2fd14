"""Verify a ragged batch of drafts by rejection sampling, and DSDE's whole step after it.

With p the target and q the draft distribution at a position, both after temperature and truncation, the drafted token x
(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)

    passes iff  u < p(x) / q(x)                        u from the accept stream, offset = position j
    else        draw from  max(p - q, 0) / sum         race on the resample stream, offset = number accepted
    all passed  draw from  p of the bonus row          the same stream

which leaves every emitted token distributed as p. KLD (see kld.py) is taken at every drafted position.

Edge rules
* Temperature 0: passes iff x is the target's argmax, lowest id on ties; no number is drawn; KLD and log-probabilities
  are taken at temperature 1 and without truncation.
* p(x) = 0 never passes; p = q always does, since both come from the same operations and u < 1.
* Empty residual (nothing but rounding left): draw from p.
* No draft logits: drafts are deterministic, q is 1 at x. KLD is then -log p(x), with p(x) = 0 counted as 1e-8.
* Draft id outside [0, Vt): it is rejected and the row is drawn from p.
* Draft columns beyond Vt are ignored: drafts must be drawn from ``draft_logits[:, :Vt]``. Target columns beyond Vd have
  q = 0.
* A row that is consumed and holds NaN, +inf or no finite logit ends its sequence: `ok` False, no token from there on. A
  sequence consumes target rows up to and including the one it draws its last token from, and, when it is sampled, the
  draft rows of the drafts it looks at. Greedy verification never looks at q: there, a broken draft row only makes its
  KLD NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import traced, use_triton
from .checks import check_device, check_logits, check_ragged, check_range, check_tensor, check_vector
from .stability import DsdeRule, StabilityState, check_state

EMPTY = 1e-30  # p = q leaves exactly 0, both come from the same operations; nothing this small is worth drawing from


class Inputs(NamedTuple):
    """The arguments that `verify` and `dsde_step` share; `verify` documents them."""

    target_logits: Tensor
    draft_logits: Tensor | None
    draft_tokens: Tensor
    cu_draft: Tensor
    temperature: Tensor
    seed: Tensor
    step: Tensor
    max_draft: int
    target_threshold: Tensor | None
    draft_threshold: Tensor | None

    def check(self) -> None:
        """Raise ValueError naming the argument that does not fit."""
        check_tensor("target_logits", self.target_logits)
        check_tensor("draft_tokens", self.draft_tokens)
        check_tensor("temperature", self.temperature)
        if isinstance(self.max_draft, bool) or not isinstance(self.max_draft, int) or self.max_draft < 0:
            raise ValueError(f"max_draft must be an int >= 0; got {self.max_draft!r}")
        device, drafts = self.target_logits.device, self.draft_tokens.numel()
        check_vector("draft_tokens", self.draft_tokens, drafts, device, integer=True)
        sequences = self.temperature.numel()
        check_vector("temperature", self.temperature, sequences, device, integer=False)
        check_vector("cu_draft", self.cu_draft, sequences + 1, device, integer=True)
        check_vector("seed", self.seed, sequences, device, integer=True)
        check_vector("step", self.step, sequences, device, integer=True)
        check_logits("target_logits", self.target_logits, drafts + sequences)
        if self.draft_logits is not None:
            check_logits("draft_logits", self.draft_logits, drafts, device)
        if self.target_threshold is not None:
            check_vector("target_threshold", self.target_threshold, drafts + sequences, device, integer=False)
        if self.draft_threshold is not None:
            check_vector("draft_threshold", self.draft_threshold, drafts, device, integer=False)
        check_range("temperature", self.temperature, 0.0, torch.finfo(torch.float32).max)
        check_ragged(self.cu_draft, drafts, self.max_draft)


class Verification(NamedTuple):
    """Outcome of one verification of B sequences with N drafts.

    Attributes
    ----------
    tokens : [B, max_draft+1] int64
        Accepted drafts, then the resampled or bonus token; -1 beyond.
    num_accepted : [B] int32
        Drafts kept. Emitted tokens are one more, or just these where `ok` is False.
    kld : [N] float32
        KL(p || q) at each drafted position, nats; NaN where a row of logits is broken.
    accept_prob : [N] float32
        min(1, p/q) of each draft; for greedy sequences 1 iff it is the argmax. 0 for ids outside the vocabulary.
    logprobs : [B, max_draft+1] float32
        log p of each emitted token, after temperature and truncation (greedy: temperature 1, none); 0 beyond.
    ok : [B] bool
        False where a consumed row of logits holds NaN, +inf or no finite number.
    """

    tokens: Tensor
    num_accepted: Tensor
    kld: Tensor
    accept_prob: Tensor
    logprobs: Tensor
    ok: Tensor

    @classmethod
    def empty(cls, x: Inputs) -> "Verification":
        """Uninitialised results for `x`."""
        (drafts,), (sequences,) = x.draft_tokens.shape, x.temperature.shape

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=x.target_logits.device)

        return cls(
            tokens=make(sequences, x.max_draft + 1, dtype=torch.int64),
            num_accepted=make(sequences, dtype=torch.int32),
            kld=make(drafts),
            accept_prob=make(drafts),
            logprobs=make(sequences, x.max_draft + 1),
            ok=make(sequences, dtype=torch.bool),
        )


class StepResult(NamedTuple):
    """`Verification`, then what DSDE makes of it.

    Attributes
    ----------
    next_sl : [B] int32
        Speculation length of each sequence's next step, capped.
    sl_cap : 0-d float32
        The batch cap; +inf where there is none.
    """

    tokens: Tensor
    num_accepted: Tensor
    kld: Tensor
    accept_prob: Tensor
    logprobs: Tensor
    ok: Tensor
    next_sl: Tensor
    sl_cap: Tensor


@torch.no_grad()
def verify(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    *,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    target_threshold: Tensor | None = None,
    draft_threshold: Tensor | None = None,
) -> Verification:
    """Accept or reject each draft of a ragged batch and draw one more token for each sequence.

    Sequence i drafted ``k_i = cu_draft[i+1] - cu_draft[i]`` tokens; its draft rows start at ``cu_draft[i]``, its target
    rows at ``cu_draft[i] + i``, of which the last (the k_i + 1st) is the bonus row.

    Parameters
    ----------
    target_logits : [N+B, Vt] float32, bfloat16 or float16
        Raw logits, any row stride >= Vt. Not changed.
    draft_logits : [N, Vd] float32, bfloat16 or float16, or None
        What the drafts were drawn from (columns beyond Vt ignored). None: deterministic drafts, q is one-hot.
    draft_tokens : [N] int64
        Ids outside [0, Vt), such as the placeholder -1, are rejected and the row is drawn from p.
    cu_draft : [B+1] int32 or int64
        Exclusive cumulative sum of k, with a leading 0.
    temperature : [B] float32
        0 is greedy.
    seed, step : [B] int32 or int64
        The request's seed and its own count of verifications: a pair must not be used twice.
    max_draft : int
        At least every k_i; sets the width of the results.
    target_threshold : [N+B] float32, optional
        From `truncation_threshold`, for each target row.
    draft_threshold : [N] float32, optional
        The thresholds the drafts were drawn with.

    Returns
    -------
    Verification

    Raises
    ------
    ValueError
        Wrong shape, dtype or device; a temperature below 0 or a `cu_draft` that is no such sum (both read on CPU
        tensors only).

    Examples
    --------
    Two sequences with two drafts and none, vocabulary 3, greedy:

    >>> target = torch.tensor([[0., 9, 0], [0, 0, 9], [9, 0, 0], [0, 0, 9]])
    >>> zeros = torch.zeros(2, dtype=torch.int64)
    >>> out = verify(target, None, torch.tensor([1, 0]), torch.tensor([0, 2, 2]), temperature=torch.zeros(2),
    ...              seed=zeros, step=zeros, max_draft=2)
    >>> out.tokens.tolist(), out.num_accepted.tolist()
    ([[1, 2, -1], [2, -1, -1]], [1, 0])
    """
    x = Inputs(
        target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft, target_threshold,
        draft_threshold,
    )  # fmt: skip
    return Verification(*torch.ops.dsde_kernels.verify(*x)) if traced(target_logits) else run_verify(x)


def run_verify(x: Inputs) -> Verification:
    x.check()
    if use_triton(x.target_logits.device):
        from .verify_kernel import verify_triton

        return verify_triton(x)
    from .verify_torch import verify_torch

    return verify_torch(x)


@torch.no_grad()
def dsde_step(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    *,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    state: StabilityState,
    slots: Tensor,
    rule: DsdeRule,
    target_threshold: Tensor | None = None,
    draft_threshold: Tensor | None = None,
) -> StepResult:
    """`verify`, then `stability_update` and `speculation_lengths`: one whole DSDE step.

    Parameters
    ----------
    state : StabilityState
        Built for `rule`; the slots `slots` are changed in place, except those of sequences without drafts, with a KLD
        that is not finite, or with `ok` False.
    slots : [B] int32 or int64
        A different slot for each sequence.
    rule : DsdeRule

    The other parameters, and the errors, are those of `verify`.

    Returns
    -------
    StepResult
    """
    x = Inputs(
        target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft, target_threshold,
        draft_threshold,
    )  # fmt: skip
    if traced(target_logits):
        parts = (state.table, state.weights, slots, rule.numbers())
        return StepResult(*torch.ops.dsde_kernels.dsde_step(*x, *parts))
    return run_dsde_step(x, state, slots, rule)


def run_dsde_step(x: Inputs, state: StabilityState, slots: Tensor, rule: DsdeRule) -> StepResult:
    x.check()
    check_state(state, slots, rule, x.temperature.shape[0])
    check_device("state", state.table, x.target_logits.device)
    if use_triton(x.target_logits.device):
        from .verify_kernel import dsde_step_triton

        return dsde_step_triton(x, state, slots, rule)
    from .verify_torch import dsde_step_torch

    return dsde_step_torch(x, state, slots, rule)
