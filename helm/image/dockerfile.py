"""Reads a Dockerfile and its .dockerignore, and says what is wrong with them: `problems(path, context)`.

What is read is what this project's file uses: no parser directives, here-documents, ONBUILD or ADD; they are refused.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "LABEL", "RUN", "USER", "WORKDIR")
PREDEFINED = frozenset({"PATH", "HOME"})
"""Variables that a base has of its own."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_REFERENCE = re.compile(r"(?P<name>[a-z0-9./_-]+)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?")


class DockerfileError(ValueError):
    """The file cannot be read; the text names the line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its continuation lines joined."""

    line: int
    word: str
    text: str

    @property
    def exec_form(self) -> list[str] | None:
        """The words of `["a", "b"]`, or None for the shell form."""
        if not self.text.startswith("["):
            return None
        words = json.loads(self.text)
        if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise DockerfileError(f"line {self.line}: {self.word} is no list of texts")
        return words


@dataclass(slots=True)
class Stage:
    """What stands between one FROM and the next."""

    line: int
    base: str
    """As written: a reference with variables, or the name of another stage."""
    name: str
    body: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> Instruction | None:
        """The last instruction of a kind: the one that counts."""
        return next((one for one in reversed(self.body) if one.word == word), None)


@dataclass(slots=True)
class Dockerfile:
    """A file's arguments before the first FROM, with their defaults, and its stages."""

    arguments: dict[str, str | None]
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        """The stage of a name. Raises `DockerfileError`."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise DockerfileError(f"there is no stage {name}; there are {', '.join(stage.name for stage in self.stages)}")

    def finals(self) -> list[Stage]:
        """Stages that no other copies from or builds on: those that become images."""
        used = {stage.base for stage in self.stages} | {
            name for stage in self.stages for one in stage.body if one.word == "COPY" and (name := copied(one)[0])
        }
        return [stage for stage in self.stages if stage.name not in used]


def parse(text: str) -> Dockerfile:
    """Read a Dockerfile. Raises `DockerfileError`."""
    file = Dockerfile({}, [])
    for one in _instructions(text):
        if one.word == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", one.text)
            if match is None:
                raise DockerfileError(f"line {one.line}: FROM needs `BASE AS NAME`, and says {one.text!r}")
            file.stages.append(Stage(one.line, match[1], match[2]))
        elif file.stages:
            file.stages[-1].body.append(one)
        elif one.word == "ARG":
            file.arguments.update(argument(one))
        else:
            raise DockerfileError(f"line {one.line}: {one.word} stands before the first FROM")
    return file


def _instructions(text: str) -> Iterator[Instruction]:
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("#") or not line:
            continue
        start = start if pending else number
        pending = f"{pending} {line}".strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip()
            continue
        word, _, rest = pending.partition(" ")
        if word not in KNOWN:
            raise DockerfileError(f"line {start}: {word} is none of {', '.join(KNOWN)}")
        yield Instruction(start, word, rest.strip())
        pending = ""
    if pending:
        raise DockerfileError(f"line {start}: the file ends within an instruction")


def argument(one: Instruction) -> dict[str, str | None]:
    """Name and default of an ARG, the default None if there is none."""
    name, equals, value = one.text.partition("=")
    return {name: (shlex.split(value)[0] if shlex.split(value) else "") if equals else None}


def copied(one: Instruction) -> tuple[str, list[str], str]:
    """The stage that a COPY takes from ("" is the build context), what it takes, and where it goes."""
    words = shlex.split(one.text)
    source = ""
    while words and words[0].startswith("--"):
        flag, _, value = words.pop(0).partition("=")
        if flag != "--from":
            raise DockerfileError(f"line {one.line}: COPY {flag} is not read here")
        source = value
    if len(words) < 2:
        raise DockerfileError(f"line {one.line}: COPY needs a source and a target")
    return source, words[:-1], words[-1]


def assignments(one: Instruction) -> dict[str, str]:
    """What an ENV or LABEL sets."""
    return dict(pair.split("=", 1) for pair in shlex.split(one.text))


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` with its variables; unknown ones become empty, as Docker has it."""
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def variables(text: str) -> set[str]:
    """Names of the variables of `text`."""
    return {match[1] or match[2] for match in _VARIABLE.finditer(text)}


def ignored(path: str, patterns: Sequence[str]) -> bool:
    """True if a .dockerignore keeps `path`, relative to the context, out of it: the last pattern that matches decides.

    A pattern matches a path or a folder above it; `*` stops at a slash, `**` does not; `!` takes back.
    """
    hidden = False
    parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    for pattern in patterns:
        body = pattern.removeprefix("!").strip("/")
        if any(re.fullmatch(_regex(body), each) for each in parents):
            hidden = not pattern.startswith("!")
    return hidden


def _regex(pattern: str) -> str:
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern)
    return "".join(parts.get(token) or re.escape(token) for token in tokens)


