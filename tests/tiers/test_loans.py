"""Loans end by release, by time or all together, and give their pages back once, when nobody reads them."""

from __future__ import annotations

import random

import pytest

from helpers.effort import effort
from pagerunner.tiers.loans import Loans

PAGES = {(0, b"a"): memoryview(b"xx"), (1, b"b"): memoryview(b"yyy")}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def world() -> tuple[Loans, Clock, list[tuple[bytes, str]]]:
    ends: list[tuple[bytes, str]] = []
    clock = Clock()
    return Loans(lambda token, why: ends.append((token, why)), clock), clock, ends


def test_a_loan_ends_when_its_time_is_up(world) -> None:
    loans, clock, ends = world
    token = loans.lend(PAGES, 30)
    clock.now += 29.9
    loans.tick()
    with loans.reading(token) as loan:
        assert loan is not None and loan.pages == PAGES
    clock.now += 0.2
    with loans.reading(token) as loan:
        assert loan is None, "its time was up, though nobody had looked yet"
    assert not loans.renew(token) and not loans.release(token) and not ends
    loans.tick()
    assert ends == [(token, "expired")] and not len(loans) and loans.num_expired == 1


def test_one_that_is_being_read_gives_its_pages_back_afterwards(world) -> None:
    loans, clock, ends = world
    token = loans.lend(PAGES, 30)
    with loans.reading(token), loans.reading(token) as loan:
        clock.now += 31
        loans.tick()
        assert loan.ended == "expired" and not ends
        with loans.reading(token) as other:
            assert other is None
        loans.end_all("sleep")
        assert not ends
    assert ends == [(token, "expired")]


def test_a_renewed_one_lasts_and_does_not_hide_those_behind_it(world) -> None:
    loans, clock, ends = world
    first, second = loans.lend(PAGES, 30), loans.lend(PAGES, 31)
    clock.now += 20
    assert loans.renew(first)
    clock.now += 12
    loans.tick()
    assert ends == [(second, "expired")]
    clock.now += 19
    loans.tick()
    assert ends[1:] == [(first, "expired")]


def test_nobody_can_keep_a_loan_for_ever(world) -> None:
    loans, clock, ends = world
    token = loans.lend(PAGES, 30)
    renewals = 0
    while loans.renew(token):
        renewals += 1
        clock.now += 29
        assert renewals < 1_000
    loans.tick()
    assert ends == [(token, "expired")] and clock.now - 100 <= 30 * Loans.MOST + 29


def test_each_ends_once_and_is_readable_until_then_whatever_happens(world) -> None:
    loans, clock, ends = world
    draw = random.Random(effort(3, 4))
    until: dict[bytes, float] = {}
    readers: list = []
    for _ in range(effort(1_500, 20_000)):
        match draw.randrange(7):
            case 0:
                seconds = draw.choice([1, 5, 30])
                until[loans.lend(PAGES, seconds)] = clock.now + seconds
            case 1 if until:
                reader = loans.reading(token := draw.choice(list(until)))
                loan = reader.__enter__()
                assert (loan is not None) == (until[token] > clock.now)
                readers += [(reader, token)] if loan is not None else []
            case 2 if readers:
                readers.pop(draw.randrange(len(readers)))[0].__exit__(None, None, None)
            case 3 if until:
                token = draw.choice(list(until))
                assert loans.release(token) == (until[token] > clock.now)
                until[token] = 0.0
            case 4:
                clock.now += draw.random()
                loans.tick()
            case 5 if draw.random() < 0.02:
                loans.end_all("sleep")
                until = dict.fromkeys(until, 0.0)
            case 6 if len(until) > 20:
                until.pop(next(iter(until)))
        read = [token for _, token in readers]
        assert not {token for token, _ in ends} & set(read), "pages were given back while they were read"
    for reader, _ in readers:
        reader.__exit__(None, None, None)
    loans.end_all("end")
    assert len(ends) == len({token for token, _ in ends}) and not len(loans)
