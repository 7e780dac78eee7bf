"""Ways to break a model folder, and what each must be refused with."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], None]


def field(name: str, value: Any, file: str = "config.json") -> Change:
    """Give a key of a JSON file another value."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return change


def without(name: str, file: str = "config.json") -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != name}))

    return change


def raw(file: str, content: bytes | str) -> Change:
    """Replace a file."""
    return lambda folder: void((folder / file).write_bytes(content if isinstance(content, bytes) else content.encode()))


def void(_: object) -> None:
    """Nothing."""


def pipe(file: str) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return change


def link(file: str, target: str) -> Change:
    """Make a file a link; with `keep` the target is the file itself, moved out of the folder."""

    def change(folder: Path) -> None:
        path = folder / file
        if target == "outside":
            moved = folder.parent / f"outside-{file}"
            if path.exists():
                path.rename(moved)
            else:
                moved.write_text("{}")
            path.symlink_to(moved)
        else:
            path.unlink(missing_ok=True)
            path.symlink_to(target)

    return change


def read_weights(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_weights(folder: Path, header: bytes, data: bytes, file: str = WEIGHTS) -> None:
    (folder / file).write_bytes(struct.pack("<Q", len(header)) + header + data)


def tensor(name: str, **facts: Any) -> Change:
    """Change what the header says of a tensor."""

    def change(folder: Path) -> None:
        header, data = read_weights(folder)
        header[name] = header.get(name, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}) | facts
        write_weights(folder, json.dumps(header).encode(), data)

    return change


def twice(name: str) -> Change:
    """Let a tensor stand twice in the header, with different places."""

    def change(folder: Path) -> None:
        header, data = read_weights(folder)
        text = json.dumps(header)[:-1] + f', "{name}": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}}'
        write_weights(folder, text.encode(), data)

    return change


def swapped(folder: Path) -> None:
    """Two tensors of one shape in each other's place overlap nothing; half a tensor shifted does."""
    header, data = read_weights(folder)
    first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    header[second]["data_offsets"] = [place - 4 for place in header[second]["data_offsets"]]
    header[first]["data_offsets"] = list(header[second]["data_offsets"])
    write_weights(folder, json.dumps(header).encode(), data)


def cut(count: int) -> Change:
    return lambda folder: raw(WEIGHTS, (folder / WEIGHTS).read_bytes()[:count])(folder)


def huge_header(folder: Path) -> None:
    """A header of 64 MiB in a file that is large enough for it, and takes no room on the disk."""
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 64 << 20))
        file.truncate(65 << 20)


def padded(folder: Path) -> None:
    raw(WEIGHTS, (folder / WEIGHTS).read_bytes() + b"\0" * 64)(folder)


def sharded(where: Any, keep: bool = True) -> Change:
    """Put the weights in one shard that an index lists as `where` says: a name, or the whole weight_map."""

    def change(folder: Path) -> None:
        header, _ = read_weights(folder)
        mapped = dict.fromkeys((name for name in header if name != "__metadata__"), where)
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        if not keep:
            (folder / "a.safetensors").unlink()
        content = {"weight_map": mapped if isinstance(where, str) else where}
        (folder / INDEX).write_text(json.dumps(content))

    return change


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
DEEP = '{"a":' * 5000 + "1" + "}" * 5000
LONG_TEXT = "{{ x }}" * (1 << 16)

