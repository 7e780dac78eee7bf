"""The chart's manifests as files, so that what a change of a template does can be read in its diff.

`python -m tests.helm.golden` writes them anew.
"""

from pathlib import Path

from tests.helm.chart import Render, cases

FOLDER = Path(__file__).with_name("golden")


def manifest(path: Path, mode: str) -> str:
    """What is rendered of one file of values, without the lines that helm leaves empty."""
    lines = Render(values=(path,), mode=mode).text().splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


def main() -> None:
    """Write all files and remove those of cases that are gone."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {FOLDER / f"{name}.yaml": manifest(path, mode) for name, path, mode in cases()}
    for path in set(FOLDER.glob("*.yaml")) - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
