"""The engine: continuous batching around one algorithm, `Engine.step`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dsde_kernels as dk

from .blocks import BlockManager, BlockTable
from .cache import PackedModel, context_of
from .controllers import Controller, named
from .fallback import SequentialModel, load
from .proposer import Drafts, ModelProposer, NgramProposer
from .request import Completion, Request, SamplingParams, StepTrace, is_number, whole
from .sampling import RowParams
from .scheduler import Entry, Scheduler
from .scorer import Scorer
from .stops import cut_at_end, cut_at_stop

# Without kv_blocks the pool holds every sequence at full context, but no more positions than this.
_DEFAULT_POSITIONS = 32768
_MOST = 2**31 - 1


class Engine:
    """Lossless speculative decoding of many requests at once.

    Parameters
    ----------
    target : PreTrainedModel
        The model whose distribution the output has.
    draft : PreTrainedModel or "ngram", optional
        The model that proposes; same tokenizer, any device and number format. "ngram" proposes what followed the
        sequence's own last tokens when they occurred before. Not needed when the controller never drafts.
    controller : str or Controller
        "dsde", "static-K", "off", or an object with the protocol of `dsde.controllers.Controller`.
    tokenizer : PreTrainedTokenizerBase, optional
        Needed for stop strings only.
    max_sequences : int
        Most requests decoded at a time; more wait.
    kv_blocks : int, optional
        Blocks in the KV pool; None gives every sequence its full context, up to 32,768 positions in all.
    block_size : int
        Token positions a block.
    max_tokens_per_step : int
        Most rows in one target forward pass; longer prompts are computed in chunks.
    seed : int
        Seeds the requests that bring no seed of their own.

    Raises
    ------
    ValueError
        A model in training mode, in a number format that isn't float32, bfloat16 or float16, or whose cache can't be
        rolled back; an unknown controller, one that drafts without a draft, or a `Dsde` that serves another engine; a
        limit or seed that is no int or out of range.
    MemoryError
        The KV pool does not fit.

    Notes
    -----
    Not thread-safe: one thread submits and steps. Models are used in place and unchanged; between steps they can be
    used as ever.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Literal["ngram"] | None = None,
        controller: str | Controller = "dsde",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_sequences: int = 32,
        kv_blocks: int | None = None,
        block_size: int = 32,
        max_tokens_per_step: int = 2048,
        seed: int = 0,
    ) -> None:
        self.controller = named(controller)
        if self.controller.sl_limit > 0 and draft is None:
            raise ValueError(f'draft must be a model or "ngram" with controller {controller!r}, got None')
        if not isinstance(target, PreTrainedModel):
            raise ValueError(f"target must be a model, got {target!r}; dsde.models.load_model loads one")
        if not (draft is None or draft == "ngram" or isinstance(draft, PreTrainedModel)):
            raise ValueError(f'draft must be a model or "ngram", got {draft!r}; dsde.models.load_model loads one')
        block_size = whole("block_size", block_size, 1, _MOST)
        max_sequences = whole("max_sequences", max_sequences, 1, _MOST)
        max_tokens_per_step = whole("max_tokens_per_step", max_tokens_per_step, 1, _MOST)
        self.seed = whole("seed", seed, -(2**63), 2**63 - 1)
        if kv_blocks is not None:
            kv_blocks = whole("kv_blocks", kv_blocks, 1, _MOST)
        else:
            context = context_of(target.config.get_text_config()) or _DEFAULT_POSITIONS
            kv_blocks = min(max_sequences * -(-context // block_size), _DEFAULT_POSITIONS // block_size)
        self.blocks = BlockManager(kv_blocks, block_size)
        self.target = load(target, kv_blocks * block_size, block_size)
        self.draft: PackedModel | SequentialModel | None = None
        self.proposer: ModelProposer | NgramProposer | None = None
        drafts = self.controller.sl_limit > 0
        if drafts and isinstance(draft, str):
            self.proposer = NgramProposer()
        elif drafts and draft is not None and not isinstance(draft, str):
            self.draft = load(draft, kv_blocks * block_size, block_size)
            self.proposer = ModelProposer(self.draft, self.target.vocabulary, self.target.device)
        self.scorer = Scorer(self.target)
        self.scheduler = Scheduler(
            self.blocks, max_sequences, max_tokens_per_step, None if self.draft is None else self.draft.context
        )
        self.controller.bind(max_sequences, self.target.device)
        self.tokenizer = tokenizer
        eos = target.generation_config.eos_token_id if target.generation_config is not None else None
        self._eos = frozenset([eos] if isinstance(eos, int) else eos or ())
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}
        self._steps = self._tokens = self._drafted = self._accepted = 0
        self._seconds = 0.0
        self._stepping = False
        self._unsettled: deque[tuple[Request, int, StepTrace]] = deque()  # committed, callbacks still due

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        on_tokens: Callable[[Request, list[int]], Any] | None = None,
    ) -> Request:
        """Queue a request; it joins the batch at the next step with room for it.

        Parameters
        ----------
        prompt_ids : sequence of int
            At least one id of the target's vocabulary.
        params : SamplingParams, optional
            Defaults to greedy decoding of 128 tokens.
        priority : int
            Of 64 bits. Higher is served first and preempted last.
        deadline : float, optional
            Seconds from now, 0 or more; among equal priorities the earliest is served first, and requests without one
            come last. Not a time-out.
        on_tokens : callable, optional
            Called as ``on_tokens(request, new_ids)`` after each step that committed tokens of this request.

        Returns
        -------
        Request
            Its ``completion`` is None until it ends.

        Raises
        ------
        ValueError
            An empty prompt, ids outside the vocabulary, a prompt that leaves no room for a token in the context, a
            request that could never fit into the KV pool, stop strings without a tokenizer, or an argument of another
            kind than described.
        """
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r}")
        try:
            prompt = [operator.index(i) for i in prompt_ids]
        except TypeError:
            raise ValueError(f"a prompt must be a sequence of token ids, got prompt_ids {prompt_ids!r}") from None
        if not prompt:
            raise ValueError("prompt_ids must hold at least one token, got none")
        bad = next((i for i in prompt if not 0 <= i < self.target.num_embeddings), None)
        if bad is not None:
            raise ValueError(f"prompt_ids must lie in [0, {self.target.num_embeddings}), got {bad}")
        limit = len(prompt) + params.max_new_tokens
        if self.target.context is not None:
            if len(prompt) >= self.target.context:
                raise ValueError(
                    f"prompt_ids must be shorter than the context of {self.target.context}, got {len(prompt)} tokens"
                )
            limit = min(limit, self.target.context)
        room = self.blocks.num_blocks * self.blocks.block_size
        if limit > room:
            raise ValueError(f"prompt and max_new_tokens need {limit} KV positions, kv_blocks hold {room}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop needs an engine with a tokenizer, got {params.stop!r}")
        if deadline is not None and not (is_number(deadline) and deadline >= 0):
            raise ValueError(f"deadline must be >= 0 seconds from now, got {deadline!r}")
        priority = whole("priority", priority, -(2**63), 2**63 - 1)
        number = next(self._ids)
        request = Request(
            id=number,
            prompt_ids=prompt,
            params=params,
            eos=self._eos if params.eos is None else frozenset(params.eos),
            seed=_mix(self.seed, number) if params.seed is None else params.seed,
            limit=limit,
            priority=priority,
            on_tokens=on_tokens,
        )
        if deadline is not None:
            request.deadline = request.submitted + deadline
        self._requests[number] = request
        self.scheduler.add(request)
        return request

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def step(self) -> list[Completion]:
        """Advance every scheduled sequence by one speculation round: schedule, draft, score, verify, adapt, commit.

        Returns
        -------
        list of Completion
            The requests that ended in this step by themselves, in order of service.

        Raises
        ------
        RuntimeError
            Called from within a step, by a callback or a logits processor.
        """
        if self._stepping:
            raise RuntimeError("step() was called by a callback of a step that is not over")
        start = time.perf_counter()
        self._stepping = True
        try:
            ended = self._settle()  # what an interrupt left of the step before
            with torch.inference_mode():
                self._advance()
            ended += self._settle()
        finally:
            self._stepping = False
        self._seconds += time.perf_counter() - start
        return ended

    def _advance(self) -> None:
        """One round of the algorithm, up to the committed tokens."""
        # Schedule: each sequence gets blocks for its length + SL + 1, prompts their next chunk.
        entries = self.scheduler.schedule(self.controller.sl_limit)
        if not entries:
            return
        self._steps += 1
        for request in (e.request for e in entries):
            if request.step == request.cached == 0:
                self.controller.start(request)
        requests = [e.request for e in entries if e.verifies]
        params = RowParams.of(requests, self.target.device)
        # Draft: every sequence its own number of tokens, from q.
        drafts = Drafts([[] for _ in requests])
        if self.proposer is not None:
            drafts = self.proposer.propose(entries, requests, params)
        # Score: p at every drafted position and one more.
        logits, raw = self.scorer.score(entries, requests, drafts)
        # Verify: KLD, rejection sampling and, for DSDE, the stability update, in one operation.
        result = self._verify(requests, params, drafts, logits) if requests else None
        # Adapt: the next step's speculation lengths.
        if result is not None:
            self.controller.observe(requests, result)
        # Commit: tokens, cache lengths, blocks.
        self._commit(entries, requests, drafts, raw, result)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Decode prompts to their end.

        Parameters
        ----------
        prompts : sequence of sequences of int
            Token ids.
        params : SamplingParams or one for each prompt, optional
            As for `submit`.
        progress : bool
            Show a progress bar on standard error.

        Returns
        -------
        list of Completion
            In the order of `prompts`. Those of requests that failed have the ``finish_reason`` "error".

        Raises
        ------
        ValueError
            `params` are neither one nor as many as the prompts, or `submit` refuses a prompt; nothing is decoded then.
        RuntimeError
            Called from within a step.
        """
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"params must be one or {len(prompts)}, as many as prompts, got {len(each)}")
        requests: list[Request] = []
        try:
            requests.extend(self.submit(p, q) for p, q in zip(prompts, each, strict=True))
            with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
                unfinished = {r.id for r in requests}
                while unfinished := {i for i in unfinished if i in self._requests}:
                    self.step()
                    bar.update(len(requests) - bar.n - sum(i in self._requests for i in unfinished))
        except BaseException:  # leave nothing half-done behind a refused prompt or an interrupt
            for request in requests:
                if request.completion is None:
                    self.abort(request.id)
            raise
        return [r.completion for r in requests if r.completion is not None]

    def abort(self, request_id: int) -> Completion:
        """End a request now with what it has; its blocks are free afterwards.

        Raises
        ------
        ValueError
            No request of that id is waiting or running.
        RuntimeError
            Called by a logits processor, in the middle of a computation that the request may be part of.
        """
        if self._stepping and torch.is_inference_mode_enabled():
            raise RuntimeError("abort() was called by a logits processor")
        if request_id not in self._requests:
            raise ValueError(f"request_id must be of a waiting or running request, got {request_id!r}")
        return self._end(self._requests[request_id], "abort")

    def stats(self) -> dict[str, float]:
        """Counters since construction.

        Returns
        -------
        dict
            ``steps``, ``tokens`` (committed), ``drafted``, ``accepted``, ``preemptions``, ``running``, ``waiting``,
            ``free_blocks``, ``blocks``; ``seconds`` in `step`, of which ``target_seconds`` and ``draft_seconds`` in
            the models' forward passes (wall time; a GPU's work is counted where it is waited for).
        """
        return {
            "steps": self._steps,
            "tokens": self._tokens,
            "drafted": self._drafted,
            "accepted": self._accepted,
            "preemptions": self.scheduler.preemptions,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free_blocks": self.blocks.num_free,
            "blocks": self.blocks.num_blocks,
            "seconds": self._seconds,
            "target_seconds": self.target.seconds,
            "draft_seconds": 0.0 if self.draft is None else self.draft.seconds,
        }

    def _verify(
        self, requests: Sequence[Request], params: RowParams, drafts: Drafts, logits: torch.Tensor
    ) -> dk.Verification | dk.StepResult:
        device = logits.device
        counts = [len(d) for d in drafts.tokens]
        threshold = None
        if params.truncation is not None:
            rows = torch.tensor([i for i, k in enumerate(counts) for _ in range(k + 1)], device=device)
            threshold = params.take(rows).threshold(logits)
        return self.controller.verify(
            requests,
            target_logits=logits,
            draft_logits=drafts.logits,
            draft_tokens=torch.tensor([t for d in drafts.tokens for t in d], dtype=torch.int64, device=device),
            cu_draft=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
            temperature=params.temperature,
            seed=params.seed,
            step=params.step,
            max_draft=max(counts),
            target_threshold=threshold,
            draft_threshold=drafts.threshold,
        )

    def _commit(
        self,
        entries: Sequence[Entry],
        requests: Sequence[Request],
        drafts: Drafts,
        raw: Sequence[torch.Tensor | None],
        result: dk.Verification | dk.StepResult | None,
    ) -> None:
        """Bring every request of the step up to date. No user code runs here, so nothing can stop it half-way."""
        now = time.perf_counter()
        for entry in entries:
            if self.proposer is not None:
                entry.request.draft_cached = self.proposer.cached_after(entry)
            if not entry.verifies:
                entry.request.cached += entry.rows
        if result is None:
            return
        tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
        accepted, ok, kld = result.num_accepted.tolist(), result.ok.tolist(), result.kld.tolist()
        wvir = self.controller.wvir(requests)
        first = 0
        for i, request in enumerate(requests):
            sl = len(drafts.tokens[i])
            signal = sum(kld[first : first + sl]) / sl if sl else math.nan
            first += sl
            new = cut_at_end(request, [t for t in tokens[i] if t >= 0])
            request.tokens += new
            request.logprobs += logprobs[i][: len(new)]
            rows = raw[i]
            if rows is not None:
                request.logits += [row.clone() for row in rows[: len(new)]]  # a view would keep the rejected rows alive
            request.cached = len(request.tokens) - 1
            request.draft_cached = min(request.draft_cached, request.cached)
            self.blocks.trim(request.table, len(request.tokens))
            if new and request.first_token is None:
                request.first_token = now
            cause, request.cause = request.cause, None
            if not ok[i]:
                request.fail(cause)
            trace = StepTrace(
                request.step,
                sl,
                accepted[i],
                None if math.isnan(signal) else signal,
                wvir[i] if wvir is not None and sl else None,
            )
            request.step += 1
            self._unsettled.append((request, len(new), trace))

    def _settle(self) -> list[Completion]:
        """Run the users' stop checks and callbacks on what was committed; requests that are done leave."""
        ended = []
        while self._unsettled:
            request, count, trace = self._unsettled.popleft()
            if request.id not in self._requests:  # aborted by another request's callback
                continue
            start = len(request.tokens) - count
            try:
                stopped = cut_at_stop(request, start, self.tokenizer, self.target.device)
                if stopped:  # before the position that failed
                    request.error = request.cause = None
                kept = len(request.tokens) - start
                accepted = min(trace.accepted, kept)
                request.trace.append(dataclasses.replace(trace, accepted=accepted))
                self._tokens += kept
                self._drafted += trace.sl
                self._accepted += accepted
                if kept and request.on_tokens is not None:
                    request.on_tokens(request, request.tokens[start:])
            except Exception as cause:  # user code: only this request may suffer
                request.fail(cause)
            except BaseException:  # an interrupt: the request it hit ends, the others go on when stepped again
                self.abort(request.id)
                raise
            if request.id not in self._requests:  # aborted by its own callback
                continue
            if request.error is not None:
                ended.append(self._end(request, "error"))
            elif stopped:
                ended.append(self._end(request, "stop"))
            elif len(request.tokens) >= request.limit:
                ended.append(self._end(request, "length"))
        return ended

    def _end(self, request: Request, reason: str) -> Completion:
        self.scheduler.remove(request)
        request.table = BlockTable()  # whoever keeps the request keeps no cache with it
        del self._requests[request.id]
        return request.finish(reason)


def _mix(seed: int, number: int) -> int:
    """A request's own 64-bit seed: distinct for every request of an engine (an odd multiplier is a bijection)."""
    value = (seed * 0x9E3779B97F4A7C15 + number) % 2**64
    return value - 2**64 if value >= 2**63 else value
