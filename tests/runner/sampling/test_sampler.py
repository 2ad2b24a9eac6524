"""The sampler as the runner uses it: slots, positions, seeds, log-probabilities, rows that fail."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from pagerunner.errors import InvalidRequestError
from pagerunner.ops.logprobs import gather_logprobs
from pagerunner.runner.sampling import Sampler
from pagerunner.runner.sampling.slots import AllowedIds
from pagerunner.types import SamplingParams
from runner.sampling.support import fill, one_sampler, sample

V = 50


def logits(rows: int, seed: int = 0, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_most_likely_token() -> None:
    sampler = one_sampler(V, *[SamplingParams(temperature=0)] * 33)
    batch = logits(33)
    sampled = sample(sampler, batch.clone(), list(range(33)), [3] * 33)
    assert sampled.token_ids.dtype == torch.int64
    assert sampled.read() == (batch.argmax(-1).tolist(), [None] * 33)
    assert sampled.errors == {}


def test_seeded_tokens_do_not_depend_on_batch_slot_or_neighbours() -> None:
    params = [
        SamplingParams(),
        SamplingParams(top_p=0.9, top_k=20),
        SamplingParams(min_p=0.1, temperature=1.7),
        SamplingParams(top_p=0.7, repetition_penalty=1.2),
    ]
    alone: list[list[int]] = []
    for seed, each in enumerate(params):
        sampler = Sampler(1, V, "cpu")
        fill(sampler, 0, each, seed=seed)
        alone.append([sample(sampler, logits(1, step), [0], [3 + step]).read()[0][0] for step in range(70)])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]):
        sampler = Sampler(9, V, "cpu")
        for row, which in enumerate(order):
            fill(sampler, 2 * row, params[which], seed=which)
        fill(sampler, 7, SamplingParams(temperature=0, logit_bias={4: 50.0}))
        slots = [7] + [2 * row for row in range(4)]
        together = [
            sample(sampler, logits(1, step).repeat(5, 1), slots, [3 + step] * 5).read()[0] for step in range(70)
        ]
        for row, which in enumerate(order):
            assert [tokens[row + 1] for tokens in together] == alone[which]


def test_different_seeds_and_positions_give_different_tokens() -> None:
    sampler = one_sampler(V, *[SamplingParams(temperature=5.0)] * 2)
    steps = [sample(sampler, torch.zeros(2, V), [0, 1], [3 + step] * 2).read()[0] for step in range(20)]
    first, second = zip(*steps, strict=True)
    assert first != second and len(set(first)) > 8


def test_subset_and_order_of_slots() -> None:
    sampler = one_sampler(V, SamplingParams(temperature=0, logit_bias={5: 99.0}), SamplingParams(temperature=0))
    batch = logits(2)
    best = batch.argmax(-1).tolist()
    assert sample(sampler, batch.clone(), [1, 0], [3, 3]).read()[0] == [best[0], 5]
    assert sample(sampler, batch[:1].clone(), [1], [3]).read()[0] == [best[0]]
    assert sample(sampler, batch[:1].clone(), [0], [3]).read()[0] == [5]


@pytest.mark.parametrize("other", [SamplingParams(), SamplingParams(logprobs=2), SamplingParams(presence_penalty=1.5)])
def test_a_mask_of_none_allows_everything(other: SamplingParams) -> None:
    """A grammar that begins behind a thought has none before it ends."""
    batch = logits(3)
    each = [SamplingParams(temperature=0), other, SamplingParams(temperature=0)]

    def tokens(masks: dict[int, list[bytes | None]] | None) -> list[int]:
        sampler = one_sampler(V, *each)
        return sample(sampler, batch.clone(), [0, 1, 2], [3] * 3, masks).read()[0]

    assert tokens({1: [None]}) == tokens(None)
    only_5 = (1 << 5).to_bytes(8, "little")
    both = tokens({0: [None], 2: [only_5]})
    assert both[2] == 5 and both[:2] == tokens(None)[:2]


def test_a_slot_forgets_its_former_request() -> None:
    heavy = SamplingParams(
        temperature=0,
        repetition_penalty=3.0,
        frequency_penalty=2.0,
        logit_bias={1: 50.0},
        allowed_token_ids=[1, 2],
        min_tokens=5,
        logprobs=3,
    )
    sampler = Sampler(1, V, "cpu")
    fill(sampler, 0, heavy, output=[1, 1, 2], eos_token_ids=(2,), bad_words_ids=((1, 2),))
    for step in range(3):
        sample(sampler, logits(1), [0], [6 + step])
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, presence_penalty=1.0)):
        fill(sampler, 0, params, prompt=[7])
        fresh = Sampler(1, V, "cpu")
        fill(fresh, 0, params, prompt=[7])
        for step in range(4):
            used = sample(sampler, logits(1, step), [0], [1 + step]).read()
            assert used == sample(fresh, logits(1, step), [0], [1 + step]).read()
            assert used[1] == [None]


def test_alternatives_of_equal_logits_do_not_depend_on_what_others_ask_for() -> None:
    """In bfloat16 many logits are equal."""
    for seed in range(20):
        batch = logits(4, seed, 5000).bfloat16().float()
        alone = gather_logprobs(batch, None, batch.argmax(1), 3)[0][:, 1:]
        assert alone.shape == (4, 3)
        wanted = [sorted(range(5000), key=lambda token: (-row[token], token)) for row in batch.tolist()]
        for others in (4, 8, 20):
            beside = gather_logprobs(batch, None, batch.argmax(1), others)[0][:, 1:]
            assert beside.shape == (4, others) and torch.equal(beside[:, :3], alone)
            values = batch.gather(1, beside.long())
            assert torch.equal(values, batch.gather(1, torch.tensor(wanted)[:, :others]))
            later = values[:, 1:] == values[:, :-1]
            assert (beside.diff()[later] > 0).all(), "of equal logits the first comes first"
    assert gather_logprobs(batch, None, batch.argmax(1), 0)[0].shape == (4, 1)


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(logprobs=4, temperature=0.7, repetition_penalty=1.5, logit_bias={3: 9.0}, top_k=3)
    sampler = one_sampler(
        V, SamplingParams(), params, SamplingParams(temperature=0, logprobs=0), SamplingParams(logprobs=2)
    )
    batch = logits(4)
    tokens, found = sample(sampler, batch.clone(), [0, 1, 2, 3], [3] * 4).read()
    assert found[0] is None
    expected = torch.log_softmax(batch.double(), dim=-1)
    for row, count in ((1, 4), (2, 0), (3, 2)):
        entry = found[row]
        order = expected[row].argsort(descending=True).tolist()
        assert entry is not None and entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
        assert entry.rank == order.index(tokens[row]) + 1
        assert entry.top_ids == order[:count]
        assert entry.top_logprobs == pytest.approx(expected[row, order[:count]].tolist(), abs=1e-5)
    assert found[2] is not None and found[2].rank == 1


def test_logprobs_stay_raw_when_every_row_reports_them() -> None:
    sampler = one_sampler(V, SamplingParams(temperature=0, logprobs=1, logit_bias={7: 90.0}))
    batch = logits(1)
    tokens, [entry] = sample(sampler, batch.clone(), [0], [3]).read()
    assert tokens == [7] and entry is not None
    assert entry.logprob == pytest.approx(torch.log_softmax(batch, -1)[0, 7].item(), abs=1e-5)
    assert entry.top_ids == [int(batch.argmax())]


def test_a_greedy_token_that_ties_is_shown_first() -> None:
    sampler = one_sampler(300, SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=0, logprobs=5))
    tied = torch.full((2, 300), -1.0)
    tied[:, 100:250] = 3.0
    tokens, found = sample(sampler, tied, [0, 1], [3, 3]).read()
    for token, entry, count in zip(tokens, found, (2, 5), strict=True):
        assert entry is not None
        assert (entry.rank, entry.top_ids[0], len(set(entry.top_ids))) == (1, token, count)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_broken_logits_fails_alone(temperature: float, bad: float) -> None:
    filters = {"temperature": temperature, "logprobs": 1}
    rows = [SamplingParams(**filters), SamplingParams(top_p=0.5, top_k=3, **filters), SamplingParams(**filters)]
    sampler, clean = one_sampler(V, *rows), one_sampler(V, *rows)
    batch = logits(3)
    good = sample(clean, batch.clone(), [0, 1, 2], [3] * 3).read()[0]
    batch[1, 17] = bad
    sampled = sample(sampler, batch, [0, 1, 2], [3] * 3)
    assert list(sampled.errors) == [1] and "NaN" in sampled.errors[1]
    tokens = sampled.read()[0]
    assert [tokens[0], tokens[2]] == [good[0], good[2]]
    assert 0 <= tokens[1] < V


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_say_nothing_fails_alone(temperature: float) -> None:
    sampler = Sampler(2, V, "cpu")
    fill(sampler, 0, SamplingParams(temperature=temperature, allowed_token_ids=[4]), bad_words_ids=((4,),))
    fill(sampler, 1, SamplingParams(temperature=temperature, allowed_token_ids=[4]))
    sampled = sample(sampler, logits(2), [0, 1], [3, 3])
    assert list(sampled.errors) == [0] and "allowed_token_ids" in sampled.errors[0]
    tokens = sampled.read()[0]
    assert tokens[1] == 4 and 0 <= tokens[0] < V


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (SamplingParams(logit_bias={V: 1.0}), {}),
        (SamplingParams(allowed_token_ids=[1, V]), {}),
        (SamplingParams(min_tokens=1, stop_token_ids=[V]), {}),
        (SamplingParams(), {"bad_words_ids": ((1, V),)}),
        (SamplingParams(presence_penalty=1.0), {"prompt": [1, V]}),
    ],
)
def test_a_request_with_ids_outside_the_vocabulary_fails_alone(params: SamplingParams, fields: dict) -> None:
    sampler = Sampler(2, V, "cpu")
    fill(sampler, 0, params, **fields)
    fill(sampler, 1, SamplingParams(temperature=0))
    batch = logits(2)
    sampled = sample(sampler, batch.clone(), [0, 1], [3, 3])
    assert list(sampled.errors) == [0] and f"token id {V}, outside the vocabulary of {V}" in sampled.errors[0]
    assert sampled.read()[0][1] == batch[1].argmax()
    fill(sampler, 0, SamplingParams(temperature=0))
    assert sample(sampler, batch.clone(), [0, 1], [3, 3]).errors == {}


def test_extreme_penalties_and_temperatures_stay_finite() -> None:
    rows = [
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(repetition_penalty=1e300, temperature=1e308),
        SamplingParams(min_p=1e-300, top_p=1e-300),
    ]
    sampler = one_sampler(V, *rows)
    assert sample(sampler, logits(3), [0, 1, 2], [3] * 3).errors == {}


def test_logits_of_another_stride() -> None:
    sampler = one_sampler(V, *[SamplingParams(temperature=0, logit_bias={3: 0.5}, repetition_penalty=1.1)] * 2)
    wide = logits(2, vocab=V + 14)
    tokens = sample(sampler, wide[:, :V], [0, 1], [3, 3]).read()[0]
    fresh = one_sampler(V, *[SamplingParams(temperature=0, logit_bias={3: 0.5}, repetition_penalty=1.1)] * 2)
    assert tokens == sample(fresh, wide[:, :V].clone(), [0, 1], [3, 3]).read()[0]


def test_state_bytes_is_what_is_allocated() -> None:
    sampler = Sampler(5, V, "cpu")
    held = [value for value in vars(sampler).values() if isinstance(value, torch.Tensor)] + [sampler.settings.words]
    assert sum(t.numel() * t.element_size() for t in held) == Sampler.state_bytes(5, V)


def test_siblings_share_their_allowed_tokens_as_long_as_one_holds_them() -> None:
    ids = AllowedIds(100, torch.device("cpu"))
    wanted = SamplingParams(allowed_token_ids=[1, 2]).allowed_token_ids
    assert wanted is not None
    first = ids.tensor(wanted)
    assert ids.tensor(wanted) is first and first.tolist() == [2**1 + 2**2, 0, 0, 0]
    assert ids.tensor((31, 32, 99)).tolist() == [-(2**31), 2**0, 0, 2**3]
    gone = weakref.ref(ids.tensor(wanted))
    assert gone() is None, "nothing is kept for requests that have ended"
    with pytest.raises(InvalidRequestError, match="allowed_token_ids holds token id 100"):
        ids.tensor((5, 100))


def test_more_odd_rows_than_are_changed_at_once_keep_their_own_ways() -> None:
    """Penalised, reporting and plain rows in one step of hundreds."""
    kinds = [
        SamplingParams(temperature=0, logit_bias={9: 99.0}),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=1, allowed_token_ids=[3, 4]),
    ]
    sampler = one_sampler(V, *kinds * 100)
    batch = logits(400)
    tokens, found = sample(sampler, batch.clone(), list(range(400)), [3] * 400).read()
    best = batch.argmax(-1).tolist()
    assert tokens[0::4] == [9] * 100 and tokens[1::4] == best[1::4] and tokens[2::4] == best[2::4]
    assert set(tokens[3::4]) == {3, 4}
    assert [entry is not None for entry in found] == [False, True, False, True] * 100
    raw = torch.log_softmax(batch, -1)
    for row in (1, 3, 65, 67, 397, 399):
        entry = found[row]
        assert entry is not None and entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(raw[row, tokens[row]].item(), abs=1e-5)
        assert entry.top_ids == batch[row].topk(2 if row % 4 == 1 else 1).indices.tolist()


def test_only_rows_that_ask_for_more_are_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagerunner.runner.sampling import sampler as module

    rows: list[int] = []
    original = module.sample
    monkeypatch.setattr(module, "sample", lambda x, *more: rows.append(len(x)) or original(x, *more))
    sampler = one_sampler(
        V, SamplingParams(), SamplingParams(presence_penalty=1.0), SamplingParams(logprobs=1), SamplingParams(top_k=3)
    )
    fill(sampler, 3, SamplingParams(min_tokens=2, stop_token_ids=[5], max_tokens=9), seed=3)
    for position, expected in ((3, [4, 2]), (4, [4, 2]), (5, [4, 1])):
        rows.clear()
        sample(sampler, logits(4), [0, 1, 2, 3], [position] * 4)
        assert rows == expected
    fill(sampler, 1, SamplingParams(top_p=0.5), seed=1)
    rows.clear()
    assert len(sample(sampler, logits(4), [0, 1, 2, 3], [6] * 4).logprob_rows) == 1 and rows == [4]
