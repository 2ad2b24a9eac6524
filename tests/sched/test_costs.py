"""The model of costs: right soon, right after a change, and not misled by what happens to a step."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import msgspec
import pytest

from helpers.device_costs import KEY_BYTES, Device
from pagerunner.sched.costs import CostModel
from pagerunner.types import StepPlan, StepRow
from pagerunner.types.steps import StepShape, pairs_of


def some_shape(generator: random.Random) -> StepShape:
    rows = generator.randint(1, 256)
    keys = rows * generator.randint(100, 4000)
    if generator.random() < 0.5:
        return StepShape(rows, rows, keys, 0)
    chunk, start = generator.randint(16, 2048), generator.choice([0, 0, 1000, 16_000])
    return StepShape(rows + 1, rows + chunk, keys, pairs_of(start, chunk), decode=False)


def errors(model: CostModel, device: Device, count: int = 200) -> list[float]:
    """By how much the model is wrong, of shapes that it may never have seen; the smallest errors first."""
    generator = random.Random(7)
    shapes = [some_shape(generator) for _ in range(count)]
    return sorted(abs(model.seconds(shape) / device.seconds(shape) - 1) for shape in shapes)


def train(model: CostModel, device: Device, steps: int, seed: int = 3) -> None:
    generator = random.Random(seed)
    for number in range(steps):
        shape = some_shape(generator)
        model.planned(number, shape)
        model.timed([(number, device.run(shape))])


def test_a_shape_is_that_of_its_plan() -> None:
    rows = [StepRow(0, 999, 1, [], True), StepRow(1, 99, 1, [], True)]
    assert StepShape.of(StepPlan(step_id=0, rows=rows)) == StepShape(2, 2, 1100, 0)
    rows.append(StepRow(2, 1000, 100, [1] * 100, False))
    assert StepShape.of(StepPlan(step_id=0, rows=rows)) == StepShape(3, 102, 1100, 105_050, decode=False)
    assert sum(range(1001, 1101)) == pairs_of(1000, 100) == 105_050


def test_what_was_measured_at_the_start_prices_other_steps() -> None:
    device = Device()
    found = errors(CostModel(device.measured(), KEY_BYTES), device)
    assert found[len(found) // 2] < 0.1
    assert found[-1] < 0.5


def test_what_a_past_costs_is_learned_where_no_start_could_measure_it() -> None:
    device = Device()
    measured = device.measured()
    short = [(shape, seconds) for shape, seconds in measured.steps if shape.pairs < 10**6]  # max_model_len was 1,024
    model = CostModel(msgspec.structs.replace(measured, steps=short, bytes_per_second=0.0))
    train(model, device, 400)
    found = errors(model, device)
    assert found[len(found) * 9 // 10] < 0.15


def test_steps_refine_it() -> None:
    device = Device(noise=0.03)
    model = CostModel(device.measured(), KEY_BYTES)
    train(model, device, 400)
    found = errors(model, device)
    assert found[len(found) // 2] < 0.05
    assert found[len(found) * 9 // 10] < 0.15


def test_without_a_measurement_the_first_steps_say_it() -> None:
    device = Device()
    model = CostModel()
    assert model.seconds(StepShape(1, 1, 10, 0)) == 0
    model.learn(StepShape(1, 64, 0, pairs_of(0, 64), decode=False), 0.005)
    assert model.seconds(StepShape(1, 512, 0, 0, decode=False)) == pytest.approx(0.04, rel=0.05), (
        "in proportion: no less"
    )
    assert model.seconds(StepShape(8, 8, 0, 0)) > 0, "another kind of step is the best guess"
    train(model, device, 600)
    assert errors(model, device)[150] < 0.2


def test_a_late_step_hardly_counts_and_a_slower_device_does() -> None:
    device = Device()
    model = CostModel(device.measured(), KEY_BYTES)
    shape = StepShape(64, 64, 64_000, 0)
    for _ in range(50):
        model.learn(shape, device.seconds(shape))
    before = model.seconds(shape)
    model.learn(shape, 10.0)  # it slept, or a kernel was compiled
    assert before < model.seconds(shape) < 1.12 * before
    device.slow = 1.6
    for _ in range(20):
        model.learn(shape, device.seconds(shape))
    assert model.seconds(shape) == pytest.approx(device.seconds(shape), rel=0.1)
    device.slow = 0.8
    for _ in range(20):
        model.learn(shape, device.seconds(shape))
    assert model.seconds(shape) == pytest.approx(device.seconds(shape), rel=0.1)


def test_accidents_now_and_then_leave_it_right() -> None:
    device = Device(noise=0.03, accidents=0.02)
    model = CostModel(device.measured(), KEY_BYTES)
    train(model, device, 1000)
    found = errors(model, device)
    assert found[len(found) // 2] < 0.1


def test_more_is_never_cheaper() -> None:
    device = Device(noise=0.3)  # as if nothing could be measured
    model = CostModel(device.measured((1, 3)), KEY_BYTES)
    train(model, device, 300)
    for drafts in (0, 1, 3):
        seconds = [model.decode_seconds(rows, 1000, drafts) for rows in range(1, 300)]
        assert seconds == sorted(seconds)
    for sizes in (range(1, 257), range(257, 9000, 37)):
        seconds = [model.seconds(StepShape(4, tokens, 0, 0, decode=False)) for tokens in sizes]
        assert seconds == sorted(seconds)
    assert model.decode_seconds(9, 0) == model.decode_seconds(16, 0) < model.decode_seconds(250, 0), "the same graph"


def test_times_come_late_or_never() -> None:
    device = Device()
    model = CostModel(device.measured(), KEY_BYTES)
    for number in range(1000):
        model.planned(number, StepShape(1, 1, 1, 0))
    model.timed([(990, 0.0041), (991, 0.0), (5, 0.004), (-1, 1.0)])
    assert model.stats.measured_seconds_total == 0.0041, (
        "an unknown step, one long ago and one without a time count for nothing"
    )
    assert abs(model.stats.predicted_seconds_total - 0.0041) == pytest.approx(model.stats.error_seconds_total)
    assert len(model._planned) < 100


def test_an_interrupt_at_any_line_leaves_a_model_that_goes_on() -> None:
    """The model outlives an interrupted step, as `EngineCore.recover` makes the scheduler anew and not the model."""
    device = Device()
    shapes = [some_shape(random.Random(number)) for number in range(6)]

    def learn(line: int) -> tuple[CostModel, bool]:
        """A model whose learning is interrupted at its n-th line."""
        model, left = CostModel(), [line]

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if not frame.f_code.co_filename.endswith("sched/costs.py"):
                return None
            if event == "line":
                left[0] -= 1
                if left[0] < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            for number, shape in enumerate(shapes):
                model.planned(number, shape)
                model.timed([(number, device.seconds(shape))])
        except KeyboardInterrupt:
            return model, True
        finally:
            sys.settrace(None)
        return model, False

    line, interrupted = 0, True
    while interrupted:
        model, interrupted = learn(line)
        for _ in range(20):
            for shape in shapes:
                model.learn(shape, device.seconds(shape))
        wrong = [abs(model.seconds(shape) / device.seconds(shape) - 1) for shape in shapes]
        assert max(wrong) < 0.6, f"interrupted at line {line}"
        line += 1
    assert line > 100
