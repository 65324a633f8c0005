from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.yaml_lines import read_yaml
from pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ": found nothing; a config is a mapping"),
        ("- a\n- b\n", ":1: found a list; a config is a mapping"),
        ("\njust text\n", ":2: found a single value; a config is a mapping"),
        ("name: x\n\trows: 1\n", ":2: not YAML: found character '\\t'"),
        ("name: x\nmodel: {a: 1\n", ":3: not YAML: expected ',' or '}'"),
        ("name: x\n---\nname: y\n", ":2: not YAML: but found another document"),
        ("name: &a [*a]\n", ":1: an anchor that contains itself"),
        ("name: *nowhere\n", ":1: not YAML: found undefined alias"),
        ("name: x\nrows: 1\nname: y\n", ":3: name: given twice, first on line 1; keep one"),
        ("model:\n  kwargs:\n    a: {b: 1, b: 2}\n", ":3: model.kwargs.a.b: given twice, first on"),
        ("name: x\n1: y\n", ":2: a key must be text, found 1; quote it"),
        ("? [a, b]\n: y\n", ":1: a key must be text, found a list; quote it"),
        ("name: !!python/name:os.system\n", ":1: the tag tag:yaml.org,2002:python/name:os.system"),
        ("name: !!int x\n", ":1: 'x' is not of the type tag:yaml.org,2002:int"),
        ("name: " + "[" * 1000, ": not YAML: too deep"),
        ("name: a\0b\n", ": not YAML: "),
    ],
)
def test_what_is_no_mapping_in_plain_yaml(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}{says}")
    assert "\n" not in str(caught.value)


def test_a_small_file_cannot_unfold_into_a_huge_one(tmp_path: Path) -> None:
    levels = [f"  k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]" for i in range(1, 9)]
    text = "\n".join(["model:", "  k0: &k0 [x, x]", *levels])
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match="more than 100000 entries"):
        read_yaml(tmp_path / "c.yaml")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: is not a plain file"):
        read_yaml(tmp_path)
    (tmp_path / "c.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: is not UTF-8 text: byte 6"):
        read_yaml(tmp_path / "c.yaml")


def test_plain_scalars_follow_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "{a: 1e-5, b: no, c: 010, d: 2024-01-01, e: 0x10, f: 1:30, g: .5, h: ~, i: -3, j: 1.,"
        " k: -.inf, l: TRUE, m: '1', n: 0o17, o: }"
    )
    assert read_yaml(path).data == {
        "a": 1e-5,
        "b": "no",
        "c": 10,
        "d": "2024-01-01",
        "e": 16,
        "f": "1:30",
        "g": 0.5,
        "h": None,
        "i": -3,
        "j": 1.0,
        "k": float("-inf"),
        "l": True,
        "m": "1",
        "n": 15,
        "o": None,
    }


def test_lines_of_keys_items_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# comment\n\na:\n  b:\n    - 1\n    - c: >\n        folded\n")
    document = read_yaml(path)
    assert document.data == {"a": {"b": [1, {"c": "folded\n"}]}}
    keys = [(), ("a",), ("a", "b"), ("a", "b", 0), ("a", "b", 1), ("a", "b", 1, "c")]
    assert [document.line(key) for key in keys] == [3, 3, 4, 5, 6, 6]
    assert document.line(("a", "b", 1, "nothing", "here")) == 6
    assert document.line(("z",)) == 3
