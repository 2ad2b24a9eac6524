"""The device's busy time is the sum of its steps' times, whenever the host looks."""

from __future__ import annotations

import time

import torch

from pagerunner.runner.device_clock import DeviceClock


class Device:
    """Does what was launched when `now` has come to it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queued = 0.0
        self.events: list[FakeEvent] = []


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        device.events.append(self)

    def record(self) -> None:
        self.at = max(self.device.queued, self.device.now)

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        assert self.query() and end_event.query(), "a real event would raise"
        return 1e3 * (end_event.at - self.at)


def launch(clock: DeviceClock, device: Device, seconds: float, number: int = 0) -> None:
    with clock.step(number):
        device.queued = max(device.queued, device.now) + seconds


def test_steps_count_when_they_are_done_and_gaps_do_not() -> None:
    device = Device()
    clock = DeviceClock(lambda: FakeEvent(device))
    launch(clock, device, 2)
    launch(clock, device, 3)  # two in flight: no gap
    assert clock.busy_seconds == 0
    assert clock.steps_done == 0
    device.now = 2.5
    assert clock.steps_done == 1, "whoever looks first counts it"
    assert clock.busy_seconds == 2
    device.now = 7
    assert clock.busy_seconds == 5
    launch(clock, device, 1)
    device.now = 9
    assert clock.busy_seconds == 6


def test_events_are_used_again() -> None:
    device = Device()
    clock = DeviceClock(lambda: FakeEvent(device))
    for _ in range(50):
        launch(clock, device, 1)
        launch(clock, device, 1)
        device.now += 2
    assert clock.busy_seconds == 100
    assert len(device.events) <= 6


def test_the_seconds_of_each_step_are_taken_once_and_never_waited_for() -> None:
    device = Device()
    clock = DeviceClock(lambda: FakeEvent(device))
    launch(clock, device, 2, 7)
    launch(clock, device, 3, 8)
    assert clock.take_timed() == []
    device.now = 3.0
    assert clock.take_timed() == [(7, 2.0)]
    device.now = 5.0
    assert clock.take_timed() == [(8, 3.0)]
    assert clock.take_timed() == []
    for number in range(1000):  # nobody takes them
        launch(clock, device, 1, number)
        device.now += 1
    assert len(clock.take_timed()) < 100


def test_a_cpu_is_timed_by_the_host() -> None:
    clock = DeviceClock.of(torch.device("cpu"))
    begun = time.perf_counter()
    with clock.step():
        time.sleep(0.02)
    assert 0.02 <= clock.busy_seconds <= time.perf_counter() - begun
