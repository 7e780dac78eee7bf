"""Penalties and log probabilities of the CUDA lane in Triton's interpreter, against the CPU lane's definitions."""

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401
from engine.cuda.adjust import LogitsAdjuster
from engine.cuda.arena import DeviceArena
from engine.cuda.logprobs import MOST, DeviceLogprobs, Sizes, packed
from engine.cuda.sampling import DeviceSampler
from engine.kernels import sample as kernels
from engine.kernels import sample_space
from engine.messages import Sampling
from engine.penalties import penalize
from engine.plan import PlanError
from engine.step import Chunk, RowContext, RowStart, StepPlan

VOCAB, SLOTS = 1300, 6
PENALTIES = [
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.5, presence_penalty=-1.5),
    Sampling(frequency_penalty=0.7, presence_penalty=0.4),
    Sampling(frequency_penalty=-2.0),
    Sampling(repetition_penalty=1e-38),
]


class Inputs:
    """Slots and positions of sampled rows, as `StepInputs` has them."""

    def __init__(self, slots: list[int], positions: list[int]) -> None:
        self.staged = {"sampled_slots": torch.tensor(slots), "sampled_positions": torch.tensor(positions)}

    def sampled_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        return self.staged[name][begin:end]


def adjuster() -> LogitsAdjuster:
    arena = DeviceArena(torch.device("cpu"))
    LogitsAdjuster.reserve(arena, SLOTS, VOCAB)
    arena.allocate()
    return LogitsAdjuster(arena)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 4


def penalized(logits: torch.Tensor, context: RowContext, outputs: list[int], sampling: Sampling) -> np.ndarray:
    values = logits.numpy().copy()
    penalize(values, np.array(context.prompt, np.int64), np.array([*context.outputs, *outputs], np.int64), sampling)
    return values


@pytest.mark.parametrize("sampling", PENALTIES, ids=["repetition", "both", "counts", "reward", "extreme"])
def test_penalties_are_those_of_the_cpu_lane(sampling: Sampling) -> None:
    context = RowContext(prompt=[5, 9, 9, 700, 1299], outputs=[9, 31, 31, 31, 40])
    own, inputs = adjuster(), Inputs([4, 1], [10, 3])
    own.start([RowStart(1, Sampling(temperature=1.0)), RowStart(4, sampling, context)])
    drawn: list[int] = []
    for step, token in enumerate((31, 0, 5, 0)):
        logits = random_logits(2, seed=step)
        before = logits.clone()
        own.adjust(logits, inputs, slice(0, 2))
        np.testing.assert_allclose(logits[0].numpy(), penalized(before[0], context, drawn, sampling), rtol=3e-6)
        assert torch.equal(logits[1], before[1])
        own.keep(inputs, slice(0, 2), torch.tensor([token, 31], dtype=torch.int32))
        drawn.append(token)


def test_suppressed_tokens_come_back_at_their_position() -> None:
    own, context = adjuster(), RowContext(suppressed=[3, 3, 1200], suppressed_until=12)
    own.start([RowStart(2, Sampling(min_tokens=2), context)])
    for position in (10, 11, 12):
        logits = random_logits(1)
        before = logits.clone()
        own.adjust(logits, Inputs([2], [position]), slice(0, 1))
        changed = (logits != before).nonzero()[:, 1].tolist()
        assert changed == ([3, 1200] if position < 12 else [])
        assert torch.isneginf(logits[0, changed]).all()


def test_a_suppressed_token_may_be_penalized_too() -> None:
    own = adjuster()
    context = RowContext(prompt=[7, 8], outputs=[7], suppressed=[7], suppressed_until=5)
    sampling = Sampling(repetition_penalty=2.0, frequency_penalty=1.0)
    own.start([RowStart(0, sampling, context)])
    for position in (4, 5):
        logits = random_logits(1)
        expected = penalized(logits[0], context, [], sampling)
        own.adjust(logits, Inputs([0], [position]), slice(0, 1))
        assert float(logits[0, 7]) == (-np.inf if position < 5 else pytest.approx(expected[7]))
        assert float(logits[0, 8]) == pytest.approx(expected[8])


def test_a_slot_is_clean_for_its_next_request_and_others_keep_theirs() -> None:
    own, plain = adjuster(), Sampling()
    sampling, context = PENALTIES[0], RowContext(prompt=[1, 2, 3])
    own.start([RowStart(0, sampling, context), RowStart(1, sampling, context)])
    for starts in ([RowStart(0, plain)], [RowStart(0, sampling, RowContext(prompt=[50]))]):
        own.start(starts)
        logits = random_logits(2)
        before = logits.clone()
        own.adjust(logits, Inputs([0, 1], [9, 9]), slice(0, 2))
        changed = (logits != before).nonzero().tolist()
        assert [token for row, token in changed if row == 0] == ([] if starts[0].context is None else [50])
        assert [token for row, token in changed if row == 1] == [1, 2, 3]


