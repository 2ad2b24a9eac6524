"""Takes the tokens of a step: which requests end, which pages become findable, and what each request is told."""

from __future__ import annotations

from collections.abc import Sequence as Ids

from pagerunner.sched.request import Sequence
from pagerunner.sched.state import SchedulerState
from pagerunner.types import NO_TOKEN_ALLOWED, FinishReason, RequestUpdate, StepPlan, StepResult, StepRow, TokenLogprobs


def commit(state: SchedulerState, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
    """Take the tokens of the oldest plan in flight. Returns one update per request that got something."""
    expected, sequences = state.in_flight.popleft()
    assert expected.step_id == plan.step_id == result.step_id, "plans are committed in the order of their making"
    updates: list[RequestUpdate] = []
    more = bool(result.errors or result.prompt_logprobs or result.pooled)
    logprobs, drafted, drafts = result.logprobs, result.drafted, state.counts.spec is not None
    for number, (row, sequence, token_ids) in enumerate(zip(plan.rows, sequences, result.token_ids, strict=True)):
        sequence.in_flight -= 1
        sequence.pending -= row.samples
        if sequence.finished:
            continue
        if drafts and row.num_tokens > len(token_ids) and not row.tokens and sequence.grant is not None:
            sequence.scheduled -= row.num_tokens - len(token_ids)  # drafts that were wrong
        try:
            if more and (update := _end_row(state, sequence, row, number, result)) is not None:
                updates.append(update)
            elif row.samples:
                own = logprobs.get(number) if logprobs else None
                tried = _drafted(state, token_ids, drafted.get(number)) if drafted else None
                ahead, error = result.drafts.get(number, ()), result.errors.get(number)
                updates.append(_append(state, sequence, token_ids, own, tried, ahead, error))
        except Exception as error:
            state.distrust(sequence, row.start)
            updates.append(state.fail(sequence, "continued", error))
    return updates


def _end_row(
    state: SchedulerState, sequence: Sequence, row: StepRow, number: int, result: StepResult
) -> RequestUpdate | None:
    """Take what only some rows have: a fault, log-probabilities of the prompt, a vector.

    Returns an update if it ends the sequence.
    """
    if number in result.errors:
        error = result.errors[number]
        if error == NO_TOKEN_ALLOWED:  # the request's own doing, after the tokens that are there
            return None
        state.distrust(sequence, 0)  # any page that the row has read may be the wrong one
        return state.update(sequence, "error", error=error)
    if number in result.prompt_logprobs:
        sequence.add_prompt_logprobs(row, result.prompt_logprobs[number])
    if number in result.pooled:
        return state.update(sequence, "stop", pooled=result.pooled[number])
    return None


def _drafted(state: SchedulerState, token_ids: list[int], drafted: int | None) -> tuple[int, int] | None:
    """How many tokens were drafted for a row, and how many of them were right, which is counted. None if it had no drafts."""
    if not drafted:
        return None
    accepted = len(token_ids) - 1
    if state.counts.spec is not None:
        state.counts.spec.add(drafted, accepted)
    return drafted, accepted


def _append(
    state: SchedulerState,
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    drafted: tuple[int, int] | None,
    drafts: Ids[int],
    error: str | None,
) -> RequestUpdate:
    """Append sampled tokens up to the one that ends the sequence; it has failed behind them if there is an `error`. `drafted` goes with them, and
    `drafts` are those of the next row, if they are told."""
    tokens = sequence.tokens
    known = len(tokens)
    reason: FinishReason | None = None
    stop: int | None = None
    for token in token_ids:
        tokens.append(token)
        if token in sequence.stop_ids or len(tokens) >= sequence.max_total:
            reason, stop = sequence.finish_reason(token)
            if reason is not None:
                token_ids = token_ids[: len(tokens) - known]
                logprobs = logprobs[: len(token_ids)] if logprobs is not None else None
                break
    state.counts.generated += len(token_ids)
    if sequence.text is not None and sequence.text.end == known:  # else its prompt is still being taken up
        sequence.text.extend(token_ids)
    grant = sequence.grant
    if grant is not None and grant.asks_again:
        grant.passed = max(grant.passed, known)  # where the state was after the step's first token
    # the next row in flight begins with the last token
    if grant is not None and sequence.scheduled >= grant.next_publish:
        state.manager.publish(grant, tokens, len(tokens) - (not sequence.pending))
    if reason is not None:
        return state.update(sequence, reason, token_ids=token_ids, stop=stop, logprobs=logprobs, drafted=drafted)
    if error is not None:
        field = "structured_outputs"
        return state.update(sequence, "error", token_ids=token_ids, logprobs=logprobs, error=error, param=field)
    if sequence.guide is not None:
        if state.host_drafter is not None:
            drafts = sequence.host_drafts = state.guess(sequence, sequence.drafts)
        sequence.guide.advance(token_ids, drafts)
    if sequence.reported:
        return RequestUpdate(
            request_id=sequence.request_id,
            new_token_ids=token_ids,
            logprobs=logprobs,
            num_preemptions=sequence.preemptions,
            drafted=drafted,
        )
    return state.update(sequence, token_ids=token_ids, logprobs=logprobs, drafted=drafted)
