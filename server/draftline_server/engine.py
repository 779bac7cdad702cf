"""The engine: one `step` computes the next tokens of many requests and hands out what is new.

    expire    requests whose time is up leave, and their blocks with them
    offer     which requests could have a draft, from which proposer; the controller picks lengths
    schedule  decodes first, then prefill chunks; blocks are allocated, or requests preempted
    draft     proposers run
    forward   one packed pass of the target over decodes, drafts and prefill chunks together
    verify    each draft's accepted tokens and the one that follows
    commit    token by token, until a stop; cache lengths roll back by themselves
    publish   deltas for the callers, statistics for whoever looks

All of it runs in one thread. The engine never waits; callers step it while `has_work`.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from draftline_server.core.admission import RequestLimits
from draftline_server.core.clock import Clock
from draftline_server.core.detokenizer import Decode
from draftline_server.core.generation import GenerationDelta, GenerationRequest, TokenLogprobs
from draftline_server.core.output import RequestOutput, token_logprobs
from draftline_server.core.request import Request
from draftline_server.core.sampling_params import SamplingParams
from draftline_server.core.scheduler import ScheduledRequest, Scheduler, StepPlan
from draftline_server.core.stats import EngineStatistics
from draftline_server.core.tally import Tally
from draftline_server.errors import DeadlineError, InternalError, ModelError, RequestError
from draftline_server.model.hidden_states import HiddenStateTap
from draftline_server.model.logits import top_logprobs
from draftline_server.model.runner import ModelRunner, Runner, SequenceInput
from draftline_server.speculation.calibration import measure_costs
from draftline_server.speculation.chain import Offer, ProposerChain
from draftline_server.speculation.length_controller import DRAFT_MODEL, Choice, LengthController
from draftline_server.speculation.proposer import Draft, DraftTask
from draftline_server.speculation.step_costs import StepCosts
from draftline_server.speculation.verification import Verified, Verify, VerifyTask, verify

_NO_NUMBERS = "the target's logits are no numbers; its dtype may be too narrow for this prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of; `engine_factory` puts it together."""

    target: ModelRunner
    draft: Runner | None
    proposers: ProposerChain
    controller: LengthController
    scheduler: Scheduler
    limits: RequestLimits
    eos_token_ids: frozenset[int]
    decode: Decode
    """Token ids to text, special tokens included."""
    decode_plain: Decode
    """Token ids to text, special tokens left out."""
    clock: Clock
    verify: Verify = verify
    tap: HiddenStateTap | None = None
    """On the target's layers, where a proposer reads their hidden states."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the target computed for the tokens that a request fed in a step."""

    start: int
    """Position of the first one."""
    rows: Tensor