def read_ignore(path: Path) -> list[str]:
    """The patterns of a .dockerignore, in order."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def context_files(context: Path, source: str, patterns: Sequence[str]) -> list[Path]:
    """Files of the context that `COPY source` takes, relative to it."""
    found = []
    for place in sorted(context.glob(source)):
        inside = sorted(place.rglob("*")) if place.is_dir() else [place]
        found += [one.relative_to(context) for one in inside if one.is_file()]
    return [one for one in found if not ignored(str(one), patterns)]


def problems(file: Dockerfile, context: Path, patterns: Sequence[str]) -> list[str]:
    """Everything that is wrong, one line each: empty if the images can be built and run as the chart needs it."""
    found = list(_bases(file))
    for stage in file.stages:
        found += [*_variables(file, stage), *_sources(file, stage, context, patterns), *_scripts(stage, context)]
    for stage in file.finals():
        found += _final(file, stage)
    return found


def _bases(file: Dockerfile) -> Iterator[str]:
    names = {stage.name for stage in file.stages}
    for stage in file.stages:
        missing = variables(stage.base) - file.arguments.keys()
        if missing:
            absent = ", ".join(sorted(missing))
            yield f"line {stage.line}: FROM uses {absent}, which no ARG before the first FROM declares"
            continue
        base = expand(stage.base, {key: value or "" for key, value in file.arguments.items()})
        if base in names:
            continue
        if not variables(stage.base):
            yield f"line {stage.line}: the base {base} is fixed: let an ARG name it, so that it can be pinned by digest"
        match = _REFERENCE.fullmatch(base)
        if match is None:
            yield f"line {stage.line}: the base {base!r} is no image's name"
        elif not match["digest"] and match["tag"] in (None, "latest"):
            yield f"line {stage.line}: the base {base} has neither a version nor a digest"
        elif re.match(r"[^/]*[.:][^/]*/|localhost/", base):
            yield f"line {stage.line}: the base {base} names a registry's host: leave that to --build-arg"


def _variables(file: Dockerfile, stage: Stage) -> Iterator[str]:
    known = set(PREDEFINED)
    for one in stage.body:
        if one.word == "ARG":
            known |= argument(one).keys()
            inherited = one.text in file.arguments
            if None in argument(one).values() and not inherited:
                yield f"line {one.line}: ARG {one.text} has no default"
            continue
        missing = variables(one.text) - known if one.word != "RUN" else set()
        if missing:
            yield f"line {one.line}: {one.word} uses {', '.join(sorted(missing))}, which is not declared in its stage"
        if one.word == "ENV":
            known |= assignments(one).keys()


def _sources(file: Dockerfile, stage: Stage, context: Path, patterns: Sequence[str]) -> Iterator[str]:
    before = [other.name for other in file.stages[: file.stages.index(stage)]]
    for one in stage.body:
        if one.word != "COPY":
            continue
        source, paths, target = copied(one)
        if source and source not in before:
            yield f"line {one.line}: COPY takes from {source}, and no stage before has that name"
        elif not source:
            for path in paths:
                if not list(context.glob(path)):
                    yield f"line {one.line}: COPY takes {path}, which is not in the build context"
                elif not context_files(context, path, patterns):
                    yield f"line {one.line}: COPY takes {path}, of which .dockerignore leaves nothing"
            if len(paths) > 1 and not target.endswith("/"):
                yield f"line {one.line}: COPY takes several files, so its target {target} must end in /"


def _scripts(stage: Stage, context: Path) -> Iterator[str]:
    """Scripts of the context that a RUN starts must have been copied, and be executable."""
    at_hand = {path for one in stage.body if one.word == "COPY" and not copied(one)[0] for path in copied(one)[1]}
    for one in stage.body:
        first = one.text.split()[0] if one.word == "RUN" else ""
        if "/" not in first or first.startswith("/"):
            continue
        if not any(first == path or first.startswith(f"{path}/") for path in at_hand):
            yield f"line {one.line}: RUN starts {first}, which its stage has not copied"
        elif not (context / first).stat().st_mode & 0o111:
            yield f"line {one.line}: RUN starts {first}, which is not executable"


def _final(file: Dockerfile, stage: Stage) -> Iterator[str]:
    user, entry, command = stage.last("USER"), stage.last("ENTRYPOINT"), stage.last("CMD")
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", user.text) if user else None
    if match is None:
        # A name would not do: Kubernetes' runAsNonRoot compares numbers.
        yield f"stage {stage.name}: USER is {user.text if user else 'root'}, but must be numbers other than 0, UID:GID"
    for one in (entry, command):
        if one is not None and one.exec_form is None:
            yield f"line {one.line}: {one.word} must be a list: a shell would take the signals"
    if entry is None:
        yield f"stage {stage.name}: there is no ENTRYPOINT"
    for one in stage.body:
        if one.word == "COPY" and not copied(one)[0]:
            yield f"line {one.line}: COPY into the final stage {stage.name} from the build context: copy what was built"
        if one.word == "RUN" and "install.sh" in one.text:
            yield f"line {one.line}: the final stage {stage.name} installs: what installing leaves would be shipped"
        if one.word == "RUN" and "apt-get install" in one.text and "rm -rf /var/lib/apt/lists" not in one.text:
            yield f"line {one.line}: the package lists stay in a layer of the final stage {stage.name}"
