"""What a kubelet decides from a probe's answers, for the worst moment at which its clock may have started."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.k8s.pods import Probe


class Answer(NamedTuple):
    """One look at a probe's URL."""

    at: float
    """When it was asked, in seconds."""
    status: int
    """HTTP status; 0 if nothing answered."""
    seconds: float
    """How long the answer took."""


OPERATORS_LIVENESS = Probe("/live", 9090, period=5, timeout=4, failures=1)
"""What the Dynamo operator gives a worker; its golden files name it so."""


def succeeds(answer: Answer, probe: Probe) -> bool:
    """As Kubernetes counts: a status from 200 to 399 within the timeout."""
    return 200 <= answer.status < 400 and answer.seconds <= probe.timeout


def earliest_verdict(answers: Sequence[Answer], probe: Probe, good: bool = False) -> float | None:
    """When the kubelet first sees `failures` bad answers in a row (or `successes` good ones), None if never.

    Its looks are `period` apart, and nobody knows when the first one is: of all that are possible the earliest verdict.
    """
    verdicts = [at for start in _starts(answers, probe) if (at := _verdict(answers, probe, start, good)) is not None]
    return min(verdicts, default=None)


def latest_verdict(answers: Sequence[Answer], probe: Probe, good: bool = False) -> float | None:
    """The same for the unluckiest moment of the first look, None if with any there is no verdict."""
    verdicts = [_verdict(answers, probe, start, good) for start in _starts(answers, probe)]
    return None if not verdicts or None in verdicts else max(at for at in verdicts if at is not None)


def _starts(answers: Sequence[Answer], probe: Probe) -> list[float]:
    """Every first look that makes a difference: those within one period of the first answer."""
    first = answers[0].at + probe.initial_delay if answers else 0.0
    return [answer.at for answer in answers if first <= answer.at < first + probe.period]


def _verdict(answers: Sequence[Answer], probe: Probe, start: float, good: bool) -> float | None:
    wanted, row, look = (probe.successes if good else probe.failures), 0, start
    for answer in answers:
        if answer.at < look:
            continue
        row = row + 1 if succeeds(answer, probe) == good else 0
        if row == wanted:
            return answer.at
        look += probe.period
    return None