def test_only_steps_that_sample_such_rows_are_changed() -> None:
    own = adjuster()

    def adjusts(decode: dict[int, int], *chunks: Chunk) -> bool:
        return own.adjusts(StepPlan(0, [], [], list(decode), list(decode.values()), list(chunks)))

    assert not adjusts({0: 5})
    own.start([RowStart(0, PENALTIES[0], RowContext(prompt=[1])), RowStart(1, Sampling(), RowContext((), (), [4], 20))])
    assert adjusts({0: 500})
    assert adjusts({1: 19})
    assert not adjusts({1: 20, 2: 3})
    assert adjusts({}, Chunk(1, 10, [1] * 5, True))
    assert not adjusts({}, Chunk(1, 10, [1] * 5, False))
    own.start([RowStart(0, Sampling())])
    assert not adjusts({0: 500})


def test_more_marks_than_fit_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.adjust._MARKS", 16)
    own, sampling = adjuster(), Sampling(presence_penalty=1.0, repetition_penalty=1.1)
    context = RowContext(prompt=list(range(0, 200, 3)), outputs=[*range(0, 100, 2), 6, 8, 8])
    own.start([RowStart(3, sampling, context)])
    logits = random_logits(1)
    expected = penalized(logits[0], context, [], sampling)
    own.adjust(logits, Inputs([3], [400]), slice(0, 1))
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=3e-6)


def reader(vocab: int = VOCAB, rows: int = 8) -> DeviceLogprobs:
    arena = DeviceArena(torch.device("cpu"))
    DeviceSampler.reserve(arena, rows, vocab)
    DeviceLogprobs.reserve(arena, Sizes(SLOTS, rows, rows, vocab))
    arena.allocate()
    return DeviceLogprobs(arena, DeviceSampler(arena), vocab)


def check(result: object, logits: torch.Tensor, targets: list[int], top: int) -> None:
    """Against log_softmax in float64; equal ones in the order of tokens."""
    expected = logits.double().log_softmax(-1).numpy()
    own, ids, values = (
        np.frombuffer(part, kind)
        for part, kind in zip(
            (result.own, result.top_ids, result.top),
            (np.float32, np.int32, np.float32),
            strict=True,  # type: ignore[attr-defined]
        )
    )
    np.testing.assert_allclose(own, expected[range(len(targets)), targets], atol=1e-5)
    order = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :top]
    assert ids.reshape(order.shape).tolist() == order.tolist()
    np.testing.assert_allclose(values.reshape(order.shape), np.take_along_axis(expected, order, 1), atol=1e-5)


@pytest.mark.parametrize("top", [0, 1, 5])
def test_log_probabilities_of_a_prompt(top: int) -> None:
    logits, targets = random_logits(3, seed=top), [0, 1299, 640]
    logits[2] *= 0.01
    check(reader().read_now(logits, targets, top), logits, targets, top)


@pytest.mark.parametrize("limits", [(1024, 8192), (4, 2048), (4, 8)], ids=["few", "many", "more"])
def test_log_probabilities_among_equal_logits(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]) -> None:
    monkeypatch.setattr(kernels, "FEW", limits[0])
    monkeypatch.setattr(sample_space, "MANY", limits[1])
    logits = random_logits(3, 300).round()
    logits[1] = 0.0
    logits[2, 5] = -torch.inf
    check(reader(300).read_now(logits, [0, 299, 7], 6), logits, [0, 299, 7], 6)


def test_all_of_a_small_vocabulary() -> None:
    logits = random_logits(2, 12)
    check(reader(12).read_now(logits, [3, 4], MOST), logits, [3, 4], 12)


def test_sampled_rows_that_want_log_probabilities_get_them() -> None:
    own, logits = reader(), random_logits(3)
    own.start([RowStart(0, Sampling(logprobs=3)), RowStart(2, Sampling()), RowStart(5, Sampling(logprobs=0))])
    slots, tokens = [5, 2, 0], [17, 18, 19]
    assert own.wishes(slots) == {0: 0, 2: 3}
    inputs: object = Inputs(slots, [4, 4, 4])
    own.read(logits, inputs, slice(0, 3), torch.tensor(tokens, dtype=torch.int32), 1)  # type: ignore[arg-type]
    fetched = own.fetch(1, 3)
    for place, top in own.wishes(slots).items():
        check(packed(fetched[place : place + 1], top), logits[place : place + 1], tokens[place : place + 1], top)
    assert not fetched[1].any()
    own.start([RowStart(0, Sampling()), RowStart(2, Sampling(logprobs=1))])
    assert own.wishes(slots) == {0: 0, 1: 1}


def test_more_of_the_likeliest_than_there_is_room_for_are_refused() -> None:
    for plan in (
        StepPlan(0, [RowStart(3, Sampling(logprobs=MOST + 1))], [], [], [], []),
        StepPlan(0, [], [], [], [], [Chunk(3, 0, [1], False, [1], MOST + 1)]),
    ):
        with pytest.raises(PlanError, match=f"row 3.*{MOST + 1}.*{MOST}"):
            DeviceLogprobs.check(plan)