REFUSED: list[tuple[Change, str]] = [
    # config.json
    *[(field("hidden_size", value), r"config.json: .*hidden_size") for value in (-1, 0, 2**40, 2**70, 1.5, "16", [16])],
    *[(field("vocab_size", value), r"config.json: .*vocab_size") for value in (None, True, {"a": 1}, -(2**63))],
    (field("vocab_size", 321), r"embed_tokens.weight has shape \[320, 48\], but config.json asks for \[321, 48\]"),
    (field("num_attention_heads", 3), r"num_attention_heads|q_proj.weight has shape"),
    (both(field("num_attention_heads", 3), field("num_key_value_heads", 2)), r"is 3, .* no multiple .* 2"),
    (field("num_hidden_layers", 7), r"model\.layers\.1\..* are missing; config.json asks for \d+ tensors"),
    (field("num_hidden_layers", 1 << 10), r"are missing; config.json asks for \d+ tensors"),
    (field("head_dim", 7), r"head_dim is 7, but must be even"),
    (field("max_position_embeddings", 2**60), r"max_position_embeddings is \d+, but must be between 1 and"),
    (field("rope_parameters", {"rope_type": "x" * 100_000}), r"rope_type is 'xxx.*characters left out"),
    (field("rope_parameters", []), r"config.json: .*rope_parameters"),
    (field("rms_norm_eps", -1e-6), r"rms_norm_eps is -1e-06"),
    (field("architectures", [["LlamaForCausalLM"]]), r"which Pagelane does not serve"),
    (field("architectures", ["A" * 1_000_000]), r"characters left out.*supported: LlamaForCausalLM"),
    (field("architectures", ["\x1b[2J\u202e"]), r"which Pagelane does not serve"),
    (field("eos_token_id", 320), r"config.json: eos_token_id has 320, but the vocabulary has 320 tokens"),
    (field("eos_token_id", [2, -1]), r"config.json: eos_token_id has -1"),
    (field("eos_token_id", "2"), r"config.json: .*eos_token_id"),
    (raw("config.json", '{"vocab_size": NaN}'), r"config.json: "),
    (raw("config.json", b" " * (10 << 20)), r"config.json: has 10485760 bytes, but at most 1048576 are read"),
    (raw("config.json", DEEP), r"config.json: is nested too deeply"),
    (raw("config.json", '{"vocab_size": ' + "9" * 500_000 + "}"), r"config.json: .*out of range"),
    (raw("config.json", b"\xff\xfe"), r"config.json: "),
    (raw("config.json", b""), r"config.json: "),
    (pipe("config.json"), r"has no config.json"),
    (link("config.json", "outside"), r"config.json: is a link to .*outside-config.json, outside the model directory"),
    (link("config.json", "/dev/zero"), r"has no config.json"),
    (link("config.json", "config.json"), r"has no config.json"),
    # weights
    *[(cut(count), rf"not a complete safetensors file \({count} bytes\)") for count in (0, 7, 8, 9, 500, 60_000)],
    (padded, r"not a complete safetensors file"),
    *[
        (raw(WEIGHTS, struct.pack("<Q", size) + b"{}      "), r"not a complete safetensors file \(16 bytes\)")
        for size in (9, 1 << 27, 1 << 40, (1 << 64) - 1)
    ],
    (raw(WEIGHTS, struct.pack("<Q", 8) + b"[[[[[[[["), r"not a complete safetensors file"),
    (huge_header, r"model.safetensors: the header has 67108864 bytes, but at most 33554432 are read"),
    (tensor(NORM, data_offsets=[0, 192]), r"not a complete safetensors file"),
    (tensor(NORM, data_offsets=[1 << 40, (1 << 40) + 192]), r"not a complete safetensors file"),
    (tensor(NORM, data_offsets=[192, 0]), r"not a complete safetensors file"),
    (tensor(NORM, data_offsets=[-1, 4]), r"not a complete safetensors file"),
    (tensor(NORM, shape=[47]), r"not a complete safetensors file"),
    (tensor(NORM, shape=[24, 2]), r"model.norm.weight has shape \[24, 2\], but config.json asks for \[48\]"),
    (tensor(NORM, shape=[1 << 62, 4]), r"not a complete safetensors file"),
    (tensor(NORM, dtype="F16", shape=[96]), r"has shape \[96\], but config.json asks for \[48\]"),
    (tensor(NORM, dtype="I32"), r"model.norm.weight is of type I32; supported"),
    (tensor(NORM, dtype="PICKLE"), r"not a complete safetensors file"),
    (tensor("x", shape=[0, 1 << 63]), r"x is not expected|not a complete safetensors file"),
    (tensor("evil\x1b[31m\nname"), r"name is not expected"),
    (twice(NORM), r"not a complete safetensors file"),
    (swapped, r"not a complete safetensors file"),
    (pipe(WEIGHTS), r"has no model.safetensors"),
    (link(WEIGHTS, "outside"), r"model.safetensors: is a link to .*, outside the model directory"),
    # shards
    *[
        (sharded(name), r"index.json: weight_map names .*not a plain file name")
        for name in ("../model/a.safetensors", "/etc/passwd", "./a.safetensors", "a\0.safetensors", "", "..", "a.bin")
    ],
    (sharded("a.safetensors", keep=False), r"a.safetensors: no such file"),
    (both(sharded("a.safetensors"), pipe("a.safetensors")), r"a.safetensors: no such file"),
    (both(sharded("a.safetensors"), link("a.safetensors", "outside")), r"a.safetensors: is a link to"),
    (sharded({NORM: "a.safetensors", "no.such": "a.safetensors"}), r"no.such is listed in a.safetensors, but is not"),
    (sharded({}), r"is missing|are missing"),
    (sharded([1]), r"index.json: .*weight_map"),
    (sharded({NORM: 1}), r"index.json: .*weight_map"),
    (sharded({f"x{i}": f"{i}.safetensors" for i in range(100_000)}), r"safetensors: no such file"),
    (both(sharded("a.safetensors"), raw(INDEX, b" " * (20 << 20))), r"index.json: has 20971520 bytes, but at most"),
    (both(sharded("a.safetensors"), raw(INDEX, DEEP)), r"index.json: .*(weight_map|nested)"),
    # tokenizer
    *[(raw("tokenizer.json", text), r"tokenizer.json: is not a JSON object") for text in ("", "[", "[]", '{"a":', "1")],
    (raw("tokenizer.json", "{}"), r"tokenizer.json: is no tokenizer: .*; take the file from the model's publisher"),
    (raw("tokenizer.json", DEEP), r"tokenizer.json: is no"),
    (field("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}, "tokenizer.json"), r"is no tokenizer"),
    (field("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}, "tokenizer.json"), r"is no tokenizer"),
    (field("added_tokens", [{"id": "x"}], "tokenizer.json"), r"is no tokenizer"),
    (lambda folder: (folder / "tokenizer.json").unlink(), r"has no tokenizer.json"),
    (lambda folder: (folder / "tokenizer_config.json").unlink(), r"has no tokenizer_config.json"),
    (raw("tokenizer_config.json", b"{" + b" " * (17 << 20) + b"}"), r"tokenizer_config.json: has \d+ bytes"),
    (link("tokenizer.json", "outside"), r"tokenizer.json: is a link to"),
    (link("special_tokens_map.json", "outside"), r"special_tokens_map.json: is a link to"),
    (pipe("added_tokens.json"), r"added_tokens.json: is no regular file"),
    # sampling defaults and templates
    *[
        (field("eos_token_id", value, "generation_config.json"), r"generation_config.json: .*eos_token_id")
        for value in ("2", [[2]], 1.5, -1, 2**40, {"a": 2})
    ],
    *[
        (field(name, value, "generation_config.json"), rf"generation_config.json: .*{name}")
        for name, value in (("temperature", "hot"), ("top_k", 1.5), ("top_p", -1), ("do_sample", 1), ("min_p", 10**400))
    ],
    (raw("generation_config.json", DEEP), r"generation_config.json: is nested too deeply"),
    (raw("generation_config.json", "[]"), r"generation_config.json: "),
    (pipe("generation_config.json"), r"generation_config.json: is no regular file"),
    (link("generation_config.json", "/dev/zero"), r"generation_config.json: is a link to /dev/zero"),
    (link("generation_config.json", "generation_config.json"), r"generation_config.json: "),
    *[
        (field("chat_template", text, "tokenizer_config.json"), r"tokenizer_config.json: chat_template: .*line 1: ")
        for text in ("{% for m in messages %}", "{{", "{% if %}", "{% include 'x' ", "{% nonsense %}")
    ],
    (field("chat_template", "{{" + "(" * 5000, "tokenizer_config.json"), r"chat_template: is nested too deeply"),
    (field("chat_template", LONG_TEXT, "tokenizer_config.json"), r"chat_template: has 458752 characters, but at most"),
    (field("chat_template", {"a": 1}, "tokenizer_config.json"), r"tokenizer_config.json: .*chat_template"),
    (field("chat_template", [{"name": "x", "template": "{%"}], "tokenizer_config.json"), r"chat_template 'x': line 1"),
    (raw("chat_template.jinja", "{% if %}"), r"chat_template.jinja: line 1: .* set custom_jinja_template"),
    (raw("chat_template.jinja", b"\xff"), r"chat_template.jinja: is no UTF-8 text .* at byte 0"),
    (raw("chat_template.jinja", b" " * (1 << 20)), r"chat_template.jinja: has 1048576 bytes, but at most"),
    (pipe("chat_template.jinja"), r"chat_template.jinja: is no regular file"),
    (link("chat_template.jinja", "outside"), r"chat_template.jinja: is a link to"),
    (raw("chat_template.json", '{"chat_template": 1}'), r"chat_template.json: .*chat_template"),
]

SERVED: list[Change] = [
    lambda folder: None,
    field("unknown", {"deep": [[[[1]]]]}),
    lambda folder: (folder / "generation_config.json").unlink(),
    field("chat_template", "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}",
          "tokenizer_config.json"),
    field("chat_template", [{"name": "default", "template": "{{ messages }}"}], "tokenizer_config.json"),
    without("eos_token_id"),
    sharded("a.safetensors"),
    link("chat_template.jinja", "tokenizer_config.json"),
]  # fmt: skip
