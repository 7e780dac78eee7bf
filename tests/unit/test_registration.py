"""A worker that nobody can find any more says so, and one that can be found never does."""

import asyncio

import pytest

from worker.registration import RegistrationWatch, registration_lost


class Time:
    """A clock that is told how long each period took."""

    def __init__(self, *periods: float) -> None:
        self.periods = iter(periods)
        self.now = 0.0
        self.first = True

    def __call__(self) -> float:
        if not self.first:
            self.now += next(self.periods, 0.5)
        self.first = False
        return self.now


class Discovery:
    """Answers each look with the next of `answers`, at last with the last for ever."""

    def __init__(self, *answers: list[int] | None) -> None:
        self.answers = list(answers)
        self.looks = 0

    def instance_ids(self) -> list[int]:
        self.looks += 1
        if self.answers[0] is None:
            self.answers.pop(0)
            raise ConnectionError("no discovery")
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def watch(time: Time) -> RegistrationWatch:
    return RegistrationWatch(period_s=0.0, lost_after_s=3.0, lease_s=10.0, clock=time)


async def test_a_registration_that_has_gone_for_good_is_lost():
    discovery = Discovery([], [7], [7, 8], [8])
    assert "not been in discovery for 3.0 s" in await registration_lost(discovery, 7, watch(Time()))
    assert discovery.looks == 3 + 6, "looked for 3 s at 0.5 s each before it was sure"


async def test_one_that_never_appears_is_lost_after_a_longer_while():
    discovery = Discovery([8])
    assert "not been in discovery for 60.0 s" in await registration_lost(discovery, 7, watch(Time()))
    assert discovery.looks == 120


@pytest.mark.parametrize(
    "answers", [([7],), (*[[8]] * 100, [7]), ([7], [], [7], [], [], [7]), ([7], *[None] * 20, [7])]
)
async def test_one_that_is_late_or_comes_back_is_not_lost(answers):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(registration_lost(Discovery(*answers), 7, watch(Time())), 0.05)


async def test_a_process_that_stood_still_longer_than_its_lease_has_lost_it():
    discovery = Discovery([7])
    reason = await registration_lost(discovery, 7, watch(Time(0.5, 9.9, 0.5, 31.0)))
    assert "stood still for 31 s" in reason
    assert discovery.looks == 3
