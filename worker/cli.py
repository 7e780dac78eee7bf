"""The console script `pagelane`: a worker, a stack on this machine, what a worker takes, a model's import, modules."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

USAGE = """usage: pagelane COMMAND ...

  pagelane up --config FILE [...]        a Dynamo frontend and workers on this machine
  pagelane worker --model DIR [...]      one worker, to run behind a frontend of your own
  pagelane plan --config FILE [...]      what a worker takes of a GPU, and whether it starts, without a GPU
  pagelane import MODEL.gguf DIR         make a model directory of a GGUF file
  pagelane prebuild --config FILE [...]  compile a worker's GPU modules ahead, without a GPU

pagelane up --help and pagelane worker --help list all settings."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 1 for a failure, 2 for a command line that cannot be used."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] == ["worker"]:
        from worker.serve import run

        run(words[1:])
    commands: dict[str, Callable[[list[str]], int]] = {
        "up": _up,
        "worker": _worker,
        "plan": _plan,
        "import": _import,
        "prebuild": _prebuild,
    }
    if words and words[0] in commands:
        return commands[words[0]](words[1:])
    if words and words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    print(USAGE, file=sys.stderr)
    return 2


def _up(argv: list[str]) -> int:
    from worker.launch import main as launch

    return launch(argv)


def _worker(argv: list[str]) -> int:
    from worker.serve import main as serve

    return serve(argv)


def _plan(argv: list[str]) -> int:
    from worker.plan import main as plan

    return plan(argv)


def _prebuild(argv: list[str]) -> int:
    from worker.prebuild import main as prebuild

    return prebuild(argv)


def _import(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0].startswith("-"):
        print("usage: pagelane import MODEL.gguf DIR", file=sys.stderr)
        return 2
    from engine.models.gguf_import import import_gguf
    from worker.process import failed

    try:
        import_gguf(Path(argv[0]), Path(argv[1]))
    except (ValueError, OSError) as error:
        return failed(error, 1)
    print(f"wrote {argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
