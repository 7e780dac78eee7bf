"""Looks at chat templates as far as that needs no conversation: size, type, syntax. Nothing is rendered here. No torch.

Dynamo's frontend renders them, sandboxed, with an implementation of its own; one that it cannot compile only shows as a
model that never appears. The syntax is Jinja's with the tags that published templates use.
"""

from pathlib import Path

import msgspec

from engine.models.files import SIZE_LIMITS, ModelError, read_file, read_json

TEMPLATE_FILE, TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
LIMIT = SIZE_LIMITS[TEMPLATE_FILE]
"""Most bytes of a template; published ones have up to some 20,000."""


class _Named(msgspec.Struct):
    name: str
    template: str


class _Holder(msgspec.Struct):
    """What tokenizer_config.json and chat_template.json say of templates."""

    chat_template: str | list[_Named] | None = None


def has_chat_template(directory: Path) -> bool:
    """True if the model says how a conversation becomes a prompt."""
    if any((directory / name).is_file() for name in (TEMPLATE_FILE, TEMPLATE_JSON)):
        return True
    return read_json(directory / "tokenizer_config.json", _Holder).chat_template is not None


def check_templates(directory: Path) -> None:
    """Raise `ModelError` for a template of the directory that is too large, of the wrong type or not valid."""
    path = directory / TEMPLATE_FILE
    if path.exists() or path.is_symlink():
        check_template_file(path)
    for name in ("tokenizer_config.json", TEMPLATE_JSON):
        path = directory / name
        if path.exists() or path.is_symlink():
            found = read_json(path, _Holder).chat_template
            for template in found if isinstance(found, list) else () if found is None else (_Named("", found),):
                _check(f"{path}: chat_template{f' {template.name!r}' if template.name else ''}", template.template)


def check_template_file(path: Path) -> None:
    """The same for a file that holds a template and nothing else."""
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is no UTF-8 text ({error.reason} at byte {error.start})") from None
    _check(f"{path}", text)


def _check(what: str, text: str) -> None:
    if len(text.encode(errors="surrogatepass")) > LIMIT:
        raise ModelError(f"{what}: has {len(text)} characters, but at most {LIMIT} bytes are taken")
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """`{% generation %}`, which marks what a model is trained on."""

        tags = {"generation"}  # noqa: RUF012 - the interface of Jinja

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # Parsed, never compiled or rendered: no code comes of it.
    environment = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do", Generation])  # noqa: S701
    try:
        environment.parse(text)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"{what}: line {error.lineno}: {error.message}; correct it, or set custom_jinja_template to another one"
        ) from None
    except RecursionError:
        raise ModelError(f"{what}: is nested too deeply; set custom_jinja_template to another template") from None