class Engine:
    """Serves requests step by step. Only one thread may call it."""

    def __init__(self, parts: EngineParts) -> None:
        self.limits = parts.limits
        self._parts = parts
        self._scheduler = parts.scheduler
        self._clock = parts.clock
        self._requests: dict[str, Request] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._ended: list[GenerationDelta] = []
        self._tally = self._new_tally()
        self._num_added = 0

    @property
    def costs(self) -> StepCosts:
        """What forwards cost here, as far as it is known."""
        return self._parts.controller.costs

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._ended)

    def warm_up(self) -> None:
        """Measures costs and completes two requests through both models, of which nothing else is kept."""
        parts = self._parts
        _check_logits(parts.target, "target")
        if parts.draft is not None:
            _check_logits(parts.draft, "draft")
        if parts.proposers.names:
            measure_costs(
                parts.controller.costs,
                target=parts.target,
                draft=parts.draft,
                clock=self._clock,
                max_tokens=parts.scheduler.max_running * (parts.controller.limit + 1),
            )
        num_tokens = min(2 * (parts.controller.limit + 2), self.limits.max_context_length - 1)
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=0)
            self.add_request(
                GenerationRequest(request_id="warm-up", prompt_token_ids=(0,), sampling=sampling)
            )
            while self.has_work:
                self.step()
        # Drafts for a prompt without any sense say nothing of those to come.
        parts.controller.reset()
        parts.scheduler.reset_counts()
        self._tally = self._new_tally()

    def _new_tally(self) -> Tally:
        return Tally.of(self._parts.proposers.names, max_draft_tokens=self._parts.controller.limit)

    def add_request(self, spec: GenerationRequest) -> None:
        """Queues an admitted request; its id must not be in use."""
        assert spec.request_id not in self._requests, f"request id {spec.request_id} is in use"
        seed = secrets.randbits(64) if spec.sampling.seed is None else spec.sampling.seed
        request = Request(spec, seed=seed, sequence_number=self._num_added)
        self._num_added += 1
        decode = self._parts.decode_plain if spec.sampling.skip_special_tokens else self._parts.decode
        self._requests[spec.request_id] = request
        self._outputs[spec.request_id] = RequestOutput(
            request, decode=decode, eos_token_ids=self._parts.eos_token_ids
        )
        self._scheduler.add(request)

    def abort(self, request_id: str, error: RequestError) -> None:
        """Ends a request now and frees its blocks; the next step tells its caller why.

        An id that is not (or no longer) known is ignored: the request has ended in the meantime.
        """
        if request_id in self._requests:
            self._forget(self._requests[request_id])
            self._ended.append(GenerationDelta(request_id, error=error))

    def step(self) -> list[GenerationDelta]:
        """Computes one step and returns what is new. Never raises for a request's sake."""
        self._expire()
        deltas, self._ended = self._ended, []
        offers = self._offer()
        choices = self._parts.controller.choose(offers, self._num_decoding())
        plan = self._scheduler.schedule({name: choice.length for name, choice in choices.items()})
        if plan.scheduled:
            deltas.extend(self._run(plan, choices))
            self._read_along(plan, has_offers=any(offer.proposer == DRAFT_MODEL for offer in offers))
        return deltas

    def check_integrity(self) -> None:
        """Raises AssertionError where lengths or blocks do not add up. For tests."""
        self._scheduler.pool.check_integrity()
        for request in self._requests.values():
            request.check_lengths()

    def _num_decoding(self) -> int:
        return sum(r.is_decoding for r in self._scheduler.running)

    def _expire(self) -> None:
        now = self._clock()
        for request in list(self._requests.values()):
            spec = request.spec
            if spec.deadline is not None and now >= spec.deadline:
                self.abort(spec.request_id, DeadlineError("the request's time ran out"))
            elif (
                spec.queue_deadline is not None
                and request.first_scheduled_time is None
                and now >= spec.queue_deadline
            ):
                self.abort(spec.request_id, DeadlineError("the request waited too long to be started"))

    def _offer(self) -> list[Offer]:
        """What the proposers could draft in this step."""
        controller = self._parts.controller
        decoding = [r for r in self._scheduler.running if r.is_decoding]
        usable = controller.usable(len(decoding)) if decoding else frozenset()
        if not usable:
            return []
        proposers = self._parts.proposers
        return [
            offer
            for request in decoding
            for offer in proposers.offers(request, min(controller.limit, _room(request)), usable)
        ]

    def _run(self, plan: StepPlan, choices: Mapping[str, Choice]) -> list[GenerationDelta]:
        for runner in filter(None, (self._parts.target, self._parts.draft)):
            runner.clear(plan.fresh_blocks)
        started = self._clock()
        self._note_first_scheduled(plan, started)
        drafts = self._draft(plan, choices)
        drafted = self._clock()
        inputs = [_target_input(s, drafts) for s in plan.scheduled]
        logits, hidden_states = self._forward(plan, inputs)
        sampling = [s for s in plan.scheduled if s.samples]
        tasks = [self._verify_task(s.request, drafts) for s in sampling]
        raw = logits.clone() if any(t.request.spec.sampling.logprobs is not None for t in tasks) else None
        verified = self._parts.verify(logits, tasks) if tasks else []
        finished = self._clock()
        logprobs = _logprobs(raw, tasks, verified)
        shown = self._rows_to_show(plan, inputs, hidden_states)
        for item in plan.scheduled:
            if not item.samples:
                item.request.target_len += item.num_tokens
                self._show(item.request, shown)
        deltas = []
        for task, result in zip(tasks, verified, strict=True):
            own_logprobs = logprobs.get(task.request.request_id)
            if result.token_ids:
                deltas.append(self._commit(task, result, own_logprobs, finished, shown))
            else:
                self.abort(task.request.request_id, InternalError(_NO_NUMBERS))
        self._count_step(
            plan, drafts, verified, draft_seconds=drafted - started, verify_seconds=finished - drafted
        )
        return deltas

    def _note_first_scheduled(self, plan: StepPlan, now: float) -> None:
        for item in plan.scheduled:
            if item.request.first_scheduled_time is None:
                item.request.first_scheduled_time = now
                self._tally.prompt_tokens += item.request.num_prompt_tokens

    def _draft(self, plan: StepPlan, choices: Mapping[str, Choice]) -> Mapping[str, Draft]:
        """Runs the proposers; only lengths for which the schedule found tokens and blocks."""
        tasks: defaultdict[str, list[DraftTask]] = defaultdict(list)
        for item in plan.scheduled:
            if item.draft_length > 0:
                proposer = choices[item.request.request_id].proposer
                tasks[proposer].append(DraftTask(item.request, item.draft_length))
        return self._parts.proposers.propose(tasks) if tasks else {}

    def _forward(self, plan: StepPlan, inputs: Sequence[SequenceInput]) -> tuple[Tensor, Tensor | None]:
        """Logits, and hidden states ``[tokens, size]`` where a request of the step is drafted from them."""
        target, tap, proposers = self._parts.target, self._parts.tap, self._parts.proposers
        if tap is None or not any(proposers.reads_hidden_states(s.request) for s in plan.scheduled):
            return target.forward(inputs), None
        with tap.taking():
            logits = target.forward(inputs)
        return logits, tap.hidden_states()

    def _rows_to_show(
        self, plan: StepPlan, inputs: Sequence[SequenceInput], hidden_states: Tensor | None
    ) -> dict[str, _Shown]:
        """Hidden states by id of the requests that are drafted from them."""
        shown: dict[str, _Shown] = {}
        first = 0
        for item, fed in zip(plan.scheduled, inputs, strict=True):
            rows = slice(first, first + len(fed.token_ids))
            first = rows.stop
            if hidden_states is not None and self._parts.proposers.reads_hidden_states(item.request):
                shown[item.request.request_id] = _Shown(fed.start, hidden_states[rows])
        return shown

    def _show(self, request: Request, shown: Mapping[str, _Shown]) -> None:
        """Shows the proposers what the target computed for the tokens that now are committed."""
        own = shown.get(request.request_id)
        if own is not None:
            self._parts.proposers.observe(request, own.start, own.rows[: request.target_len - own.start])

    def _verify_task(self, request: Request, drafts: Mapping[str, Draft]) -> VerifyTask:
        end_token_ids = self._outputs[request.request_id].end_token_ids
        return VerifyTask(request, drafts.get(request.request_id), end_token_ids)

    def _commit(
        self,
        task: VerifyTask,
        verified: Verified,
        logprobs: Sequence[TokenLogprobs] | None,
        now: float,
        shown: Mapping[str, _Shown],
    ) -> GenerationDelta:
        """Adds the verified tokens one by one; what follows a stop is dropped."""
        request, output = task.request, self._outputs[task.request.request_id]
        num_before = request.num_tokens
        has_ended = False
        for index, token_id in enumerate(verified.token_ids):
            has_ended = output.commit(token_id, logprobs[index] if logprobs else None)
            if has_ended:
                break
        if request.first_token_time is None:
            request.first_token_time = now
        # The last token kept has not been read by the target, whichever kind it is.
        request.target_len = request.num_tokens - 1
        request.draft_len = min(request.draft_len, request.target_len)
        self._show(request, shown)
        num_kept = request.num_tokens - num_before
        self._tally.generation_tokens += num_kept
        request.stats.decode_steps += 1
        if task.draft is not None:
            self._count_draft(request, task.draft, verified, num_kept)
        if has_ended:
            self._read_to_the_end(request)
        self._scheduler.remember_full_blocks(request)
        if not has_ended:
            return output.take_delta()
        summary = output.summarize(now)
        self._forget(request)
        return output.take_delta(summary)

    def _read_to_the_end(self, request: Request) -> None:
        """Lets the draft read the last block that an ended request leaves: a conversation goes on from it."""
        block_size = self._scheduler.pool.block_size
        leaves_block = request.target_len // block_size > request.draft_len // block_size
        parts = self._parts
        if leaves_block and DRAFT_MODEL in parts.proposers.names and parts.controller.is_on(DRAFT_MODEL):
            parts.proposers.follow([request])

    def _count_draft(self, request: Request, draft: Draft, verified: Verified, num_kept: int) -> None:
        """Counts one draft; what a stop cut off was never judged and counts as not drafted."""
        num_accepted_tokens = min(verified.num_accepted_tokens, num_kept)
        was_cut = num_kept < len(verified.token_ids)
        num_draft_tokens = num_accepted_tokens if was_cut else len(draft.token_ids)
        for stats in (request.stats, self._tally.by_proposer[draft.proposer]):
            stats.record(num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens)
        self._parts.controller.observe_draft(
            request.request_id,
            draft.proposer,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
        )

    def _read_along(self, plan: StepPlan, *, has_offers: bool) -> None:
        """Lets the draft model read what was prefilled while it is in use, and remembers full blocks.

        Requests that it has missed too much of catch up one by one, where that is all a probe waits for.
        """
        prefilled = [s.request for s in plan.scheduled if s.num_tokens > 1 and s.request.block_table]
        controller, proposers = self._parts.controller, self._parts.proposers
        if controller.may_follow(self._scheduler.num_running, has_offers=has_offers):
            started = self._clock()
            if controller.is_on(DRAFT_MODEL):
                proposers.follow(prefilled)
            proposers.catch_up([r for r in self._scheduler.running if r.is_decoding])
            controller.observe_follow(self._clock() - started)
        for request in prefilled:
            self._scheduler.remember_full_blocks(request)

    def _count_step(
        self,
        plan: StepPlan,
        drafts: Mapping[str, Draft],
        verified: Sequence[Verified],
        *,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        tally = self._tally
        num_draft_tokens = sum(len(d.token_ids) for d in drafts.values())
        batch_size = len(plan.scheduled)
        tally.num_steps += 1
        tally.draft_seconds += draft_seconds
        tally.verify_seconds += verify_seconds
        tally.last_batch_size = batch_size
        tally.last_batch_tokens = sum(s.num_tokens for s in plan.scheduled) + num_draft_tokens
        tally.last_draft_length = num_draft_tokens / batch_size
        if any(s.num_tokens > 1 for s in plan.scheduled):
            return  # a step with prefill says nothing of what decoding costs
        self._parts.controller.observe_step(
            batch_size=batch_size,
            draft_lengths=[(d.proposer, len(d.token_ids)) for d in drafts.values()],
            num_output_tokens=sum(len(v.token_ids) for v in verified),
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
        )

    def _forget(self, request: Request) -> None:
        self._scheduler.remove(request)
        self._parts.proposers.release(request)
        self._parts.controller.forget(request.request_id)
        del self._requests[request.request_id]
        del self._outputs[request.request_id]

    def statistics(self) -> EngineStatistics:
        """A picture of now; cheap enough for every step."""
        scheduler, tally, controller = self._scheduler, self._tally, self._parts.controller
        by_proposer = tally.by_proposer
        return EngineStatistics(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage_ratio=scheduler.pool.num_held / scheduler.pool.num_blocks,
            kv_blocks_used=scheduler.pool.num_held,
            kv_blocks_total=scheduler.pool.num_blocks,
            num_steps=tally.num_steps,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            prompt_tokens=tally.prompt_tokens,
            generation_tokens=tally.generation_tokens,
            drafts={name: s.drafts for name, s in by_proposer.items()},
            draft_tokens={name: s.draft_tokens for name, s in by_proposer.items()},
            accepted_tokens={name: s.accepted_tokens for name, s in by_proposer.items()},
            accepted_tokens_per_position={
                name: tuple(s.accepted_tokens_per_position) for name, s in by_proposer.items()
            },
            speculation_active=controller.is_active and bool(self._parts.proposers.names),
            speculation_speedup=controller.speedup,
            draft_length=tally.last_draft_length,
            fallbacks=dict(controller.fallbacks),
            draft_seconds=tally.draft_seconds,
            verify_seconds=tally.verify_seconds,
            last_batch_size=tally.last_batch_size,
            last_batch_tokens=tally.last_batch_tokens,
        )


def _check_logits(runner: Runner, role: str) -> None:
    """Raises `ModelError` for a model that would answer noise without any sign of it.

    Overwrites the first block of the cache, which must be unused.
    """
    logits = runner.forward([SequenceInput(token_ids=(0,), start=0, block_table=(0,), num_logits=1)])
    if not bool((logits < math.inf).all()):  # nor is NaN
        raise ModelError(
            f"models.{role}_model: its first logits are no numbers; its weights are damaged, "
            "or its dtype is too narrow for them"
        )


def _room(request: Request) -> int:
    """The longest draft that could still become output: one more token always follows it."""
    return request.num_remaining_tokens - 1


def _target_input(item: ScheduledRequest, drafts: Mapping[str, Draft]) -> SequenceInput:
    request = item.request
    committed = request.token_ids[request.target_len : request.target_len + item.num_tokens]
    draft = drafts.get(request.request_id)
    drafted = draft.token_ids if draft is not None else ()
    return SequenceInput(
        token_ids=[*committed, *drafted],
        start=request.target_len,
        block_table=request.block_table,
        num_logits=len(drafted) + 1 if item.samples else 0,
    )


def _logprobs(
    raw: Tensor | None, tasks: Sequence[VerifyTask], verified: Sequence[Verified]
) -> dict[str, list[TokenLogprobs]]:
    """What the target's unprocessed logits say about each verified token, by request id."""
    result: dict[str, list[TokenLogprobs]] = {}
    start = 0
    for task, outcome in zip(tasks, verified, strict=True):
        count = task.request.spec.sampling.logprobs
        if raw is not None and count is not None and outcome.token_ids:
            rows = raw[start : start + len(outcome.token_ids)]
            values = top_logprobs(rows, outcome.token_ids, count)
            result[task.request.request_id] = token_logprobs(outcome.token_ids, values)
        start += task.num_rows
    return result
