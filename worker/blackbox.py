"""What is kept of an engine core that was lost: its last steps."""

import logging
import os
import tempfile
import time
from pathlib import Path

from engine import recorder
from engine.recorder import StepRecord

logger = logging.getLogger("pagelane.blackbox")


class BlackBox:
    """Memory that a core writes its steps to, and that this process can read after the core's end."""

    def __init__(self, directory: str | None) -> None:
        """`directory` is where a record is saved; None is the system's temporary directory."""
        self.descriptor = recorder.allocate()
        self._directory = Path(directory or tempfile.gettempdir())

    def save(self, pid: int) -> None:
        """Write what the core with process id `pid` has left to a file, and say in the log where and how it ends.

        A file that cannot be written (a full disk) costs no more than the file.
        """
        records = recorder.read(self.descriptor)
        if not records:
            return
        path = self._directory / f"pagelane-steps-{time.strftime('%Y%m%d-%H%M%S')}-{pid}.jsonl"
        where = str(path)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(recorder.as_lines(records))
        except OSError as error:
            where = f"nowhere ({path} cannot be written: {error.strerror})"
        logger.error(
            "the last %d steps of the engine core are in %s; they end: %s", len(records), where, _tail(records)
        )

    def close(self) -> None:
        """Give the memory back. May be called more than once."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _tail(records: list[StepRecord]) -> str:
    return "; ".join(_summary(record) for record in records[-3:])


def _summary(record: StepRecord) -> str:
    how = "not resolved" if record.total_us < 0 else f"{record.total_us} us"
    text = f"step {record.step}: {record.decode_rows} rows, {record.tokens} tokens, {how}"
    return f"{text}, {record.error}" if record.error else text
